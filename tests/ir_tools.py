"""Runs for tests without an evaluation: what an agent writes, what an evaluator would report, and whole runs of any length.

`Scripted` (ir_reports.py) stands in for tools/evaluate.py: it writes reports whose figures follow from samples that it makes
up, through the evaluator's own functions, so that everything that reads reports is at work. `make_run` goes a shorter way for
long runs: audits whose fields are made up, beside reports of a few bytes.
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

from ir_reports import Scripted, scripted_report

from tools.core.config import load_target
from tools.evaluator import grids
from tools.search import audits
from tools.search.create import create
from tools.search.records import ROOT
from tools.search.run import Run

__all__ = [  # with what tests of runs take from ir_reports
    "RISKS",
    "ROOT",
    "Agent",
    "Scripted",
    "action",
    "audit_fields",
    "decision",
    "edited",
    "make_run",
    "new_run",
    "opportunity",
    "scripted_report",
    "started",
    "unsynced",
]
Record = dict[str, Any]
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
