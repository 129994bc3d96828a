"""The baselines of one run: which are wanted, which are here, and what the judge does with their workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.core.config import Target
from tools.evaluator.grids import cells
from tools.evaluator.passes import Racer
from tools.evaluator.runner import START_TIMEOUT_S, Runner, Stop, WorkerFailure

PHASES = ("full", "decode")


@dataclass
class Baseline:
    """One provider in its worker."""

    name: str
    runner: Runner
    phases: tuple[str, ...]
    layout: str = "bhsd"
    compiling: bool = False  # its worker is busy with what the library compiles on first use


class Baselines:
    """Starts with all that a run wants; those that are missing are recorded with the reason, or end the run."""

    def __init__(self, target: Target, cases: str, require: tuple[str, ...], limits: dict[str, Any]) -> None:
        self._section: dict[str, list[str]] = target.config["baselines"]
        self._contract_library: str | None = target.config["contract"].get("library")
        self._entries = sorted({cell.entry for cell in cells(target.config["workloads"])})
        self._quick, self._require, self._limits = cases == "quick", require, limits
        self._here: dict[str, Baseline] = {}
        self.records: dict[str, Any] = {}

    def wanted(self, everything: bool) -> list[str]:
        """Names to start: all of the config, those of a quick run, or what the checks alone need."""
        names = list(dict.fromkeys(name for phase in PHASES for name in self._section[phase]))
        if self._quick:
            names = [name for name in names if name in self._section["quick"] or name in self._require]
        if not everything:
            names = [name for name in names if name in (*self._require, self._contract_library)]
        return names

    def add(self, name: str, runner: Runner) -> None:
        phases = tuple(phase for phase in PHASES if name in self._section[phase])
        self._here[name] = Baseline(name, runner, phases)

    def load(self, heads: tuple[int, int]) -> None:
        """Load every provider in its worker; one that compiles goes on doing so while the judge works."""
        for baseline in list(self._here.values()):
            record: dict[str, Any] = {"available": False, "reason": None, "version": None, "routes": {}}
            record["phases"] = list(baseline.phases)
            self.records[baseline.name] = record
            try:
                baseline.runner.settle("hello", START_TIMEOUT_S)
                reply = baseline.runner.load_provider(baseline.name)
                record.update({key: reply[key] for key in ("available", "reason", "version")})
                baseline.layout = reply["layout"]
                if record["available"]:
                    for entry in self._entries:
                        record["routes"][entry] = baseline.runner.request("routes", entry=entry)["routes"]
            except WorkerFailure as problem:
                record.update(available=False, reason=problem.message)
            if not record["available"]:
                self._lose(baseline, record["reason"] or "not available")
            elif reply["compiles"]:
                baseline.compiling = True
                baseline.runner.post("warm", heads_q=heads[0], heads_kv=heads[1])

    def _lose(self, baseline: Baseline, reason: str) -> None:
        self.records[baseline.name].update(available=False, reason=reason)
        baseline.runner.kill()
        del self._here[baseline.name]
        if baseline.name in self._require:
            raise Stop("REFUSED", f"required baseline {baseline.name} is unavailable: {reason}")

    def await_compilation(self) -> None:
        for baseline in list(self._here.values()):
            if not baseline.compiling:
                continue
            try:
                baseline.runner.settle("warm", self._limits["build_timeout_s"])
                baseline.compiling = False
            except WorkerFailure as problem:
                self._lose(baseline, problem.message)

    def missing_library(self) -> str | None:
        """Why the contract's library cannot be compared with, if it should be."""
        name = self._contract_library
        if name is None or name in self._here:
            return None
        return f"bits were not compared with {name}: {self.records.get(name, {}).get('reason') or 'not among the baselines'}"

    def library(self) -> Baseline | None:
        """The provider whose bits the contract states, if it is here."""
        return self._here.get(self._contract_library or "")

    def references(self) -> dict[str, tuple[Runner, str]]:
        """What accuracy is compared with, "phase:name" in order: the contract's library, then the config's order."""
        ready = [baseline for baseline in self._here.values() if not baseline.compiling]
        ready.sort(key=lambda baseline: baseline.name != self._contract_library)
        return {f"{phase}:{b.name}": (b.runner, b.layout) for b in ready for phase in b.phases}

    def racers(self) -> list[Racer]:
        return [
            Racer(b.name, b.runner, b.layout, False, b.phases, self.records[b.name]["routes"])
            for b in self._here.values()
            if b.runner.alive()
        ]
