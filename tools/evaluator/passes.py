"""One timed pass: every captured call once, or on the CPU the next few of them, between two looks of the judge.

Before a pass all inputs are drawn anew and all outputs are poisoned; after it the worker stands still, every output word
must be written, and secret parts of the outputs must equal the witness's. The calls of a pass are chained: the output of
one is the query of the next. So work that was skipped, remembered, deferred, shared between calls or done for another
pass is found, whatever the worker says of it. Its time comes from the worker's device and must agree with the judge's
clock around the pass.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, unwritten, words_differ
from tools.evaluator.grids import Cell
from tools.evaluator.guards import Guards
from tools.evaluator.inputs import Draw
from tools.evaluator.parts import Take, part_of
from tools.evaluator.quiet import Quiet
from tools.evaluator.runner import Call, Runner
from tools.evaluator.statistics import median

PART_FLOP = {"cpu": 3e6, "cuda": 2e10}  # of one part on the witness
PARTS = {"cpu": 2, "cuda": 3}  # verified a pass
V_SHARE = 0.2  # V is sqrt(V_SHARE * keys) large, so that outputs, the next queries, neither grow nor vanish along a chain
POOL_SLACK = 8192  # words: inputs start somewhere in them
SECRET = random.SystemRandom()  # what no seed can tell
USUAL = 0.75  # what is usual: what this share of all requests does not exceed
# What the judge's clock may see beyond the worker's: times what is usual, plus ms, plus ms a call, plus a share.
CLOCK_USUAL, CLOCK_MS, CLOCK_CALL_MS, CLOCK_SHARE = 1.5, 0.2, 0.003, 0.05
CLOCK_MOST = 0.25  # of a pass on the judge's clock: no more is believed to be the request's, however busy the machine


class Refused(Exception):
    """A measurement that cannot be: the run's status becomes REFUSED."""


class Clocks(Refused):
    """The clocks disagree, or the device is not idle. A machine that is busy for a moment does that too: the cell is measured
    again."""


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


class Inputs:
    """What the kernels read in one cell and mode: K and V of every set of a pass, and the first call's q.

    They are copies of pools in closed memory, from another secret place of the pools for each pass, so that what the
    kernels should have read is known whatever they write over it. Sets lie in a secret order, so that a call cannot fetch
    the next one's into the cache. V is scaled so that outputs, which are the next call's queries, stay about as large as
    the first. q [B,Hq,Sq,128]; k, v [sets,B,Hkv,Skv,128].
    """

    def __init__(self, arena: Arena, cell: Cell, heads: tuple[int, int], sets: int, draw: Draw, guards: Guards) -> None:
        shapes = [(cell.batch, heads[0], cell.rows, 128), *[(sets, cell.batch, heads[1], cell.keys, 128)] * 2]
        self._guards = guards
        self._open = [arena.empty(shape) for shape in shapes]
        self._pools = [arena.empty((math.prod(shape) + POOL_SLACK,), closed=True) for shape in shapes]
        scales = (1.0, 1.0, math.sqrt(max(1.0, V_SHARE * cell.keys)))
        for pool, scale in zip(self._pools, scales, strict=True):
            draw.fill_(pool, scale)
        self._place = list(range(sets))  # of each set in k and v
        if guards.on("order"):
            SECRET.shuffle(self._place)
        # What each place of k and v should hold: (pool's part, index in it).
        self._true: list[list[tuple[Any, int]]] = [[(t, i) for i in range(sets)] for t in self._open[1:]]
        self._queried = 0, self._open[0]  # the call whose query came from the pool, and that query
        self._renew(0, self._open[1].shape[0], 0, self._open[0])

    def renew(self, first: int, last: int, q: Any) -> None:
        """Other values in every word that the calls first .. last - 1 read, but for outputs of each other.

        q: what the first of them reads as its query, the output of a call before or the inputs' own q.
        """
        if self._guards.on("fresh"):
            sets = self._open[1].shape[0]
            low, high = (first, last) if last <= sets else (0, sets)
            self._renew(low, high, first, q)

    def _renew(self, first: int, last: int, call: int, q: Any) -> None:
        place = 8 * SECRET.randrange(POOL_SLACK // 8)
        self._queried = call, self._pools[0][place : place + q.numel()].view(q.shape)
        q.copy_(self._queried[1])
        whole = last - first == len(self._place)
        for index in (1, 2):
            start, size = 8 * SECRET.randrange(POOL_SLACK // 8), self._open[index][0].numel()
            # Together in one copy, or each by itself: sets that follow each other lie apart.
            for low, high in [(0, last)] if whole else [(place, place + 1) for place in self._place[first:last]]:
                part = self._open[index][low:high]
                source = self._pools[index][start + low * size : start + high * size].view(part.shape)
                part.copy_(source)
                self._true[index - 1][low:high] = [(source, i) for i in range(high - low)]

    def calls(self, entry: str, outputs: Any) -> list[Call]:
        """Chained calls over the sets in turn. outputs: [calls, B, Hq, Sq, 128]."""
        q, every = self._open[0], list(outputs)
        k, v = ([sets[place] for place in self._place] for sets in self._open[1:])
        return [Call(entry, every[i - 1] if i else q, k[i % len(k)], v[i % len(v)], out) for i, out in enumerate(every)]

    def true_call(self, entry: str, outputs: Any, number: int) -> Call:
        """One of these calls, reading what no worker of a candidate could write, but for the output of the call before."""
        q = outputs[number - 1] if number else self._open[0]
        place = self._place[number % len(self._place)]
        if not self._guards.on("closed"):
            places = [(t, place) for t in self._open[1:]]
        else:
            places = [sets[place] for sets in self._true]
            if number == self._queried[0]:
                q = self._queried[1]
        k, v = (tensor[index] for tensor, index in places)
        return Call(entry, q, k, v, outputs[number])


@dataclass
class Entry:
    """A racer in one cell and mode. outputs: [calls, B, Hq, Sq, 128] of a fixed racer, else None. worker_ms and
    judge_ms: a call's share of each pass on either clock; spans: how many calls each had."""

    racer: Racer
    route: str | None
    calls: list[Call]
    outputs: Any
    graph: int
    span: int = 0  # calls of one pass
    next: int = 0  # the call that comes next
    worker_ms: list[float] = field(default_factory=list)
    judge_ms: list[float] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    parts: int = 0  # verified so far
    screened: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


class Passes:
    """Runs passes of the entries of one cell and mode. witness: a worker of the same contract."""

    def __init__(
        self,
        arena: Arena,
        cell: Cell,
        mode: str,
        inputs: Inputs,
        witness: Runner,
        quiet: Quiet,
        guards: Guards,
    ) -> None:
        self._arena, self._cell, self._mode, self._inputs = arena, cell, mode, inputs
        self._quiet, self._guards = quiet, guards
        self._witness, self._pinged = (witness if guards.on("witness") else None), witness
        self.requests_ms: list[float] = []  # what those of the witness cost, while the machine is as busy as it is

    def warm(self, entry: Entry, count: int) -> None:
        entry.racer.runner.replay(entry.graph, count * entry.racer.runner.passes(entry.graph))

    def run(self, entry: Entry) -> None:
        """One pass of an entry, timed and verified."""
        runner, first, last = entry.racer.runner, entry.next, min(entry.next + entry.span, len(entry.calls))
        entry.next = last % len(entry.calls)
        if entry.racer.fixed:
            self.prepare(entry, first, last)
        if (busy := self._quiet.settle()) and self._guards.on("quiet"):
            raise Clocks(f"{self._cell.name} {self._mode}, before {entry.racer.name}: {busy}")
        runner.synchronize()
        start = time.perf_counter()
        taken = runner.replay(entry.graph, min(last - first, runner.passes(entry.graph)))
        self._quiet.wait()
        entry.judge_ms.append(1000 * (time.perf_counter() - start) / (last - first))
        entry.worker_ms.append(sum(taken) / (last - first))
        entry.spans.append(last - first)
        self.requests_ms.append(self._quiet.ping_ms(self._pinged))
        if entry.racer.fixed and self._guards.on("verify"):
            self.verify(entry, first, last)

    def finish(self, entry: Entry) -> None:
        """One pass more over all calls, untimed and unverified, of a kernel library."""
        runner = entry.racer.runner
        if entry.next:
            runner.replay(entry.graph, len(entry.calls) - entry.next)
        self.prepare(entry, 0, len(entry.calls))
        runner.replay_all(entry.graph)

    def prepare(self, entry: Entry, first: int, last: int) -> None:
        self._inputs.renew(first, last, entry.calls[first].q)
        if self._guards.on("poison"):
            poison_(entry.outputs[first:last])

    def verify(self, entry: Entry, first: int, last: int, *, everything: bool = False) -> None:
        """No word unwritten; secret parts of these calls' outputs, or all of them, equal to the witness's."""
        if missing := unwritten(entry.outputs[first:last]):
            self._differs(entry, f"{missing} words of the outputs of {last - first} calls were not written")
        if self._witness is None:
            return
        with self._arena.scope():
            if everything:
                outputs = entry.outputs[first:last]
                expected = self._arena.empty(tuple(outputs.shape), closed=True)
                calls = [self.true_call(entry, number) for number in range(first, last)]
                self._witnessed([replace(call, o=o) for call, o in zip(calls, expected, strict=True)])
                entry.parts += last - first
                self._compare(entry, first, outputs, expected)
                return
            parts: list[tuple[int, Call, Call, Take]] = []
            for _ in range(PARTS[self._arena.device]):
                number = SECRET.randrange(first, last)
                call = self.true_call(entry, number)
                part, take = part_of(call, SECRET, PART_FLOP[self._arena.device], self._closed)
                parts.append((number, call, part, take))
            self._witnessed([part for _, _, part, _ in parts])
            for number, call, part, take in parts:
                entry.parts += 1
                self._compare(entry, number, take(call.o)[None], part.o[None])

    def true_call(self, entry: Entry, number: int) -> Call:
        return self._inputs.true_call(self._cell.entry, entry.outputs, number)

    def _closed(self, entry: str, q: Any, k: Any, v: Any, *, lse: bool = False, **options: Any) -> Call:
        return Call(entry, q, k, v, self._arena.empty(tuple(q.shape), closed=True), **options)

    def _witnessed(self, calls: list[Call]) -> None:
        assert self._witness is not None
        start = time.perf_counter()
        taken = self._witness.run(calls)
        self.requests_ms.append(1000 * (time.perf_counter() - start) - taken)

    def _compare(self, entry: Entry, first: int, outputs: Any, expected: Any) -> None:
        """Outputs of calls from `first` on, [calls, ...], against the witness's."""
        difference = words_differ(outputs, expected)
        if difference.first is not None:
            call, *where = difference.first["at"]
            at = {**difference.first, "at": where}
            self._differs(
                entry,
                f"output {first + call} of {len(entry.calls)} timed calls differs from the witness's; {difference.differing} "
                f"of {difference.words} words compared differ, the first at {at}",
            )

    def _differs(self, entry: Entry, what: str) -> None:
        text = f"{entry.racer.name}: {self._cell.name} {self._mode}: {what}"
        if entry.racer.name == "candidate":
            raise Mismatch(text)
        raise Refused(f"{text}; a root or incumbent must have the contract's bits")


def high(values: list[float]) -> float:
    """What a share of USUAL of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(USUAL * len(values)))]


def allowance_ms(usual_ms: float) -> float:
    """What the judge's clock may see of a pass beyond the worker's, apart from what grows with the pass."""
    return CLOCK_USUAL * usual_ms + CLOCK_MS


def unseen_ms(entry: Entry) -> list[float]:
    """How much longer the judge's clock saw each pass than the worker's, in milliseconds."""
    every = zip(entry.judge_ms, entry.worker_ms, entry.spans, strict=True)
    return [span * (judge - worker) for judge, worker, span in every]


def clock_problem(entry: Entry, usual_ms: float, device: str) -> str | None:
    """Why the worker's times cannot be believed, or None: passes took the judge's clock longer than the worker says.

    The median decides: a worker may lie about fewer than half of its passes, which can push its median down to its
    fastest honest passes and no further; a promotion looks at the judge's clock as well.

    usual_ms: what the judge's clock sees beyond a worker's that is trusted, or of a request that does nothing.
    """
    unseen, said = median(unseen_ms(entry)), entry.span * median(entry.worker_ms)
    calls = entry.span if device == "cpu" else 0
    if unseen <= allowance_ms(usual_ms) + CLOCK_CALL_MS * calls + CLOCK_SHARE * said:
        return None
    return f"the worker's clock counted {said:.3f} ms a pass, the judge's {said + unseen:.3f} ms"
