"""Mutants one after the other through the correctness checks: built, judged in workers of their own, recorded.

    units = build_all(target, [None, *mutants], folder, print)
    for record in judged(Bench(target), units, print): ...

None is the unpatched kernel, the control. A mutant that does not apply, compile or answer gets a record of status
"error" with the reason; it never ends the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import sha256_bytes
from tools.evaluator import checks, checks_memory, checks_values, mutants
from tools.evaluator.arena import Arena
from tools.evaluator.cases import CHECKS, Check, Context, Tally
from tools.evaluator.grids import Cell, cells, grid
from tools.evaluator.mutants import Mutant
from tools.evaluator.runner import START_TIMEOUT_S, Runner, WorkerFailure
from tools.loader.build import Built, build

_REGISTERED = (checks, checks_memory, checks_values)  # importing them registers the checks
Progress = Callable[[str], None]
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 8 << 30}
LONGEST_ROWS, LONGEST_KEYS = {"cpu": 512, "cuda": 2048}, 4096  # of the workloads' cells that are checked
REPLY_TIMEOUT_S = 30.0  # of one command
MUTANT_TIMEOUT_S = 120.0
WORKERS_AHEAD = 2  # processes that start while an earlier mutant is judged
SEED = 20  # a fixed draw of inputs, so that a score can be repeated; an evaluation draws its own
GATE = "accuracy"
# What most mutants fail first comes first; every check counts.
EARLY = ("values", "lse", "extend", "every_length", "head_ratios", "packed")


@dataclass(frozen=True)
class Unit:
    """One candidate of a corpus: a mutant, or the control (None), with what its build gave."""

    mutant: Mutant | None
    source_sha256: str
    built: Built | None
    problem: str | None

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant else "honest"


@dataclass(frozen=True)
class Verdict:
    """What the checks say of one candidate. killed_by: {check, case, what}, or None where all pass."""

    subtle: bool
    witness_only: bool
    killed_by: dict[str, str] | None


class _Enough(Exception):
    """Ends a series of checks at its first failure."""


# ---------------------------------------------------------------- one candidate


class Bench:
    """The judge's side of one target: memory, the honest witness, and the checks to run."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # Waiting threads of torch spin, and take the processors from the workers: one thread makes a score twice as fast.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.device: str = target.config["target"]["device"]
        workloads = target.config["workloads"]
        self.heads = (int(workloads["heads_q"]), int(workloads["heads_kv"]))
        # The sizes of a quick run; as much is compared with the witness as in a full one.
        self.grid = replace(grid(self.device, "quick"), witness_flop=grid(self.device, "full").witness_flop)
        rows = LONGEST_ROWS[self.device]
        self.cells: list[Cell] = [c for c in cells(workloads) if c.batch == 1 and c.keys <= LONGEST_KEYS and c.rows <= rows]
        self.arena = Arena(self.device, CHUNK_BYTES[self.device])
        self._witness_built = build(target, role="witness")
        self.witness: Runner | None = None
        every = [item for item in CHECKS.values() if "library" not in item.needs]
        self.checks = sorted(every, key=lambda item: EARLY.index(item.name) if item.name in EARLY else len(EARLY))

    def start(self, name: str) -> Runner:
        """A worker that is getting ready; `_load` awaits it."""
        runner = Runner(name, self.arena, REPLY_TIMEOUT_S)
        runner.post("hello")
        return runner

    @staticmethod
    def _load(runner: Runner, library: Path) -> None:
        runner.settle("hello", START_TIMEOUT_S)
        runner.load_library(str(library))

    def judge(self, candidate: Runner, library: Path) -> Verdict:
        """All checks on a started worker. Raises WorkerFailure."""
        deadline = time.monotonic() + MUTANT_TIMEOUT_S
        self._load(candidate, library)
        with_gate = self._context(candidate, None, deadline, stop=False)
        gate = with_gate.perform(CHECKS[GATE])
        subtle = gate.inaccuracies == 0
        if found := _failure(with_gate):
            return Verdict(subtle, False, found)
        rest = [item for item in self.checks if item.name != GATE]
        if found := self._first_failure(candidate, rest, None, deadline):
            return Verdict(subtle, False, found)
        found = self._first_failure(candidate, self.checks, self._ready_witness(), deadline)
        return Verdict(subtle, found is not None, found)

    def _ready_witness(self) -> Runner:
        if self.witness is None or not self.witness.alive():
            self.witness = self.start("witness")
            self._load(self.witness, self._witness_built.library)
        return self.witness

    def _first_failure(
        self, candidate: Runner, items: list[Check], witness: Runner | None, deadline: float
    ) -> dict[str, str] | None:
        context = self._context(candidate, witness, deadline, stop=True)
        for item in items:
            with contextlib.suppress(_Enough):
                context.perform(item)
            if found := _failure(context):
                return found
        return None

    def _context(self, candidate: Runner, witness: Runner | None, deadline: float, *, stop: bool) -> Context:
        def progress(text: str) -> None:
            if time.monotonic() > deadline:
                raise WorkerFailure("TIMEOUT", candidate.name, f"more than {MUTANT_TIMEOUT_S:g} s, in {text}")
            if stop and _failure(context):
                raise _Enough

        context = Context(
            arena=self.arena,
            candidate=candidate,
            witness=witness,
            seed=SEED,
            grid=self.grid,
            tile=self.target.config["contract"]["tile"],
            cells=self.cells,
            heads=self.heads,
            limits=self.target.config["limits"],
            progress=progress,
        )
        return context

    def close(self) -> None:
        torch.set_num_threads(self._torch_threads)
        if self.witness is not None:
            self.witness.close()


def _failure(context: Context) -> dict[str, str] | None:
    """The first failure of a context's checks, the witness and the untouched memory among them."""
    tally: Tally
    for tally in (*context.tallies, context.witnessed, context.untouched):
        if tally.failed:
            first = tally.failures[0]
            name = tally.name if "check" not in first else f"{first['check']} ({tally.name})"
            return {"check": name, "case": str(first["case"]), "what": str(first["what"])}
    return None


# ---------------------------------------------------------------- many


def build_all(target: Target, units: list[Mutant | None], folder: Path, progress: Progress) -> list[Unit]:
    """Build the control and every mutant, as many at once as there are processors."""
    role = mutants.role_of(target, [mutant for mutant in units if mutant])
    suffix = target.source(role).suffix

    def one(mutant: Mutant | None) -> Unit:
        digest, built, problem = "", None, None
        try:
            text = mutants.candidate_source(target, mutant, role).encode()
            digest = sha256_bytes(text)
            path = folder / f"{mutant.name if mutant else 'honest'}{suffix}"
            path.write_bytes(text)
            built = build(target, path, role=role)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # one mutant must not end the run
            problem = _defect(error)
        return Unit(mutant, digest, built, problem)

    done = itertools.count(1)
    found = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for unit in pool.map(one, units):
            progress(f"{target.name}: built {next(done)} of {len(units)}: {unit.name}")
            found.append(unit)
    return found


def _defect(error: Exception) -> str:
    return " ".join(f"the evaluator failed: {type(error).__name__}: {error}".split())


def judged(bench: Bench, units: list[Unit], progress: Progress) -> Iterator[dict[str, Any]]:
    """One record a unit, in order. Workers start ahead of their turn; none outlives it."""
    runners: dict[int, Runner] = {}
    try:
        for number, unit in enumerate(units):
            for ahead in range(number, min(number + 1 + WORKERS_AHEAD, len(units))):
                if ahead not in runners and units[ahead].built is not None:
                    runners[ahead] = bench.start("candidate")
            record = _record(bench, unit, runners.get(number))
            progress(f"{bench.target.name}: {number} of {len(units) - 1}: {unit.name}: {record['status']}")
            if number in runners:
                runners.pop(number).kill()
            yield record
    finally:
        for runner in runners.values():
            runner.kill()


def _record(bench: Bench, unit: Unit, runner: Runner | None) -> dict[str, Any]:
    started = time.monotonic()
    verdict, problem = None, unit.problem
    if unit.built is not None and runner is not None:
        try:
            verdict = bench.judge(runner, unit.built.library)
        except (WorkerFailure, UserError) as failure:
            problem = str(failure)
        except Exception as failure:  # one mutant must not end the run
            problem = _defect(failure)
    killed_by = verdict.killed_by if verdict else None
    return {
        "name": unit.name,
        "status": "error" if verdict is None else "killed" if killed_by else "survived",
        "killed_by": killed_by,
        "problem": problem,
        "subtle": verdict.subtle if verdict else None,
        "witness_only": verdict.witness_only if verdict else None,
        "seconds": round(time.monotonic() - started, 2),
        "source_sha256": unit.source_sha256,
        **(
            {
                "fault": unit.mutant.fault,
                "kind": unit.mutant.kind,
                "entries": list(unit.mutant.entries),
                "expected_subtle": unit.mutant.subtle,
                "patch_sha256": unit.mutant.sha256,
            }
            if unit.mutant
            else {}
        ),
    }
