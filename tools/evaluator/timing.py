"""Times of the candidate and of everything beside it, cell by cell.

*Cold*: every call of a pass has its own K and V and its own queries, together more than twice the last-level cache.
*Hot*: all calls share K and V. Where a single call's inputs exceed twice the cache there is no difference, and hot
refers to cold.

Times come from the worker's device (events around a graph's replay, perf_counter around a CPU call), pass by pass
(passes.py). Candidate, root, incumbent, its twin and the baselines take turns in an order that is drawn for each round,
so that a drift of the clocks meets all of them. A time below what the operations and bytes allow is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.core.config import Target, load_target, target_names
from tools.evaluator import oracle
from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, unwritten
from tools.evaluator.grids import Cell
from tools.evaluator.guards import ALL, Guards
from tools.evaluator.inputs import Draw
from tools.evaluator.passes import (
    CLOCK_MOST,
    Clocks,
    Entry,
    Inputs,
    Passes,
    Racer,
    Refused,
    allowance_ms,
    clock_problem,
    high,
    unseen_ms,
)
from tools.evaluator.quiet import open_quiet
from tools.evaluator.runner import Call, Runner, WorkerFailure
from tools.evaluator.statistics import median, median_interval

MODES = ("cold", "hot")
MOST_CALLS = 3072  # of one graph, where cold does not need more
ATTEMPTS = 3  # at a cell whose clocks disagree
HOT_CALLS = 64  # of one pass on the CPU
DIGITS = {"cuda": 5, "cpu": 4}  # of a time: equal passes differ by 0.1 % on a GPU, by 1 % and more on a CPU
ACCURACY_DIGITS = 5


@dataclass(frozen=True)
class Effort:
    """passes: of every racer, at least; more while one has spent less than budget_ms, up to `most`. warm_ms: replays
    before them. screen: samples a screened route. pass_ms: what a pass of single calls should last at least. burst_us:
    what one graph should last at least. input_bytes: how much the inputs of one graph may take beyond what cold needs."""

    passes: int
    most: int
    budget_ms: float
    warm_ms: float
    screen: int
    pass_ms: float
    burst_us: float
    input_bytes: int


EFFORTS = {
    ("cuda", "full"): Effort(15, 20, 30.0, 10.0, 3, 0.0, 6000.0, 4 << 30),
    ("cuda", "quick"): Effort(15, 20, 30.0, 5.0, 3, 0.0, 6000.0, 2 << 30),
    ("cpu", "full"): Effort(15, 40, 150.0, 10.0, 2, 5.0, 0.0, 0),
    ("cpu", "quick"): Effort(15, 25, 60.0, 5.0, 2, 5.0, 0.0, 0),
}


def of_session(device: str, cases: str, number: int) -> Effort:
    """Effort of a run's session, counted from 0. The first is the one whose T is reported; later ones have no more passes
    than a report must have.

    Fewer would not pay on two shared cores: what starts a cell costs as much as eleven passes, and with seven in place of
    fifteen the gain of a session moved by half as much again.
    """
    effort = EFFORTS[device, cases]
    return replace(effort, most=effort.passes) if number and device == "cpu" else effort


def floor_us(cell: Cell, heads: tuple[int, int], target: dict[str, Any], mode: str) -> float:
    """The least time that operations, and for cold calls bytes, allow at the target's peaks."""
    operations = cell.flop(heads[0]) / (target["peak_tflops"] * 1e12)
    moved = cell.input_bytes(*heads) + cell.output_bytes(heads[0])
    return 1e6 * float(max(operations, moved / (target["peak_bandwidth_gbps"] * 1e9) if mode == "cold" else 0.0))


def lengths_of(
    cell: Cell, mode: str, heads: tuple[int, int], target: dict[str, Any], effort: Effort, device: str
) -> tuple[int, int]:
    """How many calls one pass has, and how many sets of inputs they go through in turn.

    Cold sets exceed the cache twice. On CUDA devices, where a pass is timed as a whole, it lasts burst_us at least: in a
    shorter one the cost of the request, of which the judge's clock cannot know the worker's share, would weigh.
    """
    each = cell.input_bytes(*heads)
    cold = 2 * int(target["l2_bytes"]) // each + 1
    long = min(MOST_CALLS, math.ceil(effort.burst_us / floor_us(cell, heads, target, "cold")))
    if mode == "hot":
        return (min(cold, HOT_CALLS) if device == "cpu" else max(1, long)), 1
    sets = max(cold, min(long, effort.input_bytes // each))
    return max(sets, long), sets


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


def kept_us(times_ms: Sequence[float], device: str) -> list[float]:
    """Milliseconds as a report keeps them: microseconds, DIGITS significant digits, at most four behind the point.

    No two passes agree better, and what lies below is most of what a report weighs.
    """
    return [round(_rounded(1000 * taken, DIGITS[device]), 4) for taken in times_ms]


def kept_accuracy(figure: oracle.Accuracy) -> dict[str, float]:
    """Errors as a report keeps them."""
    rms, worst = (_rounded(error, ACCURACY_DIGITS) for error in (figure.rms, figure.worst))
    return {"rms": rms, "worst": worst, "rows": figure.rows}


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


class Timer:
    """Times cells. `target` has the machine's l2_bytes, peak_tflops and peak_bandwidth_gbps; `limits` are the config's.

    witness: what timed outputs are verified with. All other workers must be idle or stopped.
    """

    def __init__(
        self,
        arena: Arena,
        target: dict[str, Any],
        limits: dict[str, Any],
        heads: tuple[int, int],
        tile: int,
        seed: int,
        effort: Effort,
        witness: Runner,
        progress: Callable[[str], None] | None = None,
        guards: Guards = ALL,
    ) -> None:
        self._arena, self._target, self._limits = arena, target, limits
        self.device = arena.device
        self.heads, self._tile, self._seed, self._effort = heads, tile, seed, effort
        self._witness, self._guards = witness, guards
        self._progress = progress or (lambda text: None)
        self._quiet = open_quiet(arena, int(target["l2_bytes"]))

    # ------------------------------------------------------------ inputs

    def sets(self, cell: Cell, sets: int, draw: Draw, layout: str, *, closed: bool = True) -> list[tuple[Any, Any, Any]]:
        """`sets` sets of q, k, v [B,H,S,128] in the storage order that a baseline wants."""
        order = (0, 1, 2, 3, 4) if layout == "bhsd" else (0, 1, 3, 2, 4)
        heads_q, heads_kv = self.heads
        shapes = [(sets, cell.batch, heads, size, 128) for heads, size in ((heads_q, cell.rows), *[(heads_kv, cell.keys)] * 2)]
        tensors = [self._arena.empty(shape, order=order, closed=closed) for shape in shapes]
        for tensor in tensors:
            (draw.fill_ if layout == "bhsd" else draw.normal_)(tensor)
        return list(zip(*tensors, strict=True))

    def outputs(self, cell: Cell, count: int, *, closed: bool) -> Any:
        """Poisoned outputs [count, B, Hq, Sq, 128]."""
        found = self._arena.empty(
            (count, cell.batch, self.heads[0], cell.rows, 128), closed=closed and self._guards.on("closed")
        )
        poison_(found)
        return found

    # ------------------------------------------------------------ one cell

    def cell(self, cell: Cell, racers: list[Racer], modes: tuple[str, ...] = MODES) -> dict[str, Any]:
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
        racing = [racer for racer in racers if cell.phase in racer.phases and (racer.fixed or racer.runner.alive())]
        for mode in modes:
            if mode == "hot" and cell.input_bytes(*self.heads) > 2 * self._target["l2_bytes"]:
                record["modes"]["hot"] = {"same_as": "cold"}
                continue
            self._progress(f"{cell.name} {mode}")
            record["modes"][mode] = self._measured(cell, mode, racing)
        return record

    def _measured(self, cell: Cell, mode: str, racers: list[Racer]) -> dict[str, Any]:
        for left in reversed(range(ATTEMPTS)):
            try:
                with self._arena.scope():
                    return self._mode(cell, mode, racers)
            except Clocks:
                if not left:
                    raise
        raise AssertionError

    def _mode(self, cell: Cell, mode: str, racers: list[Racer]) -> dict[str, Any]:
        count, count_sets = lengths_of(cell, mode, self.heads, self._target, self._effort, self.device)
        if not self._guards.on("cold"):
            count_sets = 1
        draw = Draw(self._seed, f"timing:{cell.name}:{mode}", self._arena.device)
        inputs = Inputs(self._arena, cell, self.heads, count_sets, draw, self._guards)
        passes = Passes(self._arena, cell, mode, inputs, self._witness, self._quiet, self._guards)
        theirs = {
            layout: self.sets(cell, count_sets, draw, layout)
            for layout in sorted({racer.layout for racer in racers if not racer.fixed})
        }
        entries: list[Entry] = []
        lost: dict[str, str] = {}
        for racer in racers:
            try:
                entries.append(
                    self._enter(cell, racer, inputs, count)
                    if racer.fixed
                    else self._enter_baseline(cell, racer, theirs[racer.layout], count)
                )
            except WorkerFailure as problem:
                if racer.fixed:
                    raise
                lost[racer.name] = problem.message
        self._race(passes, entries, draw)
        usual_ms = max([2 * high(passes.requests_ms), *(high(unseen_ms(entry)) for entry in entries if not entry.racer.fixed)])
        record: dict[str, Any] = {
            "same_as": None,
            "calls": count,
            "floor_us": floor_us(cell, self.heads, self._target, mode),
            "unique_bytes": cell.input_bytes(*self.heads) * count_sets,
            "kernels": {},
            "baselines": {},
            "lost": lost,
        }
        for entry in entries:
            try:
                self._settle(cell, mode, entry, passes, draw, usual_ms)
            except WorkerFailure as problem:
                if entry.racer.fixed:
                    raise
                lost[entry.racer.name] = problem.message
                continue
            record["kernels" if entry.racer.fixed else "baselines"][entry.racer.name] = entry.record
        return record

    def _enter(self, cell: Cell, racer: Racer, inputs: Inputs, count: int) -> Entry:
        """Capture a kernel library."""
        outputs = self.outputs(cell, count, closed=racer.runner.trusted)
        calls = inputs.calls(cell.entry, outputs)
        return Entry(racer, None, calls, outputs, racer.runner.capture(calls))

    def _enter_baseline(self, cell: Cell, racer: Racer, sets: list[tuple[Any, Any, Any]], count: int) -> Entry:
        """Screen a provider's routes and keep the fastest captured."""
        calls = [Call(cell.entry, *sets[number % len(sets)], sets[0][0]) for number in range(count)]  # o is named by `collect`
        best: Entry | None = None
        best_ms, screened = math.inf, dict[str, Any]()
        for route in racer.routes.get(cell.entry, []):
            try:
                graph = racer.runner.capture(calls, route=route)
                racer.runner.replay(graph, 1)
                taken = median(racer.runner.replay(graph, self._effort.screen)) / racer.runner.calls_per_sample(graph, count)
            except WorkerFailure as problem:
                screened[route] = problem.message
                if not racer.runner.alive():
                    break
                continue
            screened[route] = round(1000 * taken, 3)
            if taken < best_ms:
                if best is not None:
                    racer.runner.drop(best.graph)
                best, best_ms = Entry(racer, route, calls, None, graph), taken
            else:
                racer.runner.drop(graph)
        if best is None:
            raise WorkerFailure("RUNTIME_ERROR", racer.name, "; ".join(f"{k}: {v}" for k, v in screened.items()) or "no route")
        best.screened = screened
        return best

    def _race(self, passes: Passes, entries: list[Entry], draw: Draw) -> None:
        """Warm up, then take turns."""
        effort, plans, whole = self._effort, dict[int, int](), list[float]()
        for entry in entries:
            runner, start = entry.racer.runner, time.perf_counter()
            runner.replay(entry.graph, runner.passes(entry.graph))
            whole.append(max(1e-3, 1000 * (time.perf_counter() - start)))
            passes.warm(entry, min(50, int(effort.warm_ms / whole[-1])))
        # Passes of all kernels are alike, long enough for the fastest: what a request costs is shared by its calls.
        fastest = min((once for once, entry in zip(whole, entries, strict=True) if entry.racer.fixed), default=0.0)
        for number, entry in enumerate(entries):
            once, entry.span = fastest if entry.racer.fixed else whole[number], len(entry.calls)
            if entry.racer.runner.passes(entry.graph) > 1:  # one call a sample: as many as make a pass long enough to time
                entry.span = max(1, min(entry.span, math.ceil(effort.pass_ms * entry.span / once)))
            once *= entry.span / len(entry.calls)
            plans[number] = max(effort.passes, min(effort.most, int(effort.budget_ms / once)))
        while plans:
            turns = list(plans)
            draw.python.shuffle(turns)
            for number in turns:
                passes.run(entries[number])
                plans[number] -= 1
                if not plans[number]:
                    del plans[number]

    # ------------------------------------------------------------ verdicts

    def _settle(self, cell: Cell, mode: str, entry: Entry, passes: Passes, draw: Draw, usual_ms: float) -> None:
        """Verify one more pass, on CUDA devices in every word, then make the record."""
        runner, count = entry.racer.runner, len(entry.calls)
        if entry.racer.fixed:
            passes.finish(entry)
            if self._guards.on("verify"):
                passes.verify(entry, 0, count, everything=self.device == "cuda")
            figure = self._accuracy(cell, [passes.true_call(entry, number) for number in {0, count - 1}], draw)
            if not math.isfinite(figure.rms):
                raise Refused(f"{entry.racer.name}: {cell.name} {mode}: a timed output is not finite")
        else:
            with self._arena.scope():
                outputs = self.outputs(cell, count, closed=True)
                calls = [Call(cell.entry, c.q, c.k, c.v, outputs[i]) for i, c in enumerate(entry.calls)]
                runner.poison_outputs(entry.graph)
                runner.replay_all(entry.graph)
                runner.collect(entry.graph, calls)
                missing = unwritten(outputs)
                figure = self._accuracy(cell, calls, draw)
            if missing or not figure.within(self._limits["accuracy_rms"]):
                runner.drop(entry.graph)
                raise WorkerFailure("INACCURATE", entry.racer.name, f"{missing} words unwritten, RMS error {figure.rms:.5f}")
        samples = kept_us(self._believed(entry, usual_ms), self.device)
        low, high = median_interval(samples)
        entry.record = {
            "route": entry.route,
            "samples_us": samples,
            "median_us": median(samples),
            "interval_us": [low, high],
            "calls_per_sample": entry.span,
            "pass_us": kept_us(entry.judge_ms, self.device),
            "verified_outputs": count,
            "verified_parts": entry.parts,
            "accuracy": kept_accuracy(figure),
            "screened_us": entry.screened,
        }
        runner.drop(entry.graph)
        self._refuse_impossible(cell, mode, entry, usual_ms)

    def _believed(self, entry: Entry, usual_ms: float) -> list[float]:
        """A call's share of each pass in milliseconds: the worker's word, but no less than the judge's clock supports."""
        if not entry.racer.fixed or not self._guards.on("clock"):
            return entry.worker_ms
        slack = allowance_ms(usual_ms)
        every = zip(entry.worker_ms, entry.judge_ms, entry.spans, strict=True)
        return [max(worker, judge - min(slack / span, CLOCK_MOST * judge)) for worker, judge, span in every]

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

    def _refuse_impossible(self, cell: Cell, mode: str, entry: Entry, usual_ms: float) -> None:
        floor = floor_us(cell, self.heads, self._target, mode)
        taken = entry.record["median_us"]
        problem = None
        if taken < floor and self._guards.on("floor"):
            problem = f"{taken:.3f} us is below the floor of {floor:.3f} us that operations and bytes allow"
        elif entry.racer.fixed and self._guards.on("clock"):
            if apart := clock_problem(entry, usual_ms, self.device):
                raise Clocks(f"{entry.racer.name}: {cell.name} {mode}: {apart}")
            lasted = entry.span * median(entry.judge_ms)
            if entry.span < len(entry.calls) and lasted < 0.5 * self._effort.pass_ms:  # it was slower when that was chosen
                raise Clocks(f"{entry.racer.name}: {cell.name} {mode}: a pass of {lasted:.3f} ms is too short to time")
        if problem and entry.racer.fixed:
            raise Refused(f"{entry.racer.name}: {cell.name} {mode}: {problem}")
        if problem:
            raise WorkerFailure("REFUSED", entry.racer.name, f"{cell.name} {mode}: {problem}")
