"""Reports as the evaluator would write them, for runs of tests: every figure follows from samples that are made up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.evaluator import grids, objective, promotion
from tools.evaluator import report as reports
from tools.search import bridge
from tools.search.records import ROOT
from tools.search.run import Run

Record = dict[str, Any]
MACHINE = {"processor": "scripted processor", "cores": 8, "gpu": None}


def _measured(us: float, draw: random.Random) -> Record:
    """A kernel's samples of a cell: three passes of five calls, noise of 0.1 %."""
    samples = [us * (1 + draw.uniform(-0.001, 0.001)) for _ in range(15)]
    middle = sorted(samples)[7]
    return {
        "route": None,
        "samples_us": samples,
        "median_us": middle,
        "interval_us": [min(samples), max(samples)],
        "calls_per_sample": 1,
        "pass_us": [sum(samples[at : at + 5]) / 5 for at in (0, 5, 10)],
        "verified_outputs": 15,
        "verified_parts": 15,
        "accuracy": {"rms": 0.0017, "worst": 0.01, "rows": 10},
        "screened_us": {},
    }


def _session(workloads: Record, racers: dict[str, float], draw: random.Random) -> list[Record]:
    """One timed session: each racer takes its factor times 100 microseconds in every cell."""
    session = []
    for cell in grids.cells(workloads):
        kernels = {racer: _measured(100 * factor, draw) for racer, factor in racers.items()}
        cold = {
            **{"same_as": None, "calls": 5, "floor_us": 10.0, "unique_bytes": 1 << 20, "kernels": kernels},
            **{"baselines": {"sdpa_cpu": _measured(150, draw)}, "lost": {}, "best": None, "ratios": {}},
        }
        session.append(
            {
                **{"name": cell.name, "phase": cell.phase, "kind": cell.kind},
                **{"batch": cell.batch, "rows": cell.rows, "keys": cell.keys},
                "modes": {"cold": cold, "hot": {"same_as": "cold"}},
            }
        )
    reports.add_ratios(session)
    return session


def _build(role: str, sha256: str, files: dict[str, str]) -> Record:
    return {
        "source": f"{role}.cpp",
        "source_sha256": sha256,
        "files": {f"{role}.cpp": sha256, **files},
        "preprocessed_sha256": sha256,
        "library_sha256": sha256,
        "command": ["c++"],
        "resources": [{"kernel": "decode", "registers": 32}],
        "seconds": 1.0,
        "cached": False,
        "log": "",
    }


def scripted_report(
    run: Run, identity: str, status: str = "PASSED", speeds: dict[str, float] | None = None, seed: int = 0
) -> Record:
    """A report of an implementation beside root and incumbent. `speeds`: implementation -> its time in shares of the root's."""
    draw = random.Random(f"{identity} {seed}")
    target = run.target()
    found = reports.new(
        target,
        {
            "cases": "full",
            "seed": 1,
            "seed_given": False,
            "only": [],
            "timed": True,
            "command": ["evaluate.py"],
            "guards_off": [],
        },
    )
    found.update(status=status, reason=None if status == "PASSED" else f"scripted: {status}", environment=dict(MACHINE))
    found["run"]["seconds"] = 60.0
    of_source = {name: item.source["sha256"] for name, item in run.state.implementations.items()}
    headers = dict(target.config["kernel"]["files"])
    roles = {"candidate": identity}
    if identity != ROOT:
        roles.update(root=ROOT, incumbent=str(run.state.incumbent))
    found["builds"] = {role: _build(role, of_source[name], headers) for role, name in roles.items()}
    failures = [] if status == "PASSED" else [{"case": "decode B1 L128", "kind": "bits", "cell": "decode"}]
    check = {
        **{"name": "decode", "status": "failed" if failures else "passed", "reason": None, "faults": ["split"], "cases": 1},
        **{"words": 10, "differing": len(failures), "failed": len(failures), "failures": failures, "notes": {}},
        **{"seconds": 1.0, "slowest": []},
    }
    found["correctness"] = {"words": 10, "differing": len(failures), "checks": [check]}
    if status == "PASSED":
        _add_times(run, found, identity, roles, speeds or {}, draw)
    return found


def _add_times(run: Run, found: Record, identity: str, roles: Record, speeds: dict[str, float], draw: random.Random) -> None:
    config = run.target().config
    racers = {role: speeds.get(name, 1.0) for role, name in roles.items()}
    if "incumbent" in racers:
        racers["twin"] = racers["incumbent"]
    first, second = (_session(config["workloads"], racers, draw) for _ in range(2))
    root = {cell["name"]: objective.cold(cell, "root") for cell in first} if "root" in racers else None
    summary = objective.summary(config["objective"], first, root)  # type: ignore[arg-type]
    found["timing"] = {"unit": "microseconds a call", "cells": first, "geomeans": reports.geomeans(first), "again": []}
    found["objective"] = summary
    if root is None:
        return
    found["timing"]["again"] = [second]
    weights = {cell["name"]: cell["weight"] for cell in summary["cells"]}
    comparison = promotion.compare([first, second], weights)
    limit = config["limits"]["max_slowdown"]
    found["promotion"] = promotion.record([first, second], comparison, root, limit, [], True)  # type: ignore[arg-type]


class Scripted:
    """In place of the evaluator: `statuses` and `speeds` say what comes out for each implementation. Code is never compiled."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self.speeds: dict[str, float] = {}  # time in shares of the root's
        self.code = {"prefill": "changed", "extend": "changed", "decode": "changed"}
        self.evaluations = 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Scripted]:
        with mock.patch.object(bridge, "evaluate", self._evaluate), mock.patch.object(bridge, "code_identity", self._code):
            yield self

    def _evaluate(self, run: Run, identity: str, output: Path, show: Any) -> None:
        self.evaluations += 1
        self.write(run, identity, output)

    def write(self, run: Run, identity: str, output: Path) -> Path:
        """Write the report of an implementation as it would come out now."""
        reports.write(
            output, scripted_report(run, identity, self.statuses.get(identity, "PASSED"), self.speeds, self.evaluations)
        )
        return output

    def _code(self, run: Run, parent: bytes, child: bytes) -> dict[str, str]:
        return dict(self.code)
