"""Make a case small while it still fails in the same way: less history, plainer calls, fewer and shorter sequences.

Every step proposes simpler cases; the first that still fails replaces the case. `cost` orders cases, so that the search
ends. A drawn scene of another shape has other values: where the fault needs certain values, its shape stays.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from tools.fuzzer.bench import Bench
from tools.fuzzer.case import PLAIN, TENSORS, CallSpec, Case, Drawn, Layout, Scene, why_not
from tools.fuzzer.relations import Natural, twin
from tools.fuzzer.trial import Outcome, attempt

replace = dataclasses.replace
Step = Callable[["Shrinker", Case, Outcome], Iterator[Case]]
KV_HEADS, GROUPS = range(1, 9), range(1, 17)


# ---------------------------------------------------------------- how complicated a case is


def _layout_cost(layout: Layout, natural: Layout) -> int:
    return 3 * (layout.order != natural.order) + 2 * sum(layout.pad) + layout.columns // 8 + layout.skew // 16


def _call_cost(call: CallSpec, natural: Natural) -> int:
    cost = 10 + sum(3 + n for _, n in call.parts) + call.rows + (call.heads is not None) + 5 * call.view + call.lse
    cost += sum(sequence for sequence, _ in call.parts) + sum(
        _layout_cost(getattr(call, t), natural(call.entry)) for t in TENSORS
    )
    cost += 20 + call.capacity - max(n for _, n in call.parts) if call.capacity is not None else 0
    cost += sum(2 + n for n in (call.num_threads, call.num_sms) if n) + 5 * (call.stream != "side") + 20 * call.graph
    return cost + (call.behind != "nan")


def cost(case: Case, natural: Natural) -> int:
    """Smaller is simpler. Two calls of one entry point are simpler than two of different ones."""
    scenes = sum(3 * s.batch + s.heads_q + s.heads_kv + s.keys + 50 * _kinds(s) for s in case.scenes)
    entries = 500 * (case.second is not None and case.second.entry != case.first.entry)
    return 1000 * len(case.before) + entries + scenes + sum(_call_cost(call, natural) for call in case.calls)


def _kinds(scene: Scene) -> int:
    drawn = scene.inputs
    return (drawn.scores != "normal") + (drawn.values != "normal") if isinstance(drawn, Drawn) else 0


# ---------------------------------------------------------------- the shrinker


class Shrinker:
    """Shrinks cases on a bench, each for at most `seconds`."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        self._bench, self._seconds = bench, seconds
        self.natural = bench.natural
        self.attempts = 0

    def shrink(self, case: Case, outcome: Outcome, until: float = math.inf) -> tuple[Case, Outcome]:
        """The simplest case found that fails as `case` did, and its outcome. until: a time.monotonic() to stop at."""
        deadline = min(time.monotonic() + self._seconds, until)
        simpler = True
        while simpler:
            simpler = False
            for step in STEPS:
                while found := self._first(step, case, outcome, deadline):
                    case, outcome = found
                    simpler = True
                if time.monotonic() > deadline:
                    return case, outcome
        return case, outcome

    def _first(self, step: Step, case: Case, outcome: Outcome, deadline: float) -> tuple[Case, Outcome] | None:
        most = cost(case, self.natural)
        tried = set()
        for candidate in step(self, case, outcome):
            if time.monotonic() > deadline:
                return None
            if candidate in tried or cost(candidate, self.natural) >= most or not self._legal(candidate):
                continue
            tried.add(candidate)
            self.attempts += 1
            got = attempt(self._bench, candidate)
            if got.what == outcome.what:
                return candidate, got
        return None

    def _legal(self, case: Case) -> bool:
        if case.output == "lse" and not (case.first.lse and case.second and case.second.lse):
            return False
        if not self._bench.abilities.strides and any(
            getattr(call, t) != self.natural(call.entry) for call in case.calls for t in TENSORS
        ):
            return False
        return all(why_not(case.scenes[call.scene], call) is None for call in case.calls)


def _row(case: Case, outcome: Outcome) -> tuple[int, int]:
    """(sequence, keys) of the row where the case fails; a failing call's first part."""
    if outcome.difference is None:
        return case.first.parts[0]
    return outcome.difference.first["sequence"], outcome.difference.first["row"] + 1


def _sides(case: Case) -> list[tuple[str, CallSpec]]:
    return [("first", case.first), *([("second", case.second)] if case.second else [])]


def _with(case: Case, **calls: Any) -> Case:
    return replace(case, **calls, observed={})


# ---------------------------------------------------------------- steps: history, calls


def history(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """Fewer calls ahead: none, each half, all but one."""
    before = case.before
    size = len(before)
    while size:
        for start in range(0, len(before), size):
            yield _with(case, before=before[:start] + before[start + size :])
        size //= 2


def twins(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """Plain calls of the failing row in place of one call or both; two calls of one entry point if possible."""
    sequence, keys = _row(case, outcome)
    made: dict[str, list[CallSpec]] = {}
    for side, call in _sides(case):
        parts = [part for part in call.parts if part[0] == sequence and keys - 1 in call.rows_of(part)]
        wanted = [(sequence, keys), *parts[:1]] if parts else []
        made[side] = [twin(call, part, self.natural) for part in wanted]
        made[side] += [replace(plain, rows=1) for plain in made[side] if plain.entry == "extend"]
    if case.second is None:
        yield from (_with(case, first=plain) for plain in made["first"])
        return
    for first in made["first"]:
        for second in made["second"]:
            yield _with(case, first=first, second=second)
    for side, other in (("first", "second"), ("second", "first")):
        for plain in made[other] + made[side]:
            if plain.on == getattr(case, side).on:
                yield _with(case, **{side: replace(plain, lse=plain.lse or case.output == "lse")})


def features(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """One special thing less, in all calls and in each."""
    sides = _sides(case)

    def change(**values: Any) -> Iterator[Case]:
        if len(sides) == 2:
            yield _with(case, **{side: replace(call, **values) for side, call in sides})
        for side, call in sides:
            yield _with(case, **{side: replace(call, **values)})

    yield from change(graph=False, stream="side", num_threads=0, num_sms=0, view=False)
    for name, value in (("graph", False), ("stream", "side"), ("num_threads", 0), ("num_sms", 0), ("view", False)):
        yield from change(**{name: value})
    yield from change(lse=False)
    yield from change(capacity=None)
    yield from change(behind="nan")
    for side, call in sides:
        layout = self.natural(call.entry)
        yield _with(case, **{side: replace(call, **dict.fromkeys(TENSORS, layout))})
        for tensor in TENSORS:
            mine: Layout = getattr(call, tensor)
            options = [layout, replace(mine, skew=0), replace(mine, columns=0), replace(mine, pad=PLAIN.pad)]
            options.append(replace(mine, order=layout.order))
            options += [replace(mine, pad=tuple(0 if i == d else n for i, n in enumerate(mine.pad))) for d in range(3)]
            options += [replace(mine, columns=n) for n in range(8, mine.columns, 8)]
            options += [
                replace(mine, pad=(*mine.pad[:d], n, *mine.pad[d + 1 :])) for d in range(3) for n in range(1, mine.pad[d])
            ]
            for option in options:
                yield _with(case, **{side: replace(call, **{tensor: option})})
        for name in ("num_threads", "num_sms"):
            for n in range(1, getattr(call, name)):
                yield _with(case, **{side: replace(call, **{name: n})})


def parts(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """Fewer sequences in a call, or shorter neighbours."""
    sequence, keys = _row(case, outcome)
    for side, call in _sides(case):
        size = len(call.parts) // 2
        while size:
            for start in range(0, len(call.parts), size):
                left = call.parts[:start] + call.parts[start + size :]
                if left:
                    yield _with(case, **{side: replace(call, parts=left)})
            size //= 2
        needed = {i for i, p in enumerate(call.parts) if p[0] == sequence and keys - 1 in call.rows_of(p)}
        for length in (1, 2):
            others = tuple(p if i in needed else (p[0], length) for i, p in enumerate(call.parts))
            yield _with(case, **{side: replace(call, parts=others)})
        yield _with(case, **{side: replace(call, parts=tuple((sequence, n) for _, n in call.parts))})
        for n in range(1, call.rows if call.entry == "extend" else 1):
            yield _with(case, **{side: replace(call, rows=n)})
        if call.capacity is not None:
            for capacity in range(max(n for _, n in call.parts), call.capacity):
                yield _with(case, **{side: replace(call, capacity=capacity)})


# ---------------------------------------------------------------- steps: sizes


def lengths(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """The failing row's sequence shortened in all calls alike, from 1 key up; then all other lengths."""
    counts = {n for _, call in _sides(case) for _, n in call.parts}
    for old in sorted(counts, reverse=True):
        for new in range(1, old):
            changed = {}
            for side, call in _sides(case):
                shorter = tuple((b, new if n == old else n) for b, n in call.parts)
                rows = min(call.rows, min(n for _, n in shorter)) if call.capacity is None else call.rows
                room = call.capacity
                if room is not None and max(n for _, n in call.parts) == old:
                    room -= old - max(n for _, n in shorter)
                changed[side] = replace(call, parts=shorter, rows=max(1, rows), capacity=room)
            yield _with(case, **changed)


def compact(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """Scenes without what no call uses: sequences, keys, whole scenes."""
    used = sorted({call.scene for call in case.calls})
    if len(used) < len(case.scenes):
        yield _mapped(case, tuple(case.scenes[i] for i in used), lambda call: replace(call, scene=used.index(call.scene)))
        return
    for number, scene in enumerate(case.scenes):
        if not isinstance(scene.inputs, Drawn):
            continue
        mine = [call for call in case.calls if call.scene == number]
        sequences = sorted({b for call in mine for b, _ in call.parts})
        keys = max(max([n for _, n in call.parts] + [call.capacity or 0] * call.view) for call in mine)
        keys = min(scene.keys, max(keys, max(len(call.rows_of(p)) for call in mine for p in call.parts)))
        place = {b: i for i, b in enumerate(sequences)}

        def move(call: CallSpec, number: int = number, place: dict[int, int] = place) -> CallSpec:
            return replace(call, parts=tuple((place[b], n) for b, n in call.parts)) if call.scene == number else call

        for changed in (
            replace(scene, batch=len(sequences), keys=keys),
            replace(scene, batch=len(sequences)),
            replace(scene, keys=keys),
        ):
            scenes = (*case.scenes[:number], changed, *case.scenes[number + 1 :])
            yield _mapped(case, scenes, move if changed.batch == len(sequences) else lambda call: call)


def kinds(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """Normal values."""
    for number, scene in enumerate(case.scenes):
        drawn = scene.inputs
        if isinstance(drawn, Drawn):
            for plain in (
                replace(drawn, scores="normal", values="normal"),
                replace(drawn, scores="normal"),
                replace(drawn, values="normal"),
            ):
                yield _with(case, scenes=(*case.scenes[:number], replace(scene, inputs=plain), *case.scenes[number + 1 :]))


def heads(self: Shrinker, case: Case, outcome: Outcome) -> Iterator[Case]:
    """All heads in place of some; fewer heads."""
    for side, call in _sides(case):
        yield _with(case, **{side: replace(call, heads=None)})
        if call.heads is not None:
            yield from (_with(case, **{side: replace(call, heads=(call.heads[0], n))}) for n in range(1, call.heads[1]))
    for number, scene in enumerate(case.scenes):
        if not isinstance(scene.inputs, Drawn):
            continue
        for total, kv in sorted((kv * group, kv) for kv in KV_HEADS for group in GROUPS):
            if total + kv < scene.heads_q + scene.heads_kv:
                smaller = replace(scene, heads_q=total, heads_kv=kv)
                scenes = (*case.scenes[:number], smaller, *case.scenes[number + 1 :])

                def clip(call: CallSpec, number: int = number, kv: int = kv) -> CallSpec:
                    if call.scene != number or call.heads is None:
                        return call
                    first = min(call.heads[0], kv - 1)
                    return replace(call, heads=(first, min(call.heads[1], kv - first)))

                yield _mapped(case, scenes, clip)


def _mapped(case: Case, scenes: tuple[Scene, ...], change: Callable[[CallSpec], CallSpec]) -> Case:
    """A case over other scenes with all calls changed."""
    second = None if case.second is None else change(case.second)
    return _with(case, scenes=scenes, first=change(case.first), second=second, before=tuple(map(change, case.before)))


STEPS: tuple[Step, ...] = (history, twins, features, compact, kinds, parts, heads, lengths)
