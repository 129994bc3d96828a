"""First divergence: where two results differ, how far, in which stage of the reduction, and a small case that shows it.

    parts = Parts(start, witness, arena, tile, order, Origin("cpu", "kernel.cpp", sha256))
    found = localise(parts, results, got, expected, "decode against prefill")
    found.record           JSON-able, for the report
    found.save(path)       writes the reproducer, for `python tools/fuzz.py --replay`

`results` are the (call, o, lse) of the calls made so far, o and lse in the judge's memory; `got` and `expected` are views
of them, or anything of the same shape. Nothing here raises, and nothing changes a verdict: what goes wrong is a note.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tools.evaluator.arena import Arena
from tools.evaluator.compare import raw
from tools.evaluator.diagnose import Lab, diagnose
from tools.evaluator.reproducer import Origin, case_of
from tools.evaluator.runner import Call, Runner, WorkerFailure
from tools.evaluator.scene import Scene, Stage, alone, scene_of, through, visible_keys
from tools.evaluator.shrink import fewer_keys, shrink, smaller
from tools.fuzzer.case import Case, write

BUDGET_S = 10.0
SHARES = (0.25, 0.75, 0.95)  # of the budget: when surroundings are small, probes done, keys few
MAX_ROWS = 200  # differing rows that are looked at
ENTRIES = ("decode", "extend", "prefill", "packed")
Result = tuple[Call, Any, Any]


@dataclass(frozen=True)
class Parts:
    """start: makes a fresh worker of the candidate, which may die here without harm to the run; its timeout should be about
    the budget. tile and order ("ascending" or "descending"): the contract's."""

    start: Callable[[], Runner]
    witness: Runner | None
    arena: Arena
    tile: int
    order: str
    origin: Origin


@dataclass
class Found:
    """case: None where no small case was found."""

    record: dict[str, Any]
    case: Case | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> bool:
        """Write the case to a new file and name it in the record; False where there is none."""
        if self.case is None:
            return False
        write(path, self.case)
        self.record["reproducer"] = {**self.record["reproducer"], "file": path.name}
        return True


class FirstDivergence:
    """What a run's Context calls at every difference; only the first is looked into. found: its outcome, or None."""

    def __init__(self, parts: Parts, budget_s: float = BUDGET_S) -> None:
        self._parts, self._budget_s = parts, budget_s
        self.found: Found | None = None

    def __call__(self, results: list[Result], got: Any, expected: Any, what: str) -> dict[str, Any] | None:
        """The record for the report's failure entry; None from the second call on."""
        if self.found is not None:
            return None
        self.found = localise(self._parts, results, got, expected, what, budget_s=self._budget_s)
        return self.found.record


# ---------------------------------------------------------------- how far


def ordered(words: Any) -> Any:
    """Raw words as int64 such that neighbouring numbers are neighbours; both zeros are 0."""
    x = words.to(torch.int64)
    low = (1 << (words.element_size() * 8 - 1)) - 1
    return torch.where(x < 0, -(x & low), x)


def _label(low: int) -> str:
    return str(low) if low < 3 else f"{low} to {2 * (low - 1)}"


def how_far(got: Any, expected: Any) -> dict[str, Any]:
    """Words compared and differing, and a histogram of the distance in units of the last place.

    Buckets: "1", "2", "3 to 4", "5 to 8" and so on; "sign of zero"; "not a number" where either word is a NaN or poison.
    """
    x, y = raw(got), raw(expected)
    unequal = x != y
    a, b = got[unequal], expected[unequal]
    nan = torch.isnan(a.float()) | torch.isnan(b.float())
    distance = (ordered(x[unequal]) - ordered(y[unequal])).abs()
    signs = int((~nan & (distance == 0)).sum())
    distance = distance[~nan & (distance > 0)]
    histogram: dict[str, int] = {"sign of zero": signs} if signs else {}
    if distance.numel():
        # 1, 2, 3-4, 5-8: the bucket of d starts at 2^(bits of d - 1) + 1.
        power = torch.log2((distance - 1).clamp(min=1).double()).floor().to(torch.int64)
        starts = torch.where(distance <= 2, distance, 2**power + 1)
        for low in sorted(set(starts.tolist())):
            histogram[_label(int(low))] = int((starts == low).sum())
    if int(nan.sum()):
        histogram["not a number"] = int(nan.sum())
    count = int(unequal.sum())
    return {
        "words": x.numel(),
        "differing": count,
        "share": count / x.numel(),
        "ulp_max": int(distance.max()) if distance.numel() else 0,
        "ulp_histogram": histogram,
    }


# ---------------------------------------------------------------- where


def _first_word(got: Any, expected: Any) -> tuple[int, ...]:
    """Index of the first word that differs."""
    return tuple(int(i) for i in torch.nonzero(raw(got) != raw(expected))[0])


def _offset(tensor: Any, index: tuple[int, ...]) -> int:
    return int(tensor.storage_offset()) + sum(i * int(s) for i, s in zip(index, tensor.stride(), strict=True))


def _coordinates(tensor: Any, offset: int) -> tuple[int, ...] | None:
    """The index whose word lies at `offset` of the tensor's storage, None where it is not one of the tensor's."""
    left = offset - int(tensor.storage_offset())
    index = [0] * tensor.ndim
    for dim in sorted(range(tensor.ndim), key=lambda d: (-int(tensor.stride(d)), int(tensor.shape[d]) == 1)):
        if tensor.shape[dim] > 1:
            index[dim], left = divmod(left, int(tensor.stride(dim)))
    inside = left == 0 and all(0 <= i < int(size) for i, size in zip(index, tensor.shape, strict=True))
    return tuple(index) if inside else None


def locate(results: list[Result], tensor: Any, index: tuple[int, ...]) -> tuple[Call, str, tuple[int, ...]] | None:
    """The call to whose result a word belongs, "o" or "lse", and its place there. The newest result is asked first."""
    offset = _offset(tensor, index)
    for call, o, lse in reversed(results):
        for name, result in (("o", o), ("lse", lse)):
            same = result is not None and result.dtype == tensor.dtype
            if same and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                place = _coordinates(result, offset)
                if place is not None:
                    return call, name, place
    return None


def _row_place(call: Call, name: str, place: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, head, row) of an output's or LSE's word; packed: batch 0 and the row of the whole tensor."""
    if call.entry == "packed":
        return (0, place[1], place[0]) if name == "o" else (0, place[0], place[1])
    return place[0], place[1], place[2]


def _best_row(results: list[Result], got: Any, expected: Any, tile: int) -> tuple[int, ...]:
    """Index of a differing word in the row that says most: one of several tiles of keys, then of many differing words."""
    unequal = raw(got) != raw(expected)
    is_output = got.element_size() == 2
    counts = unequal.sum(-1) if is_output else unequal.to(torch.int64)
    some = torch.nonzero(counts)
    some = some[torch.linspace(0, len(some) - 1, min(len(some), MAX_ROWS)).long()]
    ranked = []
    for at in (tuple(int(i) for i in row) for row in some):
        index = (*at, int(unequal[at].to(torch.int64).argmax())) if is_output else at
        found = locate(results, got, index) or locate(results, expected, index)
        keys = visible_keys(found[0], _row_place(*found)) if found else 0
        ranked.append((min(keys, 3 * tile), int(counts[at]), index))
    return max(ranked)[2]


# ---------------------------------------------------------------- the whole


def localise(parts: Parts, results: list[Result], got: Any, expected: Any, what: str, *, budget_s: float = BUDGET_S) -> Found:
    """The record of the first differing comparison of a run. got, expected: tensors of one shape and dtype that differ."""
    start, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # many small steps: threads that wait for each other would only cost time
    record: dict[str, Any] = {"what": what, "how_far": None, "where": None, "stage": None, "reproducer": None, "notes": []}
    found = Found(record, notes=record["notes"])
    try:
        record["how_far"] = how_far(got, expected)
        _localise(parts, results, got, expected, found, budget_s)
    except WorkerFailure as problem:
        found.notes.append(f"the search ended early: {problem}")
    except Exception as problem:  # whatever it is, the verdict stands without it
        found.notes.append(f"the search ended early: {type(problem).__name__}: {problem}"[:300])
    finally:
        torch.set_num_threads(threads)
    record["seconds"] = round(time.monotonic() - start, 3)
    return found


def _localise(parts: Parts, results: list[Result], got: Any, expected: Any, found: Found, budget_s: float) -> None:
    index = _first_word(got, expected)
    place = locate(results, got, index) or locate(results, expected, index)
    if place is None:
        found.notes.append("the result is of no known call: nothing to replay")
        return
    record = found.record
    record["where"] = _where(place, got, expected, index)
    if parts.witness is None:
        found.notes.append("no witness: the stage cannot be told")
        return
    with _started(parts.start) as candidate, parts.arena.scope():
        stage = Stage(candidate, parts.witness, parts.arena, budget_s)
        for chosen in dict.fromkeys((_best_row(results, got, expected, parts.tile), index)):
            scene, side = _off_contract(stage, results, (got, expected), chosen, found)
            if scene is not None:
                record["off_contract"] = side
                _search(parts, stage, scene, found, budget_s)
                return
    found.notes.append("the difference does not repeat: it depends on what ran before, on timing, or on this call's memory")


@contextlib.contextmanager
def _started(start: Callable[[], Runner]) -> Iterator[Runner]:
    runner = start()
    try:
        yield runner
    finally:
        runner.kill()  # nothing in it is needed
        runner.close()


def _where(place: tuple[Call, str, tuple[int, ...]], got: Any, expected: Any, index: tuple[int, ...]) -> dict[str, Any]:
    call, name, at = place
    batch, head, row = _row_place(call, name, at)
    bits = got.element_size() * 8
    word, other = (int(raw(t)[index]) & ((1 << bits) - 1) for t in (got, expected))
    return {
        "entry": call.entry,
        "output": name,
        "batch": batch,
        "head": head,
        "row": row,
        "dim": at[-1] if name == "o" else None,
        "key_tile": None,
        "got": f"0x{word:0{bits // 4}x}",
        "expected": f"0x{other:0{bits // 4}x}",
    }


def _off_contract(
    stage: Stage, results: list[Result], pair: tuple[Any, Any], index: tuple[int, ...], found: Found
) -> tuple[Scene | None, str]:
    """The scene of the side that the witness contradicts: the result itself, or else the one that it was compared with."""
    for tensor, side in zip(pair, ("got", "expected"), strict=True):
        place = locate(results, tensor, index)
        if place is None:
            continue
        call, name, at = place
        scene, same = scene_of(call, _row_place(call, name, at), stage.arena)
        for tried in (replace(scene, lse=True), scene):  # a call without LSE may take another path
            if stage.differs(tried):
                return tried, side
        again = "the same call made again" if same else "the row alone, stored densely (the call is too large to copy),"
        found.notes.append(f"{side}: {again} agrees with the witness")
    return None, ""


def _search(parts: Parts, stage: Stage, scene: Scene, found: Found, budget_s: float) -> None:
    record = found.record
    record["replayed"] = {"entry": scene.entry, "row": [scene.batch, scene.head, scene.row], "visible_keys": scene.visible}
    wrong = stage.answer(scene)

    def time_until(share: float) -> bool:
        return stage.left() > budget_s * (1 - share)

    near = shrink(scene, smaller, stage.differs, lambda: time_until(SHARES[0]))
    record["surroundings"] = near.describe()
    by_itself = stage.differs(alone(scene))
    record["row_alone"] = by_itself
    if not by_itself:
        found.notes.append("the row alone agrees with the witness: the fault depends on what stands around it")
    record["entry_points"] = entries = _entry_points(stage, scene)
    if entries.get("decode") and stage.answer(cheap := through(scene, "decode", stage.arena)) == wrong:
        near = cheap  # the same wrong bits where probes cost least
    if scene.visible:
        _stage(parts, stage, near, found, budget_s)
    else:
        found.notes.append("the row sees no key: its output is 0 and its LSE -inf")
    small = shrink(near, lambda s: fewer_keys(s, parts.tile), stage.differs, lambda: time_until(SHARES[2]))
    for tried in (small, near, scene):
        found.case = case_of(stage, tried, parts.origin, f"{record['what']}: the row against the witness")
        if found.case is not None:
            record["reproducer"] = tried.describe()
            return
    found.notes.append("no file shows it: the fault depends on memory that a case cannot describe, or the inputs are too large")


def _stage(parts: Parts, stage: Stage, scene: Scene, found: Found, budget_s: float) -> None:
    """Probe the row, and say which stage and which tile of keys came out."""
    lab = Lab(stage, scene, parts.tile, parts.order, budget_s * (1 - SHARES[1]))
    verdict = diagnose(lab)
    found.record["stage"] = verdict.record()
    found.record["probes"] = lab.runs
    found.notes.extend(verdict.notes)
    if verdict.tile is not None:
        found.record["where"]["key_tile"] = verdict.tile.start // parts.tile


def _entry_points(stage: Stage, scene: Scene) -> dict[str, bool]:
    """Whether the row alone, with its own values, differs from the witness in each entry point."""
    if scene.visible == 0:
        return {}
    with stage.arena.scope():
        return {entry: stage.differs(through(scene, entry, stage.arena)) for entry in ENTRIES}
