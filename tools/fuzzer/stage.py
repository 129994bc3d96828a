"""Scenes as tensors in the judge's memory, calls as a runner takes them, and the comparison of two calls' rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tools.evaluator.compare import poison_, raw
from tools.evaluator.inputs import KINDS, Draw
from tools.evaluator.runner import Call
from tools.fuzzer.case import DIM, CallSpec, Given, Layout, Scene

POOL_WORDS = 1 << 22
BEHIND = {"nan": float("nan"), "inf": float("inf"), "huge": -3.0e38, "zeros": 0.0}
FILL = 0x7FFF  # a NaN, between rows and around them
GRAPH_FILL = 0.5  # of q, k and v while a graph is captured


# ---------------------------------------------------------------- scenes


class PooledDraw(Draw):
    """A Draw whose normal numbers are windows of one pool made from the seed: copying is faster than drawing."""

    _pools: dict[tuple[int, str], Any] = {}  # noqa: RUF012  one pool, of the last seed and device

    def __init__(self, seed: int, label: str, device: str) -> None:
        super().__init__(seed, label, device)
        if (seed, device) not in self._pools:
            self._pools.clear()
            pool = Draw(seed, "pool", device).normal(POOL_WORDS)
            self._pools[seed, device] = (pool, pool.bfloat16())
        self._pool, self._words = self._pools[seed, device]

    def _window(self, pool: Any, shape: Any) -> Any:
        count = int(np.prod(shape))
        start = self.python.randrange(max(1, POOL_WORDS - count))
        while count > len(pool) - start:  # larger than the pool: once more round it
            pool = torch.cat((pool, pool))
        return pool[start : start + count].view(shape)

    def normal_(self, tensor: Any, scale: float = 1.0) -> Any:
        window = self._window(self._words, tensor.shape)
        return tensor.copy_(window if scale == 1.0 else window * scale)

    def normal(self, *shape: int) -> Any:
        return self._window(self._pool, shape)


@dataclass(frozen=True)
class Values:
    """A scene's tensors, densely stored: q [batch,heads_q,rows,128], k and v [batch,heads_kv,keys,128]."""

    scene: Scene
    q: Any
    k: Any
    v: Any


def fill(arena: Any, scene: Scene) -> Values:
    """Draw or copy a scene's values into the arena."""
    sizes = {"q": (scene.heads_q, scene.q_rows or scene.keys), "k": (scene.heads_kv, scene.keys)}
    q, k, v = (arena.empty((scene.batch, *sizes[name], DIM)) for name in ("q", "k", "k"))
    source = scene.inputs
    if isinstance(source, Given):
        for tensor, words in zip((q, k, v), (source.q, source.k, source.v), strict=True):
            given = torch.frombuffer(bytearray(words), dtype=torch.int16).view(tensor.shape)
            raw(tensor).copy_(given)
        return Values(scene, q, k, v)
    draw = PooledDraw(source.seed, source.label, arena.device)
    KINDS[source.scores](draw, q, k, v)
    if source.values != source.scores:  # v of another kind, whose own q and k are thrown away
        other_q, other_k = arena.empty((1, 1, 1, DIM)), arena.empty((1, 1, scene.keys, DIM))
        KINDS[source.values](PooledDraw(source.seed, source.label + " v", arena.device), other_q, other_k, v)
    return Values(scene, q, k, v)


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class Placed:
    """A call in memory. starts: first row of each part of a packed call."""

    spec: CallSpec
    call: Call
    starts: tuple[int, ...] = ()


def _tensor(arena: Any, shape: tuple[int, ...], layout: Layout, packed: bool) -> Any:
    """An unset tensor of `shape` (…,128) that lies in memory as a layout says; what surrounds it is NaN."""
    pad = layout.pad[1:] if packed else layout.pad
    order = tuple(d - 1 for d in layout.order if d) if packed else layout.order
    whole = (*(size + extra for size, extra in zip(shape, pad, strict=False)), DIM + layout.columns)
    tensor = arena.empty(whole, "bf16", order=(*order, len(order)), skew=layout.skew)
    if not any(pad) and not layout.columns:
        return tensor
    raw(tensor).fill_(FILL)
    inside = (*(slice(extra, None) for extra in pad), slice(DIM))
    return tensor[inside]


def _put(arena: Any, source: Any, layout: Layout, packed: bool) -> Any:
    return _tensor(arena, tuple(source.shape[:-1]), layout, packed).copy_(source)


def _take(base: Any, sequences: list[int], heads: slice) -> Any:
    """Sequences of a tensor, as a view where they are one or neighbours."""
    first, last = sequences[0], sequences[-1]
    if sequences == list(range(first, first + len(sequences))):
        return base[first : last + 1, heads]
    if sequences.count(first) == len(sequences):
        return base[first : first + 1, heads].expand(len(sequences), -1, -1, -1)
    return base[torch.tensor(sequences, device=base.device), heads]


def _cache(arena: Any, base: Any, spec: CallSpec, sequences: list[int], heads: slice, layout: Layout) -> Any:
    """k or v of an extend or decode."""
    lengths = [n for _, n in spec.parts]
    longest = max(lengths)
    source = _take(base, sequences, heads)
    if spec.view:
        return source[:, :, : spec.capacity or longest]
    source = source[:, :, :longest]
    if spec.capacity is None:
        return _put(arena, source, layout, False)
    made = _tensor(arena, (len(lengths), source.shape[1], spec.capacity), layout, False)
    made[:, :, longest:].fill_(BEHIND[spec.behind])
    made[:, :, :longest].copy_(source)
    if min(lengths) < longest:
        behind = torch.arange(longest) >= torch.tensor(lengths)[:, None]
        made[:, :, :longest].masked_fill_(behind.to(made.device)[:, None, :, None], BEHIND[spec.behind])
    return made


def _ints(arena: Any, values: list[int]) -> Any:
    return arena.empty((len(values),), "i32").copy_(torch.tensor(values, dtype=torch.int32))


def place(arena: Any, values: Values, spec: CallSpec) -> Placed:
    """Build a call with a poisoned output."""
    scene, (first, count) = values.scene, spec.heads or (0, values.scene.heads_kv)
    group = scene.heads_q // scene.heads_kv
    heads, heads_q = slice(first, first + count), slice(first * group, (first + count) * group)
    sequences, lengths = [b for b, _ in spec.parts], [n for _, n in spec.parts]
    options: dict[str, Any] = {"num_threads": spec.num_threads, "num_sms": spec.num_sms}
    starts: tuple[int, ...] = ()
    packed = spec.entry == "packed"
    three = ((values.q, heads_q, spec.q), (values.k, heads, spec.k), (values.v, heads, spec.v))
    if packed:
        offsets = [0, *np.cumsum(lengths).tolist()]
        starts = tuple(offsets[:-1])
        options |= {"cu_seqlens": _ints(arena, offsets), "max_seqlen": max(lengths)}
        filled = [(b, n) for b, n in spec.parts if n]
        q, k, v = (
            _put(arena, torch.cat([t[b, h, :n] for b, n in filled], dim=1).transpose(0, 1), layout, True)
            for t, h, layout in three
        )
    elif spec.entry == "prefill":
        q, k, v = (_take(t, sequences, h)[:, :, : lengths[0]] for t, h, _ in three)
        if not spec.view:
            q, k, v = (_put(arena, t, layout, False) for t, layout in zip((q, k, v), (spec.q, spec.k, spec.v), strict=True))
    else:
        q = _queries(arena, values, spec, heads_q)
        k, v = (_cache(arena, t, spec, sequences, h, layout) for t, h, layout in three[1:])
        if spec.capacity is not None:
            options["lengths"] = _ints(arena, lengths)
    out = _tensor(arena, tuple(q.shape[:-1]), spec.o, packed)
    lse = arena.empty((q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3]), "f32") if spec.lse else None
    placed = Placed(spec, Call(spec.entry, q, k, v, out, lse, **options), starts)
    poison(placed)
    return placed


def _queries(arena: Any, values: Values, spec: CallSpec, heads: slice) -> Any:
    """q [parts, heads, rows, 128] of an extend or decode."""
    scene, count = values.scene, 1 if spec.entry == "decode" else spec.rows
    sequences = [b for b, _ in spec.parts]
    starts = [n - count - scene.first_query(b) for b, n in spec.parts]
    if starts.count(starts[0]) == len(starts) and starts[0] >= 0:
        q = _take(values.q, sequences, heads)[:, :, starts[0] : starts[0] + count]
        return q if spec.view else _put(arena, q, spec.q, False)
    rows = torch.tensor(starts)[:, None] + torch.arange(count)
    rows.clamp_(0, values.q.shape[2] - 1)  # a row without keys has no query of its own
    index = torch.tensor(sequences)[:, None].to(values.q.device)
    return _put(arena, values.q[index, heads, rows.to(index.device)].transpose(1, 2), spec.q, False)


def poison(placed: Placed) -> None:
    """Overwrite a call's outputs with NaN."""
    poison_(placed.call.o)
    if placed.call.lse is not None:
        poison_(placed.call.lse)


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Common:
    """Rows that two calls both compute: part and row number in each, and their places in the scene (int64 arrays)."""

    parts: tuple[Any, Any]
    rows: tuple[Any, Any]
    sequences: Any
    positions: Any
    heads: range  # KV heads


def common_rows(first: CallSpec, second: CallSpec, heads_kv: int) -> Common | None:
    """Rows of `second` that `first` computes too, or None. Where `first` has a sequence more than once, a part of `second`
    is compared with the one part that shares most rows with it."""
    a, b = (spec.heads or (0, heads_kv) for spec in (first, second))
    heads = range(max(a[0], b[0]), min(a[0] + a[1], b[0] + b[1]))
    if not heads:
        return None
    mine, theirs = (np.array(spec.parts) for spec in (second, first))
    my_start, their_start = (part[:, 1] - _row_counts(spec, part[:, 1]) for spec, part in ((second, mine), (first, theirs)))
    if len(set(theirs[:, 0].tolist())) == len(theirs):  # each sequence once, as in every reference
        owner = np.full(int(max(mine[:, 0].max(), theirs[:, 0].max())) + 1, -1)
        owner[theirs[:, 0]] = np.arange(len(theirs))
        other = owner[mine[:, 0]]
    else:
        shared = np.minimum(theirs[None, :, 1], mine[:, None, 1]) - np.maximum(their_start[None], my_start[:, None])
        shared = np.where(theirs[None, :, 0] == mine[:, None, 0], shared, 0)
        other = np.where(shared.max(axis=1) > 0, shared.argmax(axis=1), -1)
    low = np.maximum(np.maximum(my_start, their_start[other]), 0)
    counts = np.where(other < 0, 0, np.minimum(mine[:, 1], theirs[other, 1]) - low).clip(min=0)
    if not counts.any():
        return None
    part = np.repeat(np.arange(len(mine)), counts)
    positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[part]
    return Common(
        (other[part], part), (positions - their_start[other[part]], positions - my_start[part]), mine[part, 0], positions, heads
    )


def _row_counts(spec: CallSpec, keys: Any) -> Any:
    """Rows of each part of a call, as CallSpec.rows_of has them."""
    if spec.entry in ("prefill", "packed"):
        return keys
    return np.full_like(keys, 1 if spec.entry == "decode" else spec.rows)


def _rows(placed: Placed, common: Common, side: int, heads_kv: int, lse: bool) -> Any:
    """The common rows of a call's output [rows, heads, 32] (four words in one integer), or of its LSE [rows, heads]."""
    call = placed.call
    parts, rows = common.parts[side], common.rows[side]
    first, count = placed.spec.heads or (0, heads_kv)
    group = call.q.shape[1] // count
    heads = slice((common.heads.start - first) * group, (common.heads.stop - first) * group)
    tensor = raw(call.lse) if lse else call.o.view(torch.int64)
    if placed.starts:
        index = torch.from_numpy(np.array(placed.starts)[parts] + rows).to(tensor.device)
        return tensor[heads, index].transpose(0, 1) if lse else tensor[index, heads]
    part, row = (torch.from_numpy(x).to(tensor.device) for x in (parts, rows))
    return tensor[part, heads, row]


@dataclass(frozen=True)
class Difference:
    """What differs between two calls. first: where the first differing word is, and both words in hex."""

    output: str
    words: int
    differing: int
    first: dict[str, Any]


class Comparison:
    """Two placed calls, compared after both have run."""

    def __init__(self, first: Placed, second: Placed, scene: Scene) -> None:
        self.first, self.second, self.scene = first, second, scene
        self.common = common_rows(first.spec, second.spec, scene.heads_kv)
        self.outputs = ("o", "lse") if first.spec.lse and second.spec.lse else ("o",)

    def words(self) -> int:
        """Words that are compared."""
        if self.common is None:
            return 0
        rows = len(self.common.positions) * len(self.common.heads) * (self.scene.heads_q // self.scene.heads_kv)
        return rows * (DIM + (len(self.outputs) > 1))

    def pair(self, output: str) -> tuple[Any, Any]:
        assert self.common is not None
        kv, lse = self.scene.heads_kv, output == "lse"
        return _rows(self.first, self.common, 0, kv, lse), _rows(self.second, self.common, 1, kv, lse)

    def flag(self) -> Any:
        """Whether any word differs: a bool, or a CUDA tensor whose reading waits for the device."""
        pairs = [self.pair(output) for output in self.outputs]
        if self.first.call.o.device.type == "cpu":
            return not all(torch.equal(x, y) for x, y in pairs)
        flags = [(x != y).any() for x, y in pairs]
        return flags[0] if len(flags) == 1 else flags[0] | flags[1]

    def difference(self, output: str) -> Difference | None:
        """The difference in one output, or None."""
        if self.common is None:
            return None
        x, y = (t.cpu().contiguous() for t in self.pair(output))
        if output == "o":
            x, y = x.view(torch.int16), y.view(torch.int16)
        unequal = (x != y).numpy()
        if not unequal.any():
            return None
        place = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), unequal.shape))
        group = self.scene.heads_q // self.scene.heads_kv
        digits = 4 if output == "o" else 8
        words = [f"0x{int(t[place]) & (16**digits - 1):0{digits}x}" for t in (x, y)]
        first: dict[str, Any] = {
            "sequence": int(self.common.sequences[place[0]]),
            "head": self.common.heads.start * group + place[1],
            "row": int(self.common.positions[place[0]]),
        }
        if output == "o":
            first["dim"] = place[2]
        first |= {"first": words[0], "second": words[1]}
        return Difference(output, int(unequal.size), int(unequal.sum()), first)
