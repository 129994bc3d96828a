"""Shared by the evaluator's tests: workers on the CPU target, and candidates with one thing wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target
from tools.evaluator import checks, checks_hidden, checks_memory, checks_values
from tools.evaluator.arena import Arena
from tools.evaluator.cases import CHECKS, Context, Tally
from tools.evaluator.grids import Grid, cells, grid
from tools.evaluator.guards import Guards
from tools.evaluator.runner import Runner
from tools.loader.build import Built, build

REGISTERED = (checks, checks_hidden, checks_memory, checks_values)
# The perturbed kernels load the honest library, which a confined worker could not read and the import check refuses.
UNCONFINED = frozenset({"sandbox", "imports"})
PERTURB = Path(__file__).parent / "controls" / "perturb.cpp"


def perturbed(folder: Path, honest: Built, fault: str) -> Path:
    """Source of a candidate that is the honest library with one fault."""
    path = folder / f"{fault}.cpp"
    path.write_text(f'#define HONEST "{honest.library}"\n#define PERTURB {fault}\n' + PERTURB.read_text())
    return path


class Bench:
    """The judge's side of the CPU target: memory, the honest library and the witness in workers."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self.target: Target = load_target("cpu")
        self.honest = build(self.target)
        self.arena = Arena("cpu", 1 << 28)
        self.witness = self.start("witness", build(self.target, role="witness"))
        self.grid: Grid = replace(grid("cpu", "quick"), witness_flop=2e6)

    def start(self, name: str, built: Built) -> Runner:
        runner = Runner(name, self.arena, self.timeout_s, guards=Guards(UNCONFINED))
        runner.hello()
        runner.load_library(str(built.library))
        return runner

    def candidate(self, fault: str) -> Built:
        return build(self.target, perturbed(self.folder, self.honest, fault))

    @contextlib.contextmanager
    def running(self, fault: str, name: str = "candidate") -> Iterator[Runner]:
        runner = self.start(name, self.candidate(fault))
        try:
            yield runner
        finally:
            runner.close()

    def context(self, candidate: Runner, **changes: Any) -> Context:
        workloads = self.target.config["workloads"]
        options: dict[str, Any] = {
            "arena": self.arena,
            "candidate": candidate,
            "witness": self.witness,
            "seed": 7,
            "grid": self.grid,
            "tile": self.target.config["contract"]["tile"],
            "cells": cells(workloads, 1),
            "heads": (workloads["heads_q"], workloads["heads_kv"]),
            "limits": self.target.config["limits"],
        }
        return Context(**{**options, **changes})

    def perform(self, check: str, candidate: Runner, **changes: Any) -> dict[str, Tally]:
        """The tallies of a check: its own, "witness" and "untouched"."""
        context = self.context(candidate, **changes)
        tally = context.perform(CHECKS[check])
        return {check: tally, "witness": context.witnessed, "untouched": context.untouched}

    def close(self) -> None:
        self.witness.close()
