"""Times of the candidate and of everything beside it, cell by cell.

Every captured call has its own output, poisoned before the last pass and verified after it. *Cold*: every call of a
pass has its own inputs, together more than twice the last-level cache. *Hot*: all calls share one set of inputs. Where
a single call's inputs exceed twice the cache there is no difference, and hot refers to cold.

Times come from the worker's device (events around a graph's replay, perf_counter around a CPU call) and are checked
against the judge's own clock around the command. Candidate, root, incumbent and baselines take turns in rounds, so
that a drift of the clocks meets all of them. A time below what the operations and bytes allow is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.core.config import Target, load_target, target_names
from tools.evaluator import oracle
from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, unwritten, words_differ
from tools.evaluator.grids import Cell
from tools.evaluator.inputs import Draw
from tools.evaluator.runner import Call, Runner, WorkerFailure
from tools.evaluator.statistics import median, median_interval

MODES = ("cold", "hot")
MOST_CALLS = 256  # of one graph, where cold does not need more
CLOCK_RATIO, CLOCK_MIN_MS = 0.5, 50.0  # the worker's time must be this part of the judge's, once that is this long


class Refused(Exception):
    """A measurement that cannot be: the run's status becomes REFUSED."""


class Mismatch(Exception):
    """A timed output that is not the verified one: the run's status becomes BIT_MISMATCH."""


@dataclass(frozen=True)
class Effort:
    """rounds x at least `least` samples a route; more while a route has spent less than budget_ms. warm_ms: replays
    before them. screen: samples a screened route. burst_us: what one graph should last at least. input_bytes: how much
    the inputs of one pass may take beyond what cold needs."""

    rounds: int
    least: int
    budget_ms: float
    warm_ms: float
    screen: int
    burst_us: float
    input_bytes: int


EFFORTS = {
    ("cuda", "full"): Effort(5, 3, 80.0, 10.0, 5, 150.0, 4 << 30),
    ("cuda", "quick"): Effort(5, 3, 30.0, 5.0, 3, 150.0, 2 << 30),
    ("cpu", "full"): Effort(5, 3, 150.0, 10.0, 2, 0.0, 0),
    ("cpu", "quick"): Effort(5, 3, 60.0, 5.0, 2, 0.0, 0),
}


@dataclass
class Racer:
    """One thing to time. `fixed` racers are kernel libraries, whose outputs lie in the arena and whose bits are known;
    the others are providers."""

    name: str
    runner: Runner
    layout: str = "bhsd"
    fixed: bool = True
    phases: tuple[str, ...] = ("full", "decode")
    routes: dict[str, list[str]] = field(default_factory=dict)  # entry -> routes of a provider


@dataclass
class _Entry:
    """A racer in one cell and mode."""

    racer: Racer
    route: str | None
    calls: list[Call]
    graph: int
    per_sample: int
    samples_ms: list[float] = field(default_factory=list)
    own_ms: float = 0.0
    judge_ms: float = 0.0
    screened: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def floor_us(cell: Cell, heads: tuple[int, int], target: dict[str, Any], mode: str) -> float:
    """The least time that operations, and for cold calls bytes, allow at the target's peaks."""
    operations = cell.flop(heads[0]) / (target["peak_tflops"] * 1e12)
    moved = cell.input_bytes(*heads) + cell.output_bytes(heads[0])
    return 1e6 * float(max(operations, moved / (target["peak_bandwidth_gbps"] * 1e9) if mode == "cold" else 0.0))


def machine_section(target: Target, gpu: dict[str, Any] | None) -> dict[str, Any]:
    """l2_bytes and peaks of the machine at hand, for floors and cold inputs.

    gpu: {"name", "l2_bytes"} of the device, None for the CPU. On a target's own GPU its config states them. In a
    compatibility run the target that has this GPU does; where none has, the highest peaks of all targets bound it.
    """
    own = dict(target.config["target"])
    if gpu is None or gpu["name"] in own["gpu_names"]:
        return own
    others = [load_target(name).config["target"] for name in target_names()]
    others = [section for section in others if section["device"] == own["device"]]
    known = [section for section in others if gpu["name"] in section["gpu_names"]]
    bounds = {key: max(section[key] for section in known or others) for key in ("peak_tflops", "peak_bandwidth_gbps")}
    return {**own, **bounds, "l2_bytes": gpu["l2_bytes"] or max(section["l2_bytes"] for section in known or others)}


class Timer:
    """Times cells. `target` has the machine's l2_bytes, peak_tflops and peak_bandwidth_gbps; `limits` are the config's."""

    def __init__(
        self,
        arena: Arena,
        target: dict[str, Any],
        limits: dict[str, Any],
        heads: tuple[int, int],
        tile: int,
        seed: int,
        effort: Effort,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._arena, self._target, self._limits = arena, target, limits
        self.device = arena.device
        self._heads, self._tile, self._seed, self._effort = heads, tile, seed, effort
        self._progress = progress or (lambda text: None)

    # ------------------------------------------------------------ inputs

    def calls_of(self, cell: Cell, mode: str) -> int:
        """How many calls one pass has."""
        each = cell.input_bytes(*self._heads)
        cold = 2 * int(self._target["l2_bytes"]) // each + 1
        long = min(MOST_CALLS, math.ceil(self._effort.burst_us / floor_us(cell, self._heads, self._target, "cold")))
        if mode == "hot":
            return max(1, long)
        return max(cold, min(long, self._effort.input_bytes // each))

    def sets(self, cell: Cell, count: int, draw: Draw, layouts: set[str]) -> dict[str, list[tuple[Any, Any, Any]]]:
        """`count` sets of inputs in every storage order that a racer wants, with equal values."""
        heads_q, heads_kv = self._heads
        found: dict[str, list[tuple[Any, Any, Any]]] = {layout: [] for layout in layouts}
        for _ in range(count):
            first: tuple[Any, ...] | None = None
            for layout in sorted(layouts):
                order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
                q = self._arena.empty((cell.batch, heads_q, cell.rows, 128), order=order)
                k = self._arena.empty((cell.batch, heads_kv, cell.keys, 128), order=order)
                v = self._arena.empty((cell.batch, heads_kv, cell.keys, 128), order=order)
                for index, tensor in enumerate((q, k, v)):
                    draw.normal_(tensor) if first is None else tensor.copy_(first[index])
                first = first or (q, k, v)
                found[layout].append((q, k, v))
        return found

    def calls(self, cell: Cell, sets: list[tuple[Any, Any, Any]], count: int) -> list[Call]:
        calls = []
        for number in range(count):
            q, k, v = sets[number % len(sets)]
            out = self._arena.empty(tuple(q.shape))
            poison_(out)
            calls.append(Call(cell.entry, q, k, v, out))
        return calls

    # ------------------------------------------------------------ one cell

    def cell(self, cell: Cell, racers: list[Racer]) -> dict[str, Any]:
        """The record of one cell. Raises Refused, Mismatch, or WorkerFailure of a fixed racer."""
        record: dict[str, Any] = {
            "name": cell.name,
            "phase": cell.phase,
            "kind": cell.kind,
            "batch": cell.batch,
            "rows": cell.rows,
            "keys": cell.keys,
            "modes": {},
        }
        racing = [racer for racer in racers if cell.phase in racer.phases and racer.runner.alive()]
        for mode in MODES:
            if mode == "hot" and cell.input_bytes(*self._heads) > 2 * self._target["l2_bytes"]:
                record["modes"]["hot"] = {"same_as": "cold"}
                continue
            self._progress(f"{cell.name} {mode}")
            with self._arena.scope():
                record["modes"][mode] = self._mode(cell, mode, racing)
        return record

    def _mode(self, cell: Cell, mode: str, racers: list[Racer]) -> dict[str, Any]:
        count = self.calls_of(cell, mode)
        draw = Draw(self._seed, f"timing:{cell.name}:{mode}", self._arena.device)
        sets = self.sets(cell, count if mode == "cold" else 1, draw, {racer.layout for racer in racers})
        expected = self._expected(cell, sets["bhsd"], next(racer for racer in racers if racer.name == "candidate"))
        entries: list[_Entry] = []
        lost: dict[str, str] = {}
        for racer in racers:
            try:
                entries.append(self._enter(cell, racer, sets[racer.layout], count))
            except WorkerFailure as problem:
                if racer.fixed:
                    raise
                lost[racer.name] = problem.message
        self._race(entries)
        record: dict[str, Any] = {
            "same_as": None,
            "calls": count,
            "floor_us": floor_us(cell, self._heads, self._target, mode),
            "unique_bytes": cell.input_bytes(*self._heads) * len(sets["bhsd"]),
            "kernels": {},
            "baselines": {},
            "lost": lost,
        }
        for entry in entries:
            try:
                self._settle(cell, mode, entry, expected, draw)
            except WorkerFailure as problem:
                if entry.racer.fixed:
                    raise
                lost[entry.racer.name] = problem.message
                continue
            record["kernels" if entry.racer.fixed else "baselines"][entry.racer.name] = entry.record
        return record

    def _expected(self, cell: Cell, sets: list[tuple[Any, Any, Any]], candidate: Racer) -> list[Any]:
        """What eager calls of the (verified) candidate give for every set."""
        calls = self.calls(cell, sets, len(sets))
        candidate.runner.run(calls)
        return [call.o for call in calls]

    def _enter(self, cell: Cell, racer: Racer, sets: list[tuple[Any, Any, Any]], count: int) -> _Entry:
        """Capture a racer; a provider's routes are screened first and the fastest kept."""
        if racer.fixed:
            calls = self.calls(cell, sets, count)
            graph = racer.runner.capture(calls)
            return _Entry(racer, None, calls, graph, racer.runner.calls_per_sample(graph, count))
        calls = [Call(cell.entry, *sets[number % len(sets)], sets[0][0]) for number in range(count)]  # o is named by `collect`
        best: _Entry | None = None
        best_ms, screened = math.inf, dict[str, Any]()
        for route in racer.routes.get(cell.entry, []):
            try:
                graph = racer.runner.capture(calls, route=route)
                per_sample = racer.runner.calls_per_sample(graph, count)
                racer.runner.replay(graph, 1)
                taken = median(racer.runner.replay(graph, self._effort.screen)) / per_sample
            except WorkerFailure as problem:
                screened[route] = problem.message
                if not racer.runner.alive():
                    break
                continue
            screened[route] = round(1000 * taken, 3)
            if taken < best_ms:
                if best is not None:
                    racer.runner.drop(best.graph)
                best, best_ms = _Entry(racer, route, calls, graph, per_sample), taken
            else:
                racer.runner.drop(graph)
        if best is None:
            raise WorkerFailure("RUNTIME_ERROR", racer.name, "; ".join(f"{k}: {v}" for k, v in screened.items()) or "no route")
        best.screened = screened
        return best

    def _race(self, entries: list[_Entry]) -> None:
        """Warm up, then take turns."""
        plans = []
        for entry in entries:
            once = max(1e-3, entry.racer.runner.replay(entry.graph, 1)[0])
            warm = min(50, max(1, int(self._effort.warm_ms / once)))
            entry.racer.runner.replay(entry.graph, warm)
            plans.append(max(self._effort.least, min(60, int(self._effort.budget_ms / self._effort.rounds / once))))
        for number in range(self._effort.rounds):
            turns = list(zip(entries, plans, strict=True))
            for entry, samples in turns if number % 2 == 0 else reversed(turns):
                start = time.perf_counter()
                taken = entry.racer.runner.replay(entry.graph, samples)
                entry.judge_ms += 1000 * (time.perf_counter() - start)
                entry.own_ms += sum(taken)
                entry.samples_ms += taken

    # ------------------------------------------------------------ verdicts

    def _settle(self, cell: Cell, mode: str, entry: _Entry, expected: list[Any], draw: Draw) -> None:
        """Verify every output of one more pass, then make the record."""
        runner, count = entry.racer.runner, len(entry.calls)
        if entry.racer.fixed:
            for call in entry.calls:
                poison_(call.o)
            runner.replay_all(entry.graph)
            self._verify_bits(cell, mode, entry, expected)
            figure = self._accuracy(cell, entry.calls, draw)
        else:
            with self._arena.scope():
                calls = self.calls(cell, [(c.q, c.k, c.v) for c in entry.calls], count)
                runner.poison_outputs(entry.graph)
                runner.replay_all(entry.graph)
                runner.collect(entry.graph, calls)
                missing = sum(unwritten(call.o) for call in calls)
                figure = self._accuracy(cell, calls, draw)
            if missing or not figure.within(self._limits["accuracy_rms"]):
                runner.drop(entry.graph)
                raise WorkerFailure("INACCURATE", entry.racer.name, f"{missing} words unwritten, RMS error {figure.rms:.5f}")
        samples = [1000 * sample / entry.per_sample for sample in entry.samples_ms]
        low, high = median_interval(samples)
        entry.record = {
            "route": entry.route,
            "samples_us": [round(s, 4) for s in samples],
            "median_us": median(samples),
            "interval_us": [low, high],
            "calls_per_sample": entry.per_sample,
            "judge_ms": round(entry.judge_ms, 3),
            "worker_ms": round(entry.own_ms, 3),
            "verified_outputs": count,
            "accuracy": {"rms": figure.rms, "worst": figure.worst, "rows": figure.rows},
            "screened_us": entry.screened,
        }
        runner.drop(entry.graph)
        self._refuse_impossible(cell, mode, entry)

    def _verify_bits(self, cell: Cell, mode: str, entry: _Entry, expected: list[Any]) -> None:
        for number, call in enumerate(entry.calls):
            difference = words_differ(call.o, expected[number % len(expected)])
            if not difference.differing:
                continue
            text = (
                f"{entry.racer.name}: {cell.name} {mode}: output {number} of {len(entry.calls)} timed calls differs from the "
                f"verified one in {difference.differing} of {difference.words} words, first at {difference.first}"
            )
            if entry.racer.name == "candidate":
                raise Mismatch(text)
            raise Refused(f"{text}; a root or incumbent must have the candidate's bits")

    def _accuracy(self, cell: Cell, calls: list[Call], draw: Draw) -> oracle.Accuracy:
        """RMS error over some rows of some calls."""
        parts = []
        for number in sorted({0, len(calls) - 1}):
            call = calls[number]
            rows = [0] if cell.rows == 1 else oracle.sample_rows(cell.rows, self._tile, 6, draw.python)
            batch = draw.python.randrange(cell.batch)
            expected, _ = oracle.reference(call.q[batch], call.k[batch], call.v[batch], rows, cell.keys - cell.rows)
            parts.append(oracle.errors(call.o[batch][:, rows], expected))
        return oracle.summarise(parts)

    def _refuse_impossible(self, cell: Cell, mode: str, entry: _Entry) -> None:
        floor = floor_us(cell, self._heads, self._target, mode)
        taken = entry.record["median_us"]
        problem = None
        if not (math.isfinite(taken) and taken > 0 and min(entry.samples_ms) >= 0):
            problem = f"{cell.name} {mode}: {taken} us is no time"
        elif taken < floor:
            problem = f"{cell.name} {mode}: {taken:.3f} us is below the floor of {floor:.3f} us that operations and bytes allow"
        elif entry.judge_ms >= CLOCK_MIN_MS and entry.own_ms < CLOCK_RATIO * entry.judge_ms:
            problem = (
                f"{cell.name} {mode}: the worker's clock counted {entry.own_ms:.1f} ms, the judge's {entry.judge_ms:.1f} ms"
            )
        if problem and entry.racer.fixed:
            raise Refused(f"{entry.racer.name}: {problem}")
        if problem:
            raise WorkerFailure("REFUSED", entry.racer.name, problem)
