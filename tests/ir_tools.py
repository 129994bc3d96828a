"""Runs for tests without an evaluation: what an agent writes, what an evaluator would report, and whole runs of any length.

`Scripted` stands in for tools/evaluate.py: it writes reports whose figures follow from samples that it makes up, through the
evaluator's own functions, so that everything that reads reports is at work. `make_run` goes a shorter way for long runs:
audits whose fields are made up, beside reports of a few bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.core.config import load_target
from tools.evaluator import grids, objective, promotion
from tools.evaluator import report as reports
from tools.search import audits, bridge
from tools.search.create import create
from tools.search.records import ROOT
from tools.search.run import Run

Record = dict[str, Any]
MACHINE = {"processor": "scripted processor", "cores": 8, "gpu": None}
RISKS = dict.fromkeys(
    ("reduction_order", "scaling_and_masking", "instructions_constants_subnormals", "conversion_and_rescale_order"),
    "none: no arithmetic is touched",
)


# ---------------------------------------------------------------- what an agent writes


def opportunity(**other: Any) -> Record:
    """The body of an opportunity for the root; `other` replaces fields."""
    fields = {
        "direction": "wider-tiles",
        "mechanism": "Loads of keys are what decode waits for.",
        "workloads": ["decode"],
        "evidence": ["E0000"],
        "applies_to": [ROOT],
        "expected_share": 0.2,
    }
    return {**fields, **other}


def action(**other: Any) -> Record:
    """The body of an action on O0001 from the root."""
    fields = {
        "opportunity": "O0001",
        "parents": [ROOT],
        "form": "joint",
        "workloads": ["decode"],
        "variants": ["decode"],
        "scope": "one loop of decode",
        "regions": ["decode"],
        "expected_effect": "fewer loads: decode takes 0.9 of its time",
        "numerical_risks": RISKS,
        "contradicted_by": "decode not below 0.95 of its time",
    }
    return {**fields, **other}


def decision(word: str = "archive", **other: Any) -> Record:
    """The body of a decision about E0001 and I0001."""
    fields = {"audit": "E0001", "subject": "I0001", "decision": word, "interpretation": "As the figures say."}
    if word == "archive":
        fields["reconsider_when"] = "loads are the limit again"
    return {**fields, **other}


def edited(source: bytes, note: str) -> bytes:
    """A child of a source: one more line at its end, and an edit in its middle."""
    half = source.index(b"\n", len(source) // 2) + 1
    return source[:half] + f"// {note}\n".encode() + source[half:] + f"// end of {note}\n".encode()


# ---------------------------------------------------------------- what the evaluator reports


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
    found["promotion"] = promotion.record(first, comparison, root, limit, [], True)  # type: ignore[arg-type]


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


# ---------------------------------------------------------------- whole runs


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Without waiting for the disk: for runs that are made up by the hundred."""
    with mock.patch("os.fsync", lambda descriptor: None):
        yield


@functools.cache
def _cells(target: str) -> list[tuple[str, str]]:
    """Name and phase of every cell of a target."""
    return [(cell.name, cell.phase) for cell in grids.cells(load_target(target).config["workloads"])]


def audit_fields(run: Run, identity: str, status: str, share: float, gain: float | None) -> Record:
    """Made-up fields of an audit. share: T as a share of the root's; gain: over the incumbent, where one is granted."""
    passed, offspring = status == "PASSED", identity != ROOT
    names = _cells(run.manifest["target"]["name"]) if passed else []
    us = 100 * share
    before = share / (1 - gain) if gain else share
    return {
        "status": status,
        "verified": passed,
        "complete": passed,
        "admissible": True if passed else None,
        "promoted": gain is not None,
        "T": share if passed else None,
        "T_root": 1.0 if passed else None,
        "T_incumbent": before if passed and offspring else None,
        "gain": gain,
        "gain_interval": None if gain is None else [gain / 2, 2 * gain],
        "incumbent": run.state.incumbent if offspring else None,
        "cells": [
            {
                **{"name": name, "phase": phase, "us": us, "interval_us": [us * 0.99, us * 1.01], "root_us": 100.0},
                **{"incumbent_us": 100 * before, "best_baseline_us": 150.0, "best_baseline": "sdpa_cpu"},
                **{"floor_us": 10.0, "share": 1 / len(names)},
            }
            for name, phase in names
        ],
        "failure": None if passed else {"check": "decode", "case": "decode B1 L128", "reason": f"scripted {status}"},
        "dispatch": None,
        "resources": [{"kernel": "decode", "registers": 32, "spills": 0}],
        "counters": None,
        "code": {"prefill": "identical", "extend": "identical", "decode": "changed"} if offspring else {},
        "environment": {"machine": "scripted processor, 8 cores"},
        "seconds": 60.0,
    }


class Agent:
    """Makes attempts whose outcomes are given, in the shortest way."""

    def __init__(self, run: Run, seed: int = 1) -> None:
        self.run = run
        self.draw = random.Random(seed)
        self.share = 1.0  # T of the incumbent as a share of the root's

    def audit(self, identity: str, status: str = "PASSED", gain: float | None = None) -> Record:
        """Record an audit whose fields are made up."""
        share = self.share * (1 - gain) if gain else self.share * 1.01
        share = 1.0 if identity == ROOT else share
        data = json.dumps({"scripted": identity, "status": status, "n": self.run.state.lines}).encode()
        found = audits.Found(data, audit_fields(self.run, identity, status, share, gain), None)

        @contextlib.contextmanager
        def given(*arguments: Any) -> Iterator[audits.Found]:
            yield found

        with mock.patch.object(audits, "evaluation", given):
            made = self.run.audit(identity)
        if gain:
            self.share = share
        return made

    def act(self, parents: list[str] | None = None, **other: Any) -> tuple[str, str]:
        """Propose for the parents (by default the incumbent) and act; returns the child and its direction."""
        parents = parents or [str(self.run.state.incumbent)]
        free = [name for name in (f"direction-{n}" for n in range(1000)) if name not in self.run.state.abandoned]
        direction = other.pop("direction", self.draw.choice(free[:40]))
        made: str | None = None
        if not self.run.state.without("opportunities"):
            evidence = [list(self.run.state.audits)[-1]]
            merge = len(parents) > 1
            fields = opportunity(direction=direction, applies_to=parents, evidence=evidence, merge=merge)
            made = self.run.propose(fields)["id"]
        source = edited(self.run.source(parents[0]) if len(self.run.state.implementations) < 50 else self.root, self.note())
        child, _ = self.run.act(action(opportunity=made, parents=parents, **other), source, "cpp")
        return child["id"], direction

    @property
    def root(self) -> bytes:
        return self.run.source(ROOT)

    def note(self) -> str:
        return hashlib.sha256(str(self.draw.random()).encode()).hexdigest()[:24]

    def attempt(self) -> None:
        """One attempt: a quarter fail, one in eight is promoted, the rest pass; then the decision that fits."""
        run, draw = self.run, self.draw
        parent = draw.choice(run.state.frontier[-20:]) if draw.random() < 0.5 else str(run.state.incumbent)
        parent = parent if run.state.retained(parent) else run.state.frontier[-1]
        child, direction = self.act([parent])
        status = draw.choice(["BIT_MISMATCH", "COMPILE_ERROR"]) if draw.random() < 0.25 else "PASSED"
        gain = 0.002 if status == "PASSED" and draw.random() < 0.17 else None
        audit = self.audit(child, status, gain)["id"]
        follow = opportunity(direction=f"after-{direction}", evidence=[audit])
        if status != "PASSED" and len(run.state.failures(direction)) >= run.state.settings["abandon_after"]:
            run.decide(decision("abandon", audit=audit, subject=parent, evidence=[audit]))
        elif status != "PASSED":
            run.decide(decision("continue", audit=audit, subject=parent, follow_ups=[{**follow, "applies_to": [parent]}]))
        elif gain or draw.random() < 0.4:
            run.decide(decision("continue", audit=audit, subject=child, follow_ups=[{**follow, "applies_to": [child]}]))
        else:
            run.decide(decision("archive", audit=audit, subject=child))


def new_run(folder: Path, **settings: Any) -> Run:
    """A run of the CPU target before its root's audit."""
    return create(folder, gpu="cpu", settings=settings)


def started(folder: Path, **settings: Any) -> Agent:
    """A run whose root is audited, and an agent for it."""
    agent = Agent(new_run(folder, **settings))
    agent.audit(ROOT)
    return agent


def make_run(folder: Path, attempts: int, seed: int = 1, **settings: Any) -> Run:
    """A run of so many attempts, quickly: failures, promotions, archives, abandoned directions. Without syncs, so not for
    tests of crashes."""
    with unsynced():
        agent = started(folder, **{"kappa_max": 10 * attempts, **settings})
        agent.draw.seed(seed)
        for _ in range(attempts):
            agent.attempt()
    return agent.run
