"""Secret shapes from the contract's whole domain: what a candidate knows of the other checks says nothing of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tools.evaluator import inputs
from tools.evaluator.cases import Context, check

ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3))
LARGEST = {"cpu": 2e8, "cuda": 4e11}  # operations of one call


@dataclass(frozen=True)
class Shape:
    """rows queries over `keys` keys (or a cache of that capacity, each sequence with its own length) for every sequence."""

    entry: str
    batch: int
    heads_kv: int
    group: int
    rows: int
    keys: int
    kind: str
    orders: tuple[tuple[int, ...], ...]  # of q, k, v
    skew: int
    ragged: bool

    def flop(self) -> float:
        return 512.0 * self.batch * self.heads_kv * self.group * self.rows * self.keys

    def label(self) -> str:
        ragged = ", ragged" if self.ragged else ""
        heads = f"{self.group * self.heads_kv}/{self.heads_kv}"
        return f"{self.entry} B{self.batch} {heads} {self.rows}x{self.keys} {self.kind}{ragged}"


def draw_shape(random: Any, longest: int, device: str) -> Shape:
    """Sizes spread over orders of magnitude, odd ones as likely as even ones."""

    def size(most: int) -> int:
        return min(most, max(1, round(math.exp(random.uniform(0.0, math.log(most + 0.5))))))

    while True:
        entry = random.choice(("prefill", "packed", "extend", "decode"))
        keys = size(longest)
        rows = {"decode": 1, "extend": size(keys)}.get(entry, keys)
        shape = Shape(
            entry,
            size(48),
            size(8),
            random.randint(1, 16),
            rows,
            keys,
            random.choice(list(inputs.KINDS)),
            tuple(random.choice(ORDERS) for _ in range(3)),
            16 * random.randrange(16),
            entry in ("packed", "extend", "decode") and random.random() < 0.5,
        )
        if shape.flop() <= LARGEST[device] and shape.group * shape.heads_kv <= 64:
            return shape


@check("right only on the shapes that are known to be tested", "heads, batches or lengths that no other check has")
def hidden(ctx: Context) -> None:
    """Calls of secret shapes against the witness, and one row of each against a decode of its own."""
    random = inputs.Draw(ctx.seed, "hidden shapes", ctx.device).python
    for number in range(ctx.grid.hidden):
        shape = draw_shape(random, ctx.grid.long, ctx.device)
        with ctx.case(f"{number}: {shape.label()}"):
            (_packed if shape.entry == "packed" else _dense)(ctx, shape, random)


def _dense(ctx: Context, shape: Shape, random: Any) -> None:
    heads = (shape.group * shape.heads_kv, shape.heads_kv)
    sizes = [(shape.batch, heads[0], shape.rows, 128), *[(shape.batch, heads[1], shape.keys, 128)] * 2]
    q, k, v = (ctx.arena.empty(s, order=o, skew=shape.skew) for s, o in zip(sizes, shape.orders, strict=True))
    inputs.KINDS[shape.kind](ctx.draw, q, k, v)
    counts = [random.randint(shape.rows, shape.keys) if shape.ragged else shape.keys for _ in range(shape.batch)]
    options = {"lengths": ctx.ints(counts)} if shape.ragged else {}
    out, lse = ctx.run(shape.entry, q, k, v, **options)
    b, row = random.randrange(shape.batch), random.randrange(shape.rows)
    seen, one = counts[b] - shape.rows + row + 1, slice(b, b + 1)
    got = ctx.run("decode", q[one, :, row : row + 1], k[one, :, :seen], v[one, :, :seen], witness=False)
    ctx.both_equal(got, (out[one, :, row : row + 1], lse[one, :, row : row + 1]), f"row {row} of sequence {b} by decode")


def _packed(ctx: Context, shape: Shape, random: Any) -> None:
    lengths = [random.randint(1, shape.keys) if shape.ragged else shape.keys for _ in range(shape.batch)]
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    total, heads = starts[-1], (shape.group * shape.heads_kv, shape.heads_kv)
    q, k, v = (ctx.tensor(total, count, 128) for count in (heads[0], heads[1], heads[1]))
    inputs.KINDS[shape.kind](ctx.draw, *(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)))
    out, lse = ctx.run("packed", q, k, v, cu_seqlens=ctx.ints(starts), max_seqlen=max(lengths))
    b = random.randrange(shape.batch)
    row = random.randrange(lengths[b])
    at, first = starts[b] + row, starts[b]
    mine = [t[None, first : at + 1].transpose(1, 2) for t in (k, v)]
    got = ctx.run("decode", q[None, at : at + 1].transpose(1, 2), *mine, witness=False)
    ctx.both_equal(
        got, (out[None, None, at].transpose(1, 2), lse[None, :, at : at + 1]), f"row {row} of sequence {b} by decode"
    )
