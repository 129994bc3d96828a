"""Checks of shape and batch: a row has the same bits whichever entry point computes it and whatever stands beside it."""

from __future__ import annotations

from typing import Any

import torch

from tools.evaluator import inputs
from tools.evaluator.cases import Context, check


def split(random: Any, total: int, largest: int) -> list[int]:
    """A random partition of `total`; single rows are frequent."""
    parts = []
    while total:
        size = min(total, 1 if random.random() < 0.25 else random.randint(1, largest))
        parts.append(size)
        total -= size
    return parts


def rows_as_batch(tensor: Any) -> Any:
    """[1,H,S,128] -> [S,H,1,128]: every row a sequence of its own, without a copy."""
    return tensor[0].transpose(0, 1).unsqueeze(2)


def lse_as_batch(lse: Any) -> Any:
    return lse[0].transpose(0, 1).unsqueeze(2)


def edge_lengths(tile: int, longest: int) -> list[int]:
    """1, 2, 3 and what lies around multiples of a tile."""
    around = {m * tile + d for m in (1, 2, 3) for d in (-1, 0, 1)} | {tile // 2, tile // 2 + 1, 2 * tile + tile // 2 + 5}
    return sorted(n for n in {1, 2, 3, 5, 17} | around if 1 <= n <= longest)


# ---------------------------------------------------------------- one row, whichever entry point computes it


@check(
    "decode's tile or order is not prefill's",
    "equality breaks from some position on",
    "tail of a row's own tile",
    "dispatch by length",
)
def every_length(ctx: Context) -> None:
    """All rows of a prefill against one decode launch of as many sequences, whose lengths are 1, 2, ... S."""
    for kind in ("normal", "jumps", "rising"):
        with ctx.case(f"S{ctx.grid.sweep} {kind}"):
            size = ctx.grid.sweep
            q, k, v = ctx.qkv(1, size, size, kind=kind)
            out, lse = ctx.run("prefill", q, k, v)
            lengths = ctx.ints(list(range(1, size + 1)))
            keys, values = (t.expand(size, -1, -1, -1) for t in (k, v))
            for entry in ("decode", "extend"):
                got = ctx.run(entry, rows_as_batch(q), keys, values, lengths=lengths)
                ctx.both_equal(got, (rows_as_batch(out), lse_as_batch(lse)), f"{entry} of every length against prefill")
    for size in edge_lengths(ctx.tile, ctx.grid.long):
        with ctx.case(f"exact L{size}"):
            q, k, v = ctx.qkv(2, size, size)
            out, lse = ctx.run("prefill", q, k, v)
            got = ctx.run("decode", q[:, :, -1:], k, v)
            ctx.both_equal(got, (out[:, :, -1:], lse[:, :, -1:]), "decode without lengths against prefill")


@check(
    "a tile on the diagonal rounds otherwise than a full one",
    "partial last tile",
    "a prompt alone and with more tokens behind it",
    "causal edge off by one",
    "last tile skipped",
)
def tails(ctx: Context) -> None:
    """Prefills of lengths around the tile's edges against the same rows of a longer one."""
    longest = 3 * ctx.tile + ctx.tile // 2 + 9
    with ctx.case(f"prefixes of S{longest}") as draw:
        q, k, v = ctx.qkv(1, longest, longest)
        out, lse = ctx.run("prefill", q, k, v)
        sizes = edge_lengths(ctx.tile, longest) + [draw.python.randint(1, longest) for _ in range(2 * ctx.grid.rounds)]
        for size in sizes:
            got = ctx.run("prefill", q[:, :, :size], k[:, :, :size], v[:, :, :size])
            ctx.both_equal(got, (out[:, :, :size], lse[:, :, :size]), f"prefill of the first {size} rows")
    for extra in (ctx.tile, 4):
        with ctx.case(f"S{ctx.grid.long} with {extra} tokens more"):
            size = ctx.grid.long
            q, k, v = ctx.qkv(1, size + extra, size + extra)
            whole = ctx.run("prefill", q, k, v)
            part = ctx.run("prefill", q[:, :, :size], k[:, :, :size], v[:, :, :size])
            ctx.both_equal(part, (whole[0][:, :, :size], whole[1][:, :, :size]), "the prompt's rows")


@check(
    "chunk boundaries follow a scheduler's budget",
    "calls of one query go to another kernel",
    "unaligned offsets",
    "short verify steps",
    "rows that see no key",
)
def extend(ctx: Context) -> None:
    """Random partitions of a prefill, short extends at random places, and ragged extends over a cache."""
    size = ctx.grid.long // 2 + 7
    for number in range(ctx.grid.rounds):
        with ctx.case(f"partition {number} of S{size}") as draw:
            q, k, v = ctx.qkv(2, size, size)
            out, lse = ctx.run("prefill", q, k, v)
            start = 0
            for rows in split(draw.python, size, ctx.tile + ctx.tile // 2):
                end = start + rows
                got = ctx.run("extend", q[:, :, start:end], k[:, :, :end], v[:, :, :end], witness=number == 0)
                ctx.both_equal(got, (out[:, :, start:end], lse[:, :, start:end]), f"rows {start} to {end - 1}")
                start = end
            for rows in (1, 2, 3, 5, 8, 9):
                end = draw.python.randint(rows, size)
                got = ctx.run("extend", q[:, :, end - rows : end], k[:, :, :end], v[:, :, :end])
                ctx.both_equal(got, (out[:, :, end - rows : end], lse[:, :, end - rows : end]), f"{rows} rows ending at {end}")
    with ctx.case("ragged, some rows without a key") as draw:
        rows, capacity = ctx.tile // 4 + 3, 2 * ctx.tile + 40
        lengths = [capacity, rows, rows - 1, 1, 0, *(draw.python.randint(1, capacity) for _ in range(3))]
        q, k, v = ctx.qkv(len(lengths), rows, capacity)
        out, lse = ctx.run("extend", q, k, v, lengths=ctx.ints(lengths))
        for b, length in enumerate(lengths):
            blind = max(0, rows - length)
            if blind:
                zeros = ctx.copied(torch.zeros_like(out[b, :, :blind]))
                ctx.equal(out[b, :, :blind], zeros, f"sequence of {length} keys: rows that see none are 0")
                ctx.equal(lse[b, :, :blind], torch.full_like(lse[b, :, :blind], float("-inf")), "their LSE is -inf")
            if blind < rows:
                one = slice(b, b + 1)
                got = ctx.run("extend", q[one, :, blind:], k[one, :, :length], v[one, :, :length], witness=False)
                ctx.both_equal(got, (out[one, :, blind:], lse[one, :, blind:]), f"sequence of {length} keys alone")
    with ctx.case("decode with an empty sequence"):
        q, k, v = ctx.qkv(3, 1, ctx.tile)
        out, lse = ctx.run("decode", q, k, v, lengths=ctx.ints([5, 0, ctx.tile]))
        ctx.equal(out[1], torch.zeros_like(out[1]), "no keys: output 0")
        ctx.equal(lse[1], torch.full_like(lse[1], float("-inf")), "no keys: LSE -inf")


@check("some ratio of heads takes another path", "swapped KV heads", "groups split over blocks")
def head_ratios(ctx: Context) -> None:
    """Prefill, extend and decode agree for every ratio of query to KV heads."""
    for heads in ctx.grid.ratios:
        with ctx.case(f"heads {heads[0]}/{heads[1]}") as draw:
            size = ctx.tile + draw.python.randint(1, 2 * ctx.tile)
            q, k, v = ctx.qkv(2, size, size, heads=heads)
            out, lse = ctx.run("prefill", q, k, v)
            for length in {1, size, draw.python.randint(1, size), draw.python.randint(1, size)}:
                got = ctx.run("decode", q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length])
                ctx.both_equal(
                    got, (out[:, :, length - 1 : length], lse[:, :, length - 1 : length]), f"decode over {length} keys"
                )
            rows = draw.python.randint(2, size)
            got = ctx.run("extend", q[:, :, -rows:], k, v, witness=False)
            ctx.both_equal(got, (out[:, :, -rows:], lse[:, :, -rows:]), f"the last {rows} rows")
            # Heads are independent: one group alone gives the same bits.
            head, group = draw.python.randrange(heads[1]), heads[0] // heads[1]
            mine = slice(head * group, (head + 1) * group)
            got = ctx.run("prefill", q[:, mine], k[:, head : head + 1], v[:, head : head + 1], witness=False)
            ctx.both_equal(got, (out[:, mine], lse[:, mine]), f"the group of KV head {head} alone")


# ---------------------------------------------------------------- the batch around a row


@check("batch size picks another reduction", "a dispatch threshold on the batch")
def batch(ctx: Context) -> None:
    """Every sequence of a batch against the same sequence alone."""
    for size in ctx.grid.batches:
        with ctx.case(f"B{size}") as draw:
            length = ctx.tile + draw.python.randint(1, ctx.tile)
            q, k, v = ctx.qkv(size, length, length)
            rows = draw.python.randint(2, length)
            for entry, first in (("prefill", 0), ("extend", length - rows), ("decode", length - 1)):
                out, lse = ctx.run(entry, q[:, :, first:], k, v)
                for b in {0, size - 1, draw.python.randrange(size)}:
                    one = slice(b, b + 1)
                    got = ctx.run(entry, q[one, :, first:], k[one], v[one], witness=False)
                    ctx.both_equal(got, (out[one], lse[one]), f"{entry}: sequence {b} alone")


@check(
    "a neighbour changes the tile or the split",
    "ragged batches pick the tile from the longest row",
    "lengths of one sequence used for another",
)
def neighbours(ctx: Context) -> None:
    """One sequence among neighbours of all lengths and values keeps its bits."""
    for number in range(ctx.grid.rounds):
        with ctx.case(f"victim {number}") as draw:
            capacity, size = ctx.grid.long // 2, draw.python.choice((4, 6, 7))
            q, k, v = ctx.qkv(size, 5, capacity)
            victim = draw.python.randrange(size)
            length = draw.python.randint(5, capacity)
            one = slice(victim, victim + 1)
            for entry, rows in (("decode", 1), ("extend", 5)):
                expected = ctx.run(entry, q[one, :, :rows], k[one, :, :length], v[one, :, :length])
                for style in ("short", "long", "mixed"):
                    low, high = {"short": (5, 9), "long": (capacity, capacity), "mixed": (5, capacity)}[style]
                    lengths = [draw.python.randint(low, high) for _ in range(size)]
                    lengths[victim] = length
                    out, lse = ctx.run(entry, q[:, :, :rows], k, v, lengths=ctx.ints(lengths), witness=style == "mixed")
                    ctx.both_equal((out[one], lse[one]), expected, f"{entry} beside {style} neighbours")
                    for b in range(size):
                        if b != victim:
                            draw.normal_(k[b], 3.0)


@check("padding to a bucket crosses a dispatch threshold", "capacity used in place of the length")
def padding(ctx: Context) -> None:
    """Rows and sequences added to fill a bucket change nothing."""
    for number in range(ctx.grid.rounds):
        with ctx.case(f"bucket {number}") as draw:
            length = draw.python.randint(2, ctx.grid.long // 2)
            bucket = -(-length // ctx.tile) * ctx.tile + ctx.tile * draw.python.randint(0, 2)
            q, k, v = ctx.qkv(8, bucket, bucket)
            real = 3
            whole = ctx.run("prefill", q, k, v, witness=False)
            part = ctx.run("prefill", q[:real, :, :length], k[:real, :, :length], v[:real, :, :length])
            ctx.both_equal(
                part, (whole[0][:real, :, :length], whole[1][:real, :, :length]), f"{length} rows in a bucket of {bucket}"
            )
            lengths = ctx.ints([length] * real + [1] * 5)
            for entry, rows in (("decode", 1), ("extend", 2)):
                last = slice(length - rows, length)
                got = ctx.run(entry, q[:, :, last], k, v, lengths=lengths, witness=False)
                ctx.both_equal(
                    (got[0][:real], got[1][:real]), (part[0][:, :, last], part[1][:, :, last]), f"{entry}: 3 real of 8"
                )


@check(
    "padded and packed inputs disagree",
    "a sequence reads its neighbour's rows",
    "sequences of one row",
    "empty sequences",
    "rows of packed inputs taken as dense, or counted from the first",
)
def packed(ctx: Context) -> None:
    """Packed prefills of ragged sequences against each sequence alone."""
    for number in range(ctx.grid.rounds + 1):
        with ctx.case(f"ragged {number}") as draw:
            lengths = [
                1,
                17,
                ctx.tile,
                ctx.tile + 1,
                2 * ctx.tile + 5,
                *(draw.python.randint(1, 2 * ctx.tile) for _ in range(3)),
            ]
            draw.python.shuffle(lengths)
            if number == 0:
                lengths.insert(3, 0)
            if number == 1:
                lengths = [1] * 9  # a batch of single queries
            heads_q, heads_kv = ctx.grid.heads
            total = sum(lengths)
            q = ctx.tensor(total, heads_q, 128)
            k, v = ctx.tensor(total, heads_kv, 128), ctx.tensor(total, heads_kv, 128)
            inputs.normal(draw, q, k, v)
            starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            out, lse = ctx.run("packed", q, k, v, cu_seqlens=ctx.ints(starts), max_seqlen=max(lengths))
            for start, length in zip(starts, lengths, strict=False):
                if length:
                    mine = slice(start, start + length)
                    alone = [t[mine].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
                    got = ctx.run("prefill", *alone, witness=False)
                    ctx.both_equal(
                        got, (out[mine].transpose(0, 1).unsqueeze(0), lse[:, mine].unsqueeze(0)), f"{length} rows at {start}"
                    )
    with ctx.case("a fused projection, rows before and behind") as draw:
        heads_q, heads_kv = ctx.grid.heads
        starts = [9, 10, 12 + ctx.tile, 2 * ctx.tile + 40]
        fused = ctx.tensor(starts[-1] + 5, heads_q + 2 * heads_kv, 128)
        q, k, v = fused.split((heads_q, heads_kv, heads_kv), dim=1)
        inputs.normal(draw, q, k, v)
        # The rows outside keep their poison: not finite, and the same in the witness's output.
        whole = ctx.run("packed", q, k, v, cu_seqlens=ctx.ints(starts), max_seqlen=2 * ctx.tile, finite=False)
        inside = slice(starts[0], starts[-1])
        dense = [ctx.copied(t[inside]) for t in (q, k, v)]
        shifted = ctx.ints([start - starts[0] for start in starts])
        moved = ctx.run("packed", *dense, cu_seqlens=shifted, max_seqlen=2 * ctx.tile, witness=False)
        ctx.both_equal(moved, (whole[0][inside], whole[1][:, inside]), "the same rows, dense and from 0 on")
