"""Real trials of the promotion rule: how often equal kernels are promoted, and how often a planted gain is.

    python tools/evaluate.py --gpu cpu --promotion-trials 20 --output runs/trials.json

Every trial takes fresh processes and as many sessions as promotion.compare asks for, with the judge's own workers, memory,
passes and guards (but the clock's). It times a few small cells only, so its T is noisier than an evaluation's. Without
--incumbent, equal trials (the incumbent is the candidate's own source) alternate with trials of a planted gain: there the
incumbent is the same source, and each of its calls (on a GPU: each of its threads) idles on for 3 % of the whole.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_file, write_new
from tools.evaluator import environment, objective, promotion, report
from tools.evaluator.arena import Arena
from tools.evaluator.grids import cells
from tools.evaluator.guards import Guards
from tools.evaluator.passes import Mismatch, Racer, Refused
from tools.evaluator.planted import slowed
from tools.evaluator.runner import START_TIMEOUT_S, Runner, WorkerFailure
from tools.evaluator.statistics import binomial_bound, median
from tools.evaluator.timing import Timer, machine_section, of_session
from tools.loader.build import build
from tools.loader.device import check_machine, resolve_device

PLANTED = 0.03
MOST_PROMOTED, LEAST_PROMOTED = 0.05, 0.80  # of equal trials, and of those with a gain
CHUNK_BYTES = {"cpu": 1 << 29, "cuda": 8 << 30}
CPU_L2_BYTES = 32 << 20  # half of the target's: shorter passes that still stream more than the caches of most machines
CPU_WORKLOADS = {
    "prefill": {"batch": [1, 4], "seqlen": [64]},
    "decode": {"batch": [1, 4], "context": [128, 1024]},
}
NO_CLOCK = Guards(frozenset({"clock"}))  # the kernels are honest here, and a busy machine shall show in the rates instead
CUDA_CELLS = 2  # of each kind

Show = Callable[[str, str], None]


class Track:
    """What all trials share: memory, cells, and the witness that verifies timed passes."""

    def __init__(self, target: Target) -> None:
        self.target, config = target, target.config
        self.device: str = config["target"]["device"]
        check_machine(target, resolve_device(target, None))
        self.environment = environment.record(self.device)
        self._machine = machine_section(target, self.environment["gpu"])
        workloads = config["workloads"]
        self.heads = (int(workloads["heads_q"]), int(workloads["heads_kv"]))
        if self.device == "cpu":
            environment.keep_still()
            self._machine["l2_bytes"] = CPU_L2_BYTES
            workloads = CPU_WORKLOADS
        self.cells = cells(workloads, CUDA_CELLS if self.device == "cuda" else 0)
        self._arena = Arena(self.device, CHUNK_BYTES[self.device])
        self._witness_library = build(target, role="witness").library
        self._witness = self._start({"witness": self._witness_library})[0]

    def _start(self, libraries: dict[str, Path]) -> list[Runner]:
        """Workers of these names with their libraries; all start at once, in order."""
        started: list[Runner] = []
        try:
            for name in libraries:
                started.append(Runner(name, self._arena, self.target.config["limits"]["case_timeout_s"]))
                started[-1].post("hello")
            for runner in started:
                runner.settle("hello", START_TIMEOUT_S)
                runner.load_library(str(libraries[runner.name]))
        except BaseException:
            _end(started)
            raise
        return started

    def session(self, candidate: Path, incumbent: Path, number: int) -> promotion.Session:
        """All cells once, in fresh processes that start in another order each time."""
        if not self._witness.alive():  # a trial before this one ended it
            self._witness.close()
            self._witness = self._start({"witness": self._witness_library})[0]
        libraries = {"candidate": candidate, "incumbent": incumbent, "twin": incumbent}
        names = list(libraries)
        if number % 2:
            names.reverse()
        runners = self._start({name: libraries[name] for name in names})
        try:
            timer = Timer(
                self._arena, self._machine, self.target.config["limits"], self.heads,
                self.target.config["contract"]["tile"], secrets.randbits(62), of_session(self.device, "quick", number),
                self._witness, guards=NO_CLOCK,
            )  # fmt: skip
            racers = [Racer(runner.name, runner) for runner in runners]
            return [timer.cell(cell, racers, ("cold",)) for cell in self.cells]
        finally:
            _end(runners)

    def trial(self, candidate: Path, incumbent: Path) -> dict[str, Any]:
        """One attempt at promotion; what the evaluator would refuse counts as not promoted, with the reason."""
        started, sessions, comparison = time.monotonic(), list[promotion.Session](), dict[str, Any]()
        refused = None
        try:
            while not comparison or comparison["verdict"] == "unclear":
                sessions.append(self.session(candidate, incumbent, len(sessions)))
                reference = objective.references(sessions[0], None)
                w = objective.weights(self.target.config["objective"], sessions[0], reference)
                comparison = promotion.compare(sessions, w)
        except (Refused, Mismatch, WorkerFailure) as problem:
            refused = str(problem)
        return {
            "promoted": refused is None and comparison["verdict"] == "better",
            "refused": refused,
            "seconds": round(time.monotonic() - started, 2),
            "comparison": comparison or None,
        }

    def close(self) -> None:
        _end([self._witness])


def _end(runners: list[Runner]) -> None:
    """At once: none holds anything that is needed."""
    for runner in runners:
        runner.strike()
    for runner in runners:
        runner.close()


def _summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates of one kind of trials, and the gains and A/A that all their sessions read on the judge's clock."""
    compared = [trial["comparison"] for trial in trials if trial["comparison"] is not None]
    clocks = [comparison["clocks"]["judge"] for comparison in compared]
    gains, aa = [[value for clock in clocks for value in clock[key]] for key in ("gains", "aa")]
    promoted = sum(trial["promoted"] for trial in trials)
    return {
        "trials": len(trials),
        "promoted": promoted,
        "refused": sum(trial["refused"] is not None for trial in trials),
        "rate": promoted / len(trials),
        "rate_interval": [
            1 - binomial_bound(len(trials) - promoted, len(trials)),
            binomial_bound(promoted, len(trials)),
        ],
        "sessions": sum(comparison["sessions"] for comparison in compared) / max(1, len(compared)),
        "median_gain": median(gains) if gains else None,
        "gains": gains,
        "aa": aa,
    }


def run_trials(
    target: Target, source: Path | None, incumbent: Path | None, count: int, show: Show = lambda stage, text: None
) -> dict[str, Any]:
    """`count` trials of a candidate against an incumbent; without one, as many of equal ones and of a planted gain.

    source: None for the target's own kernel. Raises UserError and BuildError as builds do.
    """
    if count < 1:
        raise UserError(f"--promotion-trials {count} is not positive")
    track = Track(target)
    try:
        with tempfile.TemporaryDirectory() as folder:
            candidate = build(target, source).library
            rivals: dict[str, Path] = {}
            if incumbent is not None:
                rivals["given"] = build(target, incumbent).library
            else:
                rivals["equal"] = candidate
            if incumbent is None:
                given = source or target.source()
                slower = Path(folder) / f"slowed{given.suffix}"
                write_new(slower, slowed(read_bytes(given).decode("utf-8"), PLANTED, track.device))
                rivals["planted"] = build(target, slower).library
            found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in rivals}
            for number in range(count):
                for kind, library in rivals.items():
                    done = sum(trial["promoted"] for trial in found[kind])
                    show("promotion trials", f"{number + 1} of {count}, {kind}, {done} promoted so far")
                    found[kind].append(track.trial(candidate, library))
    finally:
        track.close()
    return {
        "target": target.name,
        "source_sha256": sha256_file(source or target.source()),
        "incumbent_sha256": sha256_file(incumbent) if incumbent is not None else None,
        "planted_gain": PLANTED if "planted" in found else None,
        "cells": [cell.name for cell in track.cells],
        "environment": track.environment,
        "summary": {kind: _summary(trials) for kind, trials in found.items()},
        "trials": found,
    }


def shortcomings(found: dict[str, Any]) -> list[str]:
    """Where the rates are not what the rule states. Empty for trials of a given incumbent, which state nothing."""
    problems = []
    summary = found["summary"]
    if "equal" in summary and summary["equal"]["rate"] > MOST_PROMOTED:
        problems.append(f"{summary['equal']['promoted']} of {summary['equal']['trials']} equal trials were promoted")
    if "planted" in summary and summary["planted"]["rate"] < LEAST_PROMOTED:
        problems.append(f"only {summary['planted']['promoted']} of {summary['planted']['trials']} planted gains were promoted")
    return problems


def main_trials(
    gpu: str | None,
    config: Path | None,
    source: Path | None,
    incumbent: Path | None,
    count: int,
    output: Path,
    show: Show,
    *,
    as_json: bool = False,
) -> int:
    """Run, write and print; 0 where the rates are as stated, else 1."""
    report.check_output(output)
    found = run_trials(load_target(gpu, config), source, incumbent, count, show)
    write_new(output, json.dumps(report.finite(found), indent=1) + "\n")
    if as_json:
        print(json.dumps(report.finite(found["summary"])))
    else:
        for kind, part in found["summary"].items():
            low, high = part["rate_interval"]
            gain = "none" if part["median_gain"] is None else f"{100 * part['median_gain']:.2f} %"
            print(
                f"{kind:8} {part['promoted']} of {part['trials']} promoted (interval {100 * low:.0f} to {100 * high:.0f} %), "
                f"{part['refused']} refused, {part['sessions']:.1f} sessions a trial, median gain of a session {gain}"
            )
    problems = shortcomings(found)
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0
