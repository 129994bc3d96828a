"""Checks of memory and order: garbage, strides, addresses, streams, threads, workspaces, graphs and repetition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tools.evaluator import inputs
from tools.evaluator.cases import Context, check
from tools.evaluator.compare import poison_, words_differ

# ---------------------------------------------------------------- memory


@check(
    "bytes past the valid length leak through 0 x NaN",
    "lengths ignored",
    "a whole tile read past the end",
    "lengths beyond the capacity or below 0",
)
def capacity(ctx: Context) -> None:
    """NaN, infinity and huge values behind every sequence of a cache change nothing."""
    for number in range(ctx.grid.rounds):
        with ctx.case(f"cache {number}") as draw:
            room = ctx.grid.long // 2 + draw.python.randint(0, ctx.tile)
            lengths = [draw.python.randint(3, room - 1) for _ in range(4)] + [ctx.tile, room]
            q, k, v = ctx.qkv(len(lengths), 3, room)
            clean_k, clean_v = ctx.copied(k), ctx.copied(v)
            for b, length in enumerate(lengths):
                for cache in (k, v):
                    inputs.garbage_(draw, cache[b, :, length:])
            for entry, rows in (("decode", 1), ("extend", 3)):
                out, lse = ctx.run(entry, q[:, :, :rows], k, v, lengths=ctx.ints(lengths))
                for b, length in enumerate(lengths):
                    one = slice(b, b + 1)
                    got = ctx.run(entry, q[one, :, :rows], clean_k[one, :, :length], clean_v[one, :, :length], witness=False)
                    ctx.both_equal((out[one], lse[one]), got, f"{entry}: {length} of {room} keys, garbage behind")
            with_garbage = ctx.run("decode", q[:1, :, :1], k[:1, :, : lengths[0]], v[:1, :, : lengths[0]], witness=False)
            clean = ctx.run("decode", q[:1, :, :1], clean_k[:1, :, : lengths[0]], clean_v[:1, :, : lengths[0]], witness=False)
            ctx.both_equal(with_garbage, clean, "a slice of the cache without lengths")
    with ctx.case("lengths that must be clamped"):
        room = 2 * ctx.tile - 9
        q, k, v = ctx.qkv(4, 3, room)
        for entry, rows in (("decode", 1), ("extend", 3)):
            got = ctx.run(entry, q[:, :, :rows], k, v, lengths=ctx.ints([room + 1, room + 3 * ctx.tile, -1, -ctx.tile]))
            meant = ctx.run(entry, q[:, :, :rows], k, v, lengths=ctx.ints([room, room, 0, 0]), witness=False)
            ctx.both_equal(got, meant, f"{entry}: lengths outside 0 to {room}")


@check("strided, sliced or padded inputs read with the wrong strides", "outputs written with the wrong strides")
def strides(ctx: Context) -> None:
    """The same values in other storage: [B,S,H,D], a fused QKV projection, padded rows, expanded heads."""
    heads_q, heads_kv = ctx.grid.heads
    for size in (ctx.tile + 33, 2 * ctx.tile):
        with ctx.case(f"S{size}"):
            q, k, v = ctx.qkv(2, size, size)
            fused = ctx.tensor(2, size, heads_q + 2 * heads_kv, 128)
            wide = [ctx.tensor(2, t.shape[1] + 1, size + 3, 136)[:, 1:, 2:-1, :128] for t in (q, k, v)]
            layouts = {
                "rows before heads": [ctx.copied(t, order=(0, 2, 1, 3)) for t in (q, k, v)],
                "fused projection": [t.transpose(1, 2) for t in fused.split((heads_q, heads_kv, heads_kv), dim=2)],
                "padded rows": wide,
                "rows outermost": [ctx.copied(t, order=(2, 0, 1, 3)) for t in (q, k, v)],
                "each its own": [ctx.copied(t, order=o) for t, o in ((q, (1, 0, 2, 3)), (k, (0, 2, 1, 3)), (v, (2, 0, 1, 3)))],
            }
            for entry, first in (("prefill", 0), ("extend", size // 2), ("decode", size - 1)):
                expected = ctx.run(entry, q[:, :, first:], k, v)
                for name, tensors in layouts.items():
                    for target, source in zip(tensors, (q, k, v), strict=True):
                        target.copy_(source)
                    got = ctx.run(entry, tensors[0][:, :, first:], tensors[1], tensors[2], witness=False)
                    ctx.both_equal(got, expected, f"{entry}: {name}")
                out = ctx.tensor(2, heads_q, size - first + 2, 128, order=(0, 2, 1, 3))[:, :, 1:-1]
                got = ctx.run(entry, q[:, :, first:], k, v, out=out, witness=False)
                ctx.both_equal(got, expected, f"{entry}: output with rows before heads")
                lse = ctx.arena.empty((2, heads_q + 1, size - first + 3), "f32")[:, 1:, 2:-1]
                poison_(lse)
                call = replace(ctx.call(entry, q[:, :, first:], k, v, lse=False), lse=lse)
                ctx.candidate.run([call])
                ctx.both_equal(ctx.taken(call), expected, f"{entry}: LSE in padded rows")
                shared = [t[:, :1].expand(-1, heads_kv, -1, -1) for t in (k, v)]
                got = ctx.run(entry, q[:, :, first:], *shared, witness=False)
                own = ctx.run(entry, q[:, :, first:], *(ctx.copied(t) for t in shared), witness=False)
                ctx.both_equal(got, own, f"{entry}: one KV head expanded")


@check("the same bytes at another address give other bits", "misaligned inputs")
def addresses(ctx: Context) -> None:
    """Copies of the inputs at other 16-byte aligned addresses."""
    with ctx.case("moved"):
        size = ctx.tile + 61
        q, k, v = ctx.qkv(2, size, size)
        for entry, first in (("prefill", 0), ("extend", size - 9), ("decode", size - 1)):
            expected = ctx.run(entry, q[:, :, first:], k, v)
            for skews in ((16, 48, 80), (112, 16, 208), (32, 64, 128), (240, 144, 16)):
                moved = [ctx.copied(t, skew=skew) for t, skew in zip((q, k, v), skews, strict=True)]
                out = ctx.arena.empty(tuple(q[:, :, first:].shape), "bf16", skew=skews[1])
                got = ctx.run(entry, moved[0][:, :, first:], moved[1], moved[2], out=out, witness=False)
                ctx.both_equal(got, expected, f"{entry}: addresses {skews} bytes past a multiple of 256")


@check("32-bit offsets wrap")
def wide_index(ctx: Context) -> None:
    """Rows and sequences more than 2^31 elements apart; only the rows themselves are touched."""
    far, (heads_q, heads_kv) = 2**31 + 4096, ctx.grid.heads
    size = ctx.tile + 33
    heads = heads_q + 2 * heads_kv + heads_q  # q, k, v and o side by side in one region
    row = 128 * (-(-far // (size - 1) // 128) + heads)
    layouts = {"batch": ((far, size * 128, 128, 1), far + heads * size * 128), "row": ((heads * 128, 128, row, 1), row * size)}
    for what, (stride, extent) in layouts.items():
        with ctx.case(f"{what} stride"):
            q, k, v = ctx.qkv(2, size, size)
            region = ctx.tensor(extent)
            wide = region.as_strided((2, heads, size, 128), stride, region.storage_offset())
            parts = list(wide.split((heads_q, heads_kv, heads_kv, heads_q), dim=1))
            for target, source in zip(parts, (q, k, v), strict=False):
                target.copy_(source)
            for entry, first in (("prefill", 0), ("decode", size - 1)):
                expected = ctx.run(entry, q[:, :, first:], k, v)
                got = ctx.run(entry, parts[0][:, :, first:], parts[1], parts[2], out=parts[3][:, :, first:], witness=False)
                ctx.both_equal(got, expected, f"{entry}: {what}s 2^31 elements apart")


# ---------------------------------------------------------------- order, graphs, workspace


@check(
    "bits depend on the stream or on what runs beside it",
    "a kernel on another stream than asked",
    "split by the number of threads",
)
def order(ctx: Context) -> None:
    """Other streams, a busy device, other numbers of threads and of multiprocessors."""
    for size in (ctx.tile + 19, ctx.grid.long // 2):
        with ctx.case(f"S{size}"):
            q, k, v = ctx.qkv(3, size, size)
            for entry, first in (("prefill", 0), ("extend", size - 7), ("decode", size - 1)):
                expected = ctx.run(entry, q[:, :, first:], k, v)
                ways: list[dict[str, Any]] = [{"stream": "default"}, {"stream": "busy"}]
                ways += [{"num_sms": n} for n in (1, 16, 66, 78, 108, 132, 144)] if ctx.device == "cuda" else []
                ways += [{"num_threads": n} for n in (1, 2, 3, 7)] if ctx.device == "cpu" else []
                for way in ways:
                    got = ctx.run(entry, q[:, :, first:], k, v, witness=False, **way)
                    ctx.both_equal(got, expected, f"{entry}: {way}")


@check("a workspace is read before it is written", "reuse after a larger call", "a counter left from the last call")
def workspace(ctx: Context) -> None:
    """Other bytes in the workspace, and what a larger call left there."""
    with ctx.case("poisons and leftovers"):
        size, large = ctx.tile + 40, ctx.grid.long // 2
        q, k, v = ctx.qkv(1, size, size)
        big = ctx.qkv(6, large, large)
        for entry, first in (("prefill", 0), ("extend", size - 11), ("decode", size - 1)):
            expected = ctx.run(entry, q[:, :, first:], k, v)
            for number in range(3):
                got = ctx.run(entry, q[:, :, first:], k, v, witness=False)
                ctx.both_equal(got, expected, f"{entry}: other bytes in the workspace ({number})")
            ctx.candidate.poison_workspace = False
            try:
                for other, start in (("prefill", 0), ("decode", large - 1)):
                    ctx.run(other, big[0][:, :, start:], big[1], big[2], witness=False)
                    got = ctx.run(entry, q[:, :, first:], k, v, witness=False)
                    ctx.both_equal(got, expected, f"{entry}: after a larger {other}")
            finally:
                ctx.candidate.poison_workspace = True


@check("a racy configuration", "results that change from run to run", "atomics in the reduction")
def repeat(ctx: Context) -> None:
    """The same call many times, alone and beside a busy device."""
    for size in (ctx.tile + 3, ctx.grid.long // 2):
        with ctx.case(f"S{size}"):
            q, k, v = ctx.qkv(2, size, size)
            for entry, first in (("prefill", 0), ("extend", size - 33), ("decode", size - 1)):
                expected = ctx.run(entry, q[:, :, first:], k, v)
                calls = [ctx.call(entry, q[:, :, first:], k, v) for _ in range(ctx.grid.repeats)]
                half = len(calls) // 2
                ctx.candidate.run(calls[:half], stream="side")
                results = [ctx.taken(call) for call in calls[:half]]
                ctx.candidate.run(calls[half:], stream="busy")
                results += [ctx.taken(call) for call in calls[half:]]
                for number, result in enumerate(results):
                    ctx.both_equal(result, expected, f"{entry}: run {number}")


@check(
    "eager is invariant and the replay is not",
    "a captured launch reads workspace that nobody wrote",
    "lengths frozen at capture",
    "work that escapes the capture",
    "outputs cached between calls",
)
def graph(ctx: Context) -> None:
    """Replays of a captured graph against eager calls, with other inputs and lengths than at capture."""
    with ctx.case("growing ragged batch") as draw:
        room = ctx.grid.long // 2
        q, k, v = ctx.qkv(4, 4, room)
        lengths = ctx.ints([5, 9, 4, room])
        calls = [
            ctx.call("decode", q[:, :, :1], k, v, lengths=lengths),
            ctx.call("extend", q, k, v, lengths=lengths),
            ctx.call("prefill", *(t[:, :, :4] for t in (q, k, v))),
        ]
        number = ctx.candidate.capture(calls)
        for step in range(2 + ctx.grid.rounds):
            for tensor in (q, k, v):
                draw.normal_(tensor)
            fresh = [draw.python.randint(4, room) for _ in range(4)]
            lengths.copy_(torch.tensor(fresh, dtype=torch.int32))
            # Eager calls on copies: nothing keyed by address may come back.
            expected = []
            for call in calls:
                copies = [ctx.copied(t) for t in (call.q, call.k, call.v)]
                lens = None if call.lengths is None else ctx.ints(fresh)
                expected.append(ctx.run(call.entry, *copies, lengths=lens, witness=step == 0))
            for call in calls:
                call.o.view(torch.int16).fill_(0x7FFF)
                call.lse.view(torch.int32).fill_(0x7FFFFFFF)
            ctx.candidate.poison()
            ctx.candidate.replay_all(number)
            ctx.candidate.replay_all(number)
            for call, eager in zip(calls, expected, strict=True):
                ctx.both_equal(ctx.taken(call), eager, f"{call.entry}: replay {step} with lengths {fresh}")
        ctx.candidate.drop(number)


@check("an output that ignores an input", "an output cached by address", "keys beyond some length ignored")
def sensitivity(ctx: Context) -> None:
    """Each input, and each end of the keys, reaches the output; new values at old addresses give new outputs."""
    with ctx.case(f"L{ctx.grid.long}") as draw:
        size = ctx.grid.long
        q, k, v = ctx.qkv(1, 2, size)
        for entry, rows in (("decode", 1), ("extend", 2)):
            before = ctx.run(entry, q[:, :, :rows], k, v)
            changed = {
                "q": q[:, :, :rows],
                "the first key": k[:, :, :1],
                "the last key": k[:, :, -1:],
                "a key": k[:, :, size // 3 : size // 3 + 1],
                "the first value": v[:, :, :1],
                "the last value": v[:, :, -1:],
            }
            for name, tensor in changed.items():
                kept = tensor.clone()
                draw.normal_(tensor, 12.0 if "value" in name else 1.0)
                if "key" in name:
                    tensor.copy_((q[:, :: q.shape[1] // k.shape[1], :1].float() * 0.6).to(k.dtype))  # a score that counts
                out, _ = ctx.run(entry, q[:, :, :rows], k, v)
                difference = words_differ(out, before[0])
                if difference.differing < difference.words // 16:
                    ctx.tally.fail(
                        ctx.label, f"{entry}: {name} changed, {difference.differing} of {difference.words} output words did"
                    )
                tensor.copy_(kept)
