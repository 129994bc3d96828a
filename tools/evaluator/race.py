"""The timed half of an evaluation: all kernels against each other, the verdict, and whether it promotes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.evaluator import counters, dispatch, objective, promotion, report
from tools.evaluator.bench import Bench
from tools.evaluator.cases import Context
from tools.evaluator.passes import Mismatch, Racer, Refused
from tools.evaluator.runner import Stop
from tools.evaluator.sealed import sealed_cases
from tools.evaluator.timing import MODES, Timer, machine_section, of_session

RACING = ("candidate", "root", "incumbent", "twin")


@contextmanager
def _refusals() -> Iterator[None]:
    """What a timed pass can end with becomes a status."""
    try:
        yield
    except Refused as problem:
        raise Stop("REFUSED", str(problem)) from None
    except Mismatch as problem:
        raise Stop("BIT_MISMATCH", str(problem)) from None


class Race(Bench):
    """A bench that times. Whoever inherits says in which context sealed cases are checked."""

    def _context(self, seed: int) -> Context:
        raise NotImplementedError

    def _timer(self, seed: int, progress: Callable[[str], None], session: int = 0) -> Timer:
        return Timer(
            self.arena,
            machine_section(self.target, self.record["environment"]["gpu"]),
            self.limits,
            self.heads,
            self.target.config["contract"]["tile"],
            seed,
            of_session(self.device, self.options.cases, session),
            self.runners["witness"],
            progress,
            self.guards,
        )

    def _racers(self, roles: Sequence[str]) -> list[Racer]:
        baselines: list[Racer] = self.baselines.racers()
        return [Racer(role, self.runners[role]) for role in roles if role in self.builds] + baselines

    def _measure(self, roles: Sequence[str]) -> list[dict[str, Any]]:
        self._progress("baselines compile")
        self.baselines.await_compilation()
        timer = self._timer(self.seed, self._progress)
        racers = self._racers(roles)
        with _refusals():
            found = [timer.cell(cell, racers, MODES if self.options.hot else ("cold",)) for cell in self.cells]
        report.add_ratios(found)
        if self.record["dispatch"] is None and self.options.observed:
            with self._stage("dispatch"):
                seen = [racer for racer in racers if racer.name not in RACING[1:]]
                self.record["dispatch"] = dispatch.observe(
                    timer, self.arena, self.cells, seen, found, self._progress, self._profiled
                )
                self.record["counters"] = self._counters()
        return found

    def _counters(self) -> dict[str, Any]:
        if self.device != "cuda" or self.options.cases == "quick":
            return {"note": "unavailable: read in full runs on CUDA devices only", "kernels": []}
        seen = {
            name: sum(kernel["launches"] for kernel in racers["candidate"]["kernels"])
            for name, racers in self.record["dispatch"].items()
            if "candidate" in racers
        }
        self._progress("hardware counters")
        start = time.monotonic()
        try:
            return counters.read(self.builds["candidate"].library, counters.chosen(self.cells), self.heads, seen)
        finally:
            self.waited_s += time.monotonic() - start

    def _verdict(self, first: list[dict[str, Any]]) -> None:
        self.record["timing"] = {
            "unit": "microseconds a call",
            "cells": first,
            "geomeans": report.geomeans(first),
            "again": [],
        }
        root = None if self.root_report is None else report.latencies(self.root_report)
        if "root" in self.builds:
            root = {cell["name"]: taken for cell in first if (taken := objective.cold(cell, "root")) is not None}
        self.record["objective"] = objective.summary(self.target.config["objective"], first, root)
        if root is not None or "incumbent" in self.builds:
            self._promotion(first, root)
        self.record.update(status="PASSED", reason=None)
        if self.record["compatibility"]:
            self.record["notes"].append("times of a compatibility run are proxies and enter no result")

    def _promotion(self, first: list[dict[str, Any]], root: dict[str, float] | None) -> None:
        blockers = self._blockers(root)
        limit, sessions = float(self.limits["max_slowdown"]), [first]
        comparison, sealed = None, None
        if "incumbent" in self.builds and not (root is not None and objective.too_slow(first, root, limit)):
            w = {cell["name"]: cell["weight"] for cell in self.record["objective"]["cells"]}
            # Where a cell is in doubt, later sessions hold it against the root again.
            doubt = root is not None and objective.admissible(first, root, limit)
            roles = [role for role in RACING if role in self.builds and (doubt or role != "root")]
            comparison = promotion.compare(sessions, w, noise=self.guards.on("noise"))
            while comparison["verdict"] == "unclear":
                with self._stage("measured again"):
                    sessions.append(self._remeasure(roles, len(sessions)))
                comparison = promotion.compare(sessions, w)
            self.record["timing"]["again"] = sessions[1:]
            slow = root is not None and objective.admissible(first, root, limit, sessions[1:])
            if comparison["verdict"] == "better" and not blockers and not slow:
                self._show("sealed", "")
                sealed = self._sealed() if self.guards.on("sealed") else True
        self.record["promotion"] = promotion.record(sessions, comparison, root, limit, blockers, sealed)

    def _blockers(self, root: dict[str, float] | None) -> list[str]:
        """Why this run may promote nothing, whatever it measures."""
        guards = sorted(self.guards.off)
        reasons = {
            "the seed was given": self.options.seed is not None,
            "a compatibility run": self.record["compatibility"],
            "not the full cases": self.options.cases != "full",
            "no root to be admissible under": root is None,
            "the root lacks cells": root is not None and any(cell.name not in root for cell in self.cells),
            f"guards were off: {', '.join(guards)}": bool(guards),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def _sealed(self) -> bool:
        """Nothing of it reaches the report but the answer: the worker is fresh and its output is thrown away."""
        kept = self.runners.pop("candidate")
        try:
            self._respawn(["candidate"])
            racers = [racer for racer in self._racers(RACING) if racer.fixed]
            cells = self.target.config["workloads"], float(self.limits["max_slowdown"])
            return sealed_cases(self._context, lambda seed: self._timer(seed, lambda text: None), racers, *cells)
        except Stop:
            raise
        except Exception:  # whatever it was, nothing of it is told
            return False
        finally:
            if (fresh := self.runners.pop("candidate", None)) is not None:
                fresh.kill()
            self.runners["candidate"] = kept

    def _remeasure(self, roles: list[str], number: int) -> list[dict[str, Any]]:
        """The cold cells of these kernels once more, in fresh processes that start in another order each time.

        number: of the session, counted from 0. Workers of other kernels stay as they are, stopped.
        """
        if number % 2:
            roles = roles[::-1]
        for role in roles:
            self.runners[role].strike()
        for role in roles:
            self.runners[role].kill()
            self.waited_s += self.runners[role].waited_s
        self._respawn(roles)
        timer = self._timer(self.seed, self._progress, number)
        with _refusals():
            return [timer.cell(cell, [Racer(role, self.runners[role]) for role in roles], ("cold",)) for cell in self.cells]
