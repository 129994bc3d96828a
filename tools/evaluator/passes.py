"""One timed pass: every captured call once, between two looks of the judge.

Before a pass the inputs change in a few secret places and all outputs are poisoned; after it the worker stands still,
every output word must be written, and secret parts of the outputs must equal the witness's. So a pass whose work was
skipped, remembered, deferred or done for another pass is found, whatever the worker says of it. Its time comes from the
worker's device and must agree with the judge's clock around the pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, unwritten, words_differ
from tools.evaluator.grids import Cell
from tools.evaluator.guards import Guards
from tools.evaluator.inputs import Draw
from tools.evaluator.parts import part_of
from tools.evaluator.quiet import Quiet
from tools.evaluator.runner import Call, Runner
from tools.evaluator.statistics import median

PART_FLOP = {"cpu": 3e6, "cuda": 2e10}  # of one part on the witness
PARTS = {"cpu": 2, "cuda": 3}  # verified a pass
V_SCALE = 4.0  # of a changed row of V: its weight among thousands of keys still shows
# What the judge's clock may see beyond the worker's: times what is usual, plus ms, plus ms a call, plus a share.
CLOCK_USUAL, CLOCK_MS, CLOCK_CALL_MS, CLOCK_SHARE = 1.5, 0.2, 0.01, 0.05


class Refused(Exception):
    """A measurement that cannot be: the run's status becomes REFUSED."""


class Mismatch(Exception):
    """A timed output that is not the witness's: the run's status becomes BIT_MISMATCH."""


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
class Inputs:
    """q, k, v of all calls of a cell: layout -> tensors [sets, B, H, S, 128]."""

    tensors: dict[str, tuple[Any, Any, Any]]

    def sets(self, layout: str) -> list[tuple[Any, Any, Any]]:
        return list(zip(*self.tensors[layout], strict=True))

    def change(self, draw: Draw) -> None:
        """New values for the first key, which every row sees, and for one more, of every head of every call."""
        _, k, v = self.tensors["bhsd"]
        for key in (0, draw.python.randrange(k.shape[3])):
            draw.normal_(k[:, :, :, key])
            draw.normal_(v[:, :, :, key], V_SCALE)


@dataclass
class Entry:
    """A racer in one cell and mode. outputs: [calls, B, Hq, Sq, 128] of a fixed racer, else None."""

    racer: Racer
    route: str | None
    calls: list[Call]
    outputs: Any
    graph: int
    per_sample: int
    samples_ms: list[float] = field(default_factory=list)
    worker_ms: list[float] = field(default_factory=list)  # of each pass
    judge_ms: list[float] = field(default_factory=list)
    parts: int = 0  # verified so far
    screened: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


class Passes:
    """Runs passes of the entries of one cell and mode. witness: a worker of the same contract, or None."""

    def __init__(
        self,
        arena: Arena,
        cell: Cell,
        mode: str,
        inputs: Inputs,
        draw: Draw,
        witness: Runner | None,
        quiet: Quiet,
        guards: Guards,
    ) -> None:
        self._arena, self._cell, self._mode, self._inputs, self._draw = arena, cell, mode, inputs, draw
        self._quiet, self._guards = quiet, guards
        self._witness = witness if guards.on("witness") else None

    def warm(self, entry: Entry, count: int) -> None:
        entry.racer.runner.replay(entry.graph, count * entry.racer.runner.passes(entry.graph))

    def run(self, entry: Entry) -> None:
        """One pass of an entry, timed and verified."""
        runner = entry.racer.runner
        if entry.racer.fixed:
            if self._guards.on("fresh"):
                self._inputs.change(self._draw)
            if self._guards.on("poison"):
                poison_(entry.outputs)
        if (busy := self._quiet.settle()) and self._guards.on("quiet"):
            raise Refused(f"{self._cell.name} {self._mode}, before {entry.racer.name}: {busy}")
        runner.synchronize()
        start = time.perf_counter()
        taken = runner.replay(entry.graph, runner.passes(entry.graph))
        self._quiet.wait()
        entry.judge_ms.append(1000 * (time.perf_counter() - start))
        entry.worker_ms.append(sum(taken))
        entry.samples_ms += taken
        if entry.racer.fixed and self._guards.on("verify"):
            self.verify(entry)

    def verify(self, entry: Entry, *, everything: bool = False) -> None:
        """No word unwritten; secret parts of the outputs, or all of them, equal to the witness's."""
        if missing := unwritten(entry.outputs):
            self._differs(entry, f"{missing} of {entry.outputs.numel()} words of the outputs were not written")
        if self._witness is None:
            return
        with self._arena.scope():
            if everything:
                self._compare(entry, [(call, self._closed(call.entry, call.q, call.k, call.v), _whole) for call in entry.calls])
                return
            parts = []
            for _ in range(PARTS[self._arena.device]):
                call = entry.calls[self._draw.python.randrange(len(entry.calls))]
                part, take = part_of(call, self._draw.python, PART_FLOP[self._arena.device], self._closed)
                parts.append((call, part, take))
            self._compare(entry, parts)

    def _closed(self, entry: str, q: Any, k: Any, v: Any, *, lse: bool = False, **options: Any) -> Call:
        return Call(entry, q, k, v, self._arena.empty(tuple(q.shape), closed=True), **options)

    def _compare(self, entry: Entry, parts: list[tuple[Call, Call, Any]]) -> None:
        assert self._witness is not None
        self._witness.run([part for _, part, _ in parts])
        for call, part, take in parts:
            entry.parts += 1
            difference = words_differ(take(call.o), part.o)
            if difference.differing:
                number = next(i for i, other in enumerate(entry.calls) if other is call)
                self._differs(
                    entry,
                    f"output {number} of {len(entry.calls)} timed calls differs from the witness's in {difference.differing} "
                    f"of {difference.words} words compared, first at {difference.first}",
                )

    def _differs(self, entry: Entry, what: str) -> None:
        text = f"{entry.racer.name}: {self._cell.name} {self._mode}: {what}"
        if entry.racer.name == "candidate":
            raise Mismatch(text)
        raise Refused(f"{text}; a root or incumbent must have the contract's bits")


def _whole(tensor: Any) -> Any:
    return tensor


def unseen_ms(entry: Entry) -> float:
    """How much longer the judge's clock saw a pass than the worker's: its median, in milliseconds."""
    return median([judge - worker for judge, worker in zip(entry.judge_ms, entry.worker_ms, strict=True)])


def clock_problem(entry: Entry, usual_ms: float, device: str) -> str | None:
    """Why the worker's times cannot be believed, or None: passes took the judge's clock longer than the worker says.

    usual_ms: what the judge's clock sees beyond a worker's that is trusted, or of a request that does nothing.
    """
    unseen, said = unseen_ms(entry), median(entry.worker_ms)
    calls = len(entry.calls) if device == "cpu" else 0
    if unseen <= CLOCK_USUAL * usual_ms + CLOCK_MS + CLOCK_CALL_MS * calls + CLOCK_SHARE * said:
        return None
    return f"the worker's clock counted {said:.3f} ms a pass, the judge's {said + unseen:.3f} ms"
