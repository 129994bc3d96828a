"""One row of an attention call in its surroundings.

A Scene is a call of the candidate together with the one row that is looked at. Its tensors are private copies with the
strides and the alignment of the check's own, so that probes may write into them. `Stage.truth` is the witness's answer for
the row alone, by decode: the contract gives a row the same bits whatever stands around it.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, raw
from tools.evaluator.runner import Call, Runner

HEAD_DIM = 128
COPY_BYTES = {"cpu": 1 << 28, "cuda": 4 << 30}  # larger calls are not copied with their strides


@dataclass(frozen=True)
class Row:
    """Raw words of one row: 128 of the output, one of the LSE (None where it was not asked for)."""

    o: tuple[int, ...]
    lse: int | None

    def differing(self, other: Row) -> tuple[int, bool]:
        """(how many output words differ, whether the LSE does)."""
        words = sum(a != b for a, b in zip(self.o, other.o, strict=True))
        return words, self.lse is not None and other.lse is not None and self.lse != other.lse


@dataclass(frozen=True)
class Scene:
    """q [B,Hq,Sq,128], k/v [B,Hkv,Skv,128]; packed: [total,H,128] with `starts`, B+1 row offsets.

    batch, head, row: the row looked at (row counted in its sequence). lengths: keys of each sequence, or None.
    """

    entry: str
    q: Any
    k: Any
    v: Any
    batch: int
    head: int
    row: int
    lengths: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    num_sms: int = 0
    num_threads: int = 0
    lse: bool = True

    @property
    def kv_head(self) -> int:
        return self.head * int(self.k.shape[1]) // int(self.q.shape[1])

    @property
    def sequences(self) -> int:
        return int(self.q.shape[0]) if self.starts is None else len(self.starts) - 1

    @property
    def rows(self) -> int:
        """Query rows of the row's sequence."""
        if self.starts is not None:
            return self.starts[self.batch + 1] - self.starts[self.batch]
        return int(self.q.shape[2])

    @property
    def keys(self) -> int:
        """Keys of the row's sequence."""
        if self.starts is not None:
            return self.rows
        room = int(self.k.shape[2])
        return room if self.lengths is None else max(0, min(self.lengths[self.batch], room))

    @property
    def visible(self) -> int:
        """Keys that the row sees."""
        return max(0, min(self.keys, self.keys - self.rows + self.row + 1))

    def row_q(self) -> Any:
        """[128], a view."""
        if self.starts is not None:
            return self.q[self.starts[self.batch] + self.row, self.head]
        return self.q[self.batch, self.head, self.row]

    def sequence_kv(self) -> tuple[Any, Any]:
        """The keys and values of the row's sequence and head, also those that it does not see: [keys,128], views."""
        if self.starts is not None:
            mine = slice(self.starts[self.batch], self.starts[self.batch + 1])
            return self.k[mine, self.kv_head], self.v[mine, self.kv_head]
        return self.k[self.batch, self.kv_head, : self.keys], self.v[self.batch, self.kv_head, : self.keys]

    def row_kv(self) -> tuple[Any, Any]:
        """The keys and values that the row sees: [visible,128], views."""
        k, v = self.sequence_kv()
        return k[: self.visible], v[: self.visible]

    def describe(self) -> dict[str, Any]:
        return {
            "entry": self.entry,
            "batch": self.sequences,
            "heads": [int(self.q.shape[1]), int(self.k.shape[1])],
            "rows": self.rows,
            "keys": self.keys,
            "capacity": int(self.k.shape[2]) if self.starts is None else None,
            "lengths": None if self.lengths is None else list(self.lengths),
            "starts": None if self.starts is None else list(self.starts),
            "row": [self.batch, self.head, self.row],
            "visible_keys": self.visible,
            "num_sms": self.num_sms,
            "num_threads": self.num_threads,
        }


# ---------------------------------------------------------------- copies


def extent(tensor: Any) -> int:
    """Words from a tensor's first to its last."""
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def private(arena: Arena, tensor: Any) -> Any:
    """A copy with the same strides and the same address modulo 256."""
    words = extent(tensor)
    flat = arena.empty((words,), "bf16", skew=tensor.data_ptr() % 256)
    flat.copy_(tensor.as_strided((words,), (1,), tensor.storage_offset()))
    return flat.as_strided(tuple(tensor.shape), tuple(tensor.stride()), flat.storage_offset())


def copy(arena: Arena, scene: Scene) -> Scene:
    """The same scene in other memory of the same strides."""
    q, k, v = (private(arena, t) for t in (scene.q, scene.k, scene.v))
    return replace(scene, q=q, k=k, v=v)


def dense(arena: Arena, scene: Scene) -> Scene:
    """The same values in densely stored tensors."""
    q, k, v = (arena.empty(tuple(t.shape), "bf16").copy_(t) for t in (scene.q, scene.k, scene.v))
    return replace(scene, q=q, k=k, v=v)


def _of(call: Call, place: tuple[int, int, int]) -> Scene:
    batch, head, row = place
    starts = lengths = None
    if call.entry == "packed":
        starts = tuple(int(x) for x in call.cu_seqlens.tolist())
        batch = next(b for b in range(len(starts) - 1) if starts[b] <= row < starts[b + 1])
        row -= starts[batch]
    elif call.lengths is not None:
        lengths = tuple(int(x) for x in call.lengths.tolist())
    lse = call.lse is not None
    return Scene(call.entry, call.q, call.k, call.v, batch, head, row, lengths, starts, call.num_sms, call.num_threads, lse)


def visible_keys(call: Call, place: tuple[int, int, int]) -> int:
    """Keys that a row of a call sees; `place` as in scene_of."""
    return _of(call, place).visible


def scene_of(call: Call, place: tuple[int, int, int], arena: Arena) -> tuple[Scene, bool]:
    """The scene of a call, and whether its storage is the call's own (else it is dense).

    place: batch, head and row of the output; a packed call's row counts from the start of the whole tensor.
    """
    found = _of(call, place)
    if 2 * sum(extent(t) for t in (call.q, call.k, call.v)) <= COPY_BYTES[arena.device]:
        return copy(arena, found), True
    return dense(arena, alone(found)), False


# ---------------------------------------------------------------- running


class Stage:
    """Runs scenes on the candidate and their rows on the witness. runs: calls of the candidate so far."""

    def __init__(self, candidate: Runner, witness: Runner, arena: Arena, budget_s: float) -> None:
        self.candidate, self.witness, self.arena = candidate, witness, arena
        self.runs = 0
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def _take(self, o: Any, lse: Any) -> Row:
        words = tuple(int(w) & 0xFFFF for w in raw(o).tolist())
        return Row(words, None if lse is None else int(raw(lse)) & 0xFFFFFFFF)

    def _ints(self, values: tuple[int, ...] | None) -> Any:
        import torch

        if values is None:
            return None
        return self.arena.empty((len(values),), "i32").copy_(torch.tensor(values, dtype=torch.int32))

    def _call(self, scene: Scene) -> Call:
        packed = scene.starts is not None
        o = self.arena.empty(tuple(scene.q.shape), "bf16")
        shape = (scene.q.shape[1], scene.q.shape[0]) if packed else tuple(scene.q.shape[:3])
        lse = self.arena.empty(shape, "f32") if scene.lse else None
        for tensor in (o, lse):
            if tensor is not None:
                poison_(tensor)
        lengths, starts = self._ints(scene.lengths), self._ints(scene.starts)
        longest = max((b - a for a, b in itertools.pairwise(scene.starts or ())), default=0)
        inputs = scene.q, scene.k, scene.v
        return Call(scene.entry, *inputs, o, lse, lengths, starts, longest, scene.num_sms, scene.num_threads)

    def answers(self, scenes: list[Scene]) -> list[Row]:
        """The candidate's words of each scene's row; all calls in one request. Raises WorkerFailure."""
        self.runs += len(scenes)
        with self.arena.scope():
            calls = [self._call(scene) for scene in scenes]
            self.candidate.run(calls)
            found = []
            for scene, call in zip(scenes, calls, strict=True):
                if scene.starts is not None:
                    row = scene.starts[scene.batch] + scene.row
                    found.append(self._take(call.o[row, scene.head], None if call.lse is None else call.lse[scene.head, row]))
                else:
                    at = (scene.batch, scene.head, scene.row)
                    found.append(self._take(call.o[at], None if call.lse is None else call.lse[at]))
            return found

    def truths(self, scenes: list[Scene]) -> list[Row]:
        """The witness's words of the rows."""
        if any(scene.visible == 0 for scene in scenes):
            return [Row((0,) * HEAD_DIM, 0xFF800000) for _ in scenes]
        with self.arena.scope():
            calls = []
            for scene in scenes:
                o = self.arena.empty((1, 1, 1, HEAD_DIM), "bf16", closed=True)
                lse = self.arena.empty((1, 1, 1), "f32", closed=True)
                k, v = (t[None, None] for t in scene.row_kv())
                calls.append(Call("decode", scene.row_q()[None, None, None], k, v, o, lse))
            self.witness.run(calls)
            return [self._take(call.o[0, 0, 0], call.lse[0, 0, 0]) for call in calls]

    def answer(self, scene: Scene) -> Row:
        return self.answers([scene])[0]

    def truth(self, scene: Scene) -> Row:
        return self.truths([scene])[0]

    def differs(self, scene: Scene) -> bool:
        words, lse = self.answer(scene).differing(self.truth(scene))
        return bool(words or lse)


# ---------------------------------------------------------------- the row by itself


def alone(scene: Scene) -> Scene:
    """The row with the keys that it sees and nothing else, in its own entry point."""
    head, kv = slice(scene.head, scene.head + 1), slice(scene.kv_head, scene.kv_head + 1)
    if scene.starts is not None:
        mine = slice(scene.starts[scene.batch], scene.starts[scene.batch] + scene.row + 1)
        q, k, v = scene.q[mine, head], scene.k[mine, kv], scene.v[mine, kv]
        return replace(scene, q=q, k=k, v=v, batch=0, head=0, starts=(0, scene.row + 1))
    one, seen = slice(scene.batch, scene.batch + 1), slice(0, max(1, scene.visible))
    first = 0 if scene.entry == "prefill" else scene.row
    lengths = None if scene.visible else (0,)
    q = scene.q[one, head, first : scene.row + 1]
    return replace(
        scene, q=q, k=scene.k[one, kv, seen], v=scene.v[one, kv, seen], batch=0, head=0, row=scene.row - first, lengths=lengths
    )


def through(scene: Scene, entry: str, arena: Arena) -> Scene:
    """The row alone through some entry point. Rows before it in a prefill are copies of it."""
    k, v = (t[None, None] for t in scene.row_kv())
    q = scene.row_q()[None, None, None]
    made = Scene(entry, q, k, v, 0, 0, 0, num_sms=scene.num_sms, num_threads=scene.num_threads)
    if entry in ("decode", "extend"):
        return made
    n = scene.visible
    whole = arena.empty((1, 1, n, HEAD_DIM), "bf16").copy_(q.expand(1, 1, n, HEAD_DIM))
    if entry == "prefill":
        return replace(made, q=whole, row=n - 1)
    flat = [t[0].transpose(0, 1) for t in (whole, k, v)]
    return replace(made, q=flat[0], k=flat[1], v=flat[2], row=n - 1, starts=(0, n))
