"""Checks of values: extreme scores and outputs, the LSE, non-finite inputs, accuracy, and the target's own workloads."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tools.evaluator import inputs, oracle
from tools.evaluator.cases import Context, check
from tools.evaluator.checks import lse_as_batch, rows_as_batch
from tools.evaluator.compare import words_differ
from tools.evaluator.grids import Cell
from tools.evaluator.runner import Call

LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 1e-5  # approximate exp2 and log2 stay far below; another base does not


@check(
    "a skipped or misplaced rescale",
    "a finite mask constant beats real logits",
    "(-inf) - (-inf) in a masked slice",
    "subnormals flushed on one path only",
    "the sign of zero lost",
    "P rounded on one path only",
    "the last bit of a constant or of an exponential",
)
def values(ctx: Context) -> None:
    """Prefill, extend and decode of every kind of values give the same bits."""
    size = 3 * ctx.tile + 37
    for kind in inputs.KINDS:
        with ctx.case(kind) as draw:
            q, k, v = ctx.qkv(2, size, size, kind=kind)
            out, lse = ctx.run("prefill", q, k, v)
            for length in (1, ctx.tile, 2 * ctx.tile + 1, size, draw.python.randint(1, size)):
                row = slice(length - 1, length)
                got = ctx.run("decode", q[:, :, row], k[:, :, :length], v[:, :, :length])
                ctx.both_equal(got, (out[:, :, row], lse[:, :, row]), f"{kind}: decode over {length} keys")
            rows = draw.python.randint(2, ctx.tile)
            got = ctx.run("extend", q[:, :, -rows:], k, v)
            ctx.both_equal(got, (out[:, :, -rows:], lse[:, :, -rows:]), f"{kind}: the last {rows} rows")
            without, _ = ctx.run("prefill", q, k, v, lse=False, witness=False)
            ctx.equal(without, out, f"{kind}: the output where no LSE is asked for")
            if kind == "zero_columns":
                zero = out[..., 3::16]
                if bool((zero != 0).any()):
                    ctx.tally.fail(ctx.label, "a zero column of V gave an output other than 0")
    for number in range(4 * ctx.grid.rounds):  # a last bit shows once in ten thousand probabilities: draw many
        with ctx.case(f"last bits {number}"):
            ctx.run("prefill", *ctx.qkv(1, size, size, kind="cancelling_values"))


@check("low precision under a loose tolerance", "scale applied twice", "output halved", "wrong mask", "P in another format")
def accuracy(ctx: Context) -> None:
    """Outputs against the fp64 oracle, relative to each row's own scale."""
    bound = ctx.limits["accuracy_rms"]
    for kind in inputs.KINDS:
        if kind in inputs.NO_ORACLE:
            continue
        with ctx.case(kind) as draw:
            size = 2 * ctx.tile + draw.python.randint(1, ctx.tile)
            q, k, v = ctx.qkv(1, size, size, kind=kind)
            rows = oracle.sample_rows(size, ctx.tile, ctx.grid.oracle_rows, draw.python)
            out, _ = ctx.run("prefill", q, k, v)
            (found,) = oracle.measure([out], q, k, v, rows=rows)
            ctx.accurate(found, bound, "prefill")
            got, _ = ctx.run("decode", q[:, :, -1:], k, v)
            (last,) = oracle.measure([got], q[:, :, -1:], k, v, rows=[0], offset=size - 1)
            ctx.accurate(last, bound, "decode")
            ctx.tally.notes[kind] = round(found.rms, 6)


@check("LSE in base 2", "LSE of another entry point", "LSE without the scale")
def lse(ctx: Context) -> None:
    """The LSE is the natural logarithm, and has the same bits from every entry point."""
    for kind in ("normal", "large_scores", "falling", "rising"):
        with ctx.case(kind):
            size = 2 * ctx.tile + 21
            q, k, v = ctx.qkv(1, size, size, kind=kind)
            _, found = ctx.run("prefill", q, k, v)
            rows = [*range(0, size, max(1, size // 24)), size - 1]
            _, expected = oracle.reference(q[0], k[0], v[0], rows, 0)
            error = (found[0][:, rows].double() - expected).abs()
            bound = LSE_ABSOLUTE + LSE_RELATIVE * expected.abs()
            if not bool((error <= bound).all()):
                ctx.tally.inaccuracies += 1
                ctx.tally.fail(ctx.label, f"LSE off by up to {float(error.max()):.3g} from the natural logarithm")
            keys, batch = (t.expand(size, -1, -1, -1) for t in (k, v)), rows_as_batch(q)
            _, decoded = ctx.run("decode", batch, *keys, lengths=ctx.ints(list(range(1, size + 1))), witness=False)
            ctx.equal(decoded, lse_as_batch(found), "LSE of decode against prefill")
            flat = [t[0].transpose(0, 1) for t in (q, k, v)]
            _, from_packed = ctx.run("packed", *flat, cu_seqlens=ctx.ints([0, size]), max_seqlen=size, witness=False)
            ctx.equal(from_packed, found[0], "LSE of packed against prefill")


@check("non-finite values reach rows that do not see them")
def nonfinite(ctx: Context) -> None:
    """A NaN or infinity changes nothing outside the tiles, heads and sequences that hold or see it.

    Rows of the same key tile that come before the poisoned key may turn NaN as well: 0 x NaN is NaN in a product.
    """
    heads_q, heads_kv = ctx.grid.heads
    group, size = heads_q // heads_kv, 2 * ctx.tile + 50
    for what in ("q", "k", "v"):
        for value in (float("nan"), float("inf")):
            with ctx.case(f"{value} in {what}") as draw:
                q, k, v = ctx.qkv(2, size, size)
                clean, _ = ctx.run("prefill", q, k, v)
                row = ctx.tile + draw.python.randint(1, ctx.tile - 1)
                head = draw.python.randrange(heads_q if what == "q" else heads_kv)
                tensor = {"q": q, "k": k, "v": v}[what]
                tensor[1, head, row, draw.python.randrange(128)] = value
                out, _ = ctx.run("prefill", q, k, v, finite=False, witness=False)
                ctx.equal(out[0], clean[0], "the other sequence")
                first = head if what == "q" else head * group
                after = head + 1 if what == "q" else first + group
                ctx.equal(out[1, :first], clean[1, :first], "heads before")
                ctx.equal(out[1, after:], clean[1, after:], "heads behind")
                safe = row if what == "q" else row // ctx.tile * ctx.tile
                ctx.equal(out[1, first:after, :safe], clean[1, first:after, :safe], "rows of earlier tiles")
                if what == "q":
                    ctx.equal(
                        out[1, first:after, row + 1 :], clean[1, first:after, row + 1 :], "rows behind the poisoned query"
                    )


@check("right only on some shapes", "wrong at the target's own sizes")
def cells(ctx: Context) -> None:
    """Every workload cell: bits against decode, extend and the witness, accuracy against the oracle and the library."""
    for cell in ctx.cells:
        with ctx.case(cell.name) as draw:
            heads = ctx.cell_heads
            q, k, v = ctx.qkv(cell.batch, cell.rows, cell.keys, heads=heads)
            out, lse_out = ctx.run(cell.entry, q, k, v)
            rows = [0] if cell.kind == "decode" else oracle.sample_rows(cell.rows, ctx.tile, ctx.grid.oracle_rows, draw.python)
            batches = sorted({0, cell.batch - 1})
            outputs, names = [out], ["candidate"]
            reference = _reference_output(ctx, cell, q, k, v)
            if reference is not None:
                outputs.append(reference[1])
                names.append(reference[0])
            found = oracle.measure(outputs, q, k, v, rows=rows, offset=cell.keys - cell.rows, batches=batches)
            ctx.accurate(found[0], ctx.limits["accuracy_rms"], "against the fp64 oracle")
            if reference is not None:
                ratio = ctx.limits["accuracy_ratio"]
                ctx.accurate(found[0], ratio * found[1].rms, f"against {ratio:g}x the error of {names[1]}")
            ctx.tally.notes[cell.name] = {name: round(figure.rms, 6) for name, figure in zip(names, found, strict=True)}
            _other_entry_points(ctx, cell, q, k, v, out, lse_out)


def _other_entry_points(ctx: Context, cell: Cell, q: Any, k: Any, v: Any, out: Any, lse_out: Any) -> None:
    """A decode cell against an extend of one row; another cell's last rows, or answer, against decode and extend."""
    if cell.kind == "decode":
        got = ctx.run("extend", q, k, v, witness=False)
        ctx.both_equal(got, (out, lse_out), "extend of one row")
        return
    tail = 128 if cell.kind == "update" else 3
    got = ctx.run("extend", q[:, :, -tail:], k, v, witness=False)
    ctx.both_equal(got, (out[:, :, -tail:], lse_out[:, :, -tail:]), f"the last {tail} rows by extend")
    for _ in range(2):
        end = cell.rows - ctx.draw.python.randrange(min(cell.rows, tail))
        row, length = slice(end - 1, end), cell.keys - cell.rows + end
        got = ctx.run("decode", q[:, :, row], k[:, :, :length], v[:, :, :length], witness=False)
        ctx.both_equal(got, (out[:, :, row], lse_out[:, :, row]), f"row {end - 1} by decode")


def _reference_output(ctx: Context, cell: Cell, q: Any, k: Any, v: Any) -> tuple[str, Any] | None:
    """The first baseline of the cell's phase that answers: its name and output."""
    from tools.evaluator.runner import WorkerFailure

    for name, (runner, layout) in ctx.references.items():
        if not name.startswith(cell.phase + ":") or not runner.alive():
            continue
        order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
        theirs = [ctx.copied(t, order=order) for t in (q, k, v)]
        call = Call(cell.entry, theirs[0], theirs[1], theirs[2], ctx.arena.empty(tuple(q.shape), closed=True))
        try:
            runner.run([call])
        except WorkerFailure as problem:
            ctx.tally.notes[f"{cell.name} {name}"] = problem.message
            continue
        if bool(torch.isfinite(call.o).all()):
            return name.split(":", 1)[1], call.o
    return None


# ---------------------------------------------------------------- the library whose bits the contract states


def library_shapes(ctx: Context) -> list[dict[str, Any]]:
    """Shapes to compare with the library: dense, packed and extended; most of three or more tiles, none only powers of two."""
    random = ctx.draw.python
    shapes: list[dict[str, Any]] = []
    kinds = list(inputs.KINDS)
    for number in range(ctx.grid.library_shapes):
        heads = ctx.grid.ratios[number % len(ctx.grid.ratios)]
        tiles = random.choice((1, 2, 3, 3, 4, 5, 8))
        size = max(2, tiles * ctx.tile - random.choice((0, 1, ctx.tile // 2, random.randrange(ctx.tile))))
        form = ("dense", "dense", "packed", "extend")[number % 4]
        kind = kinds[(number // 4) % len(kinds)]
        batch = random.choice((1, 1, 2, 3))
        rows = size if form == "dense" else min(size, random.choice((2, 3, 8, 129, 257)))
        shapes.append({"form": form, "batch": batch, "size": size, "rows": rows, "heads": heads, "kind": kind})
    return shapes


@check("bits that are not the library's", needs=("library",))
def library(ctx: Context) -> None:
    """Full-sequence and extended rows against the library's, and decode against its full-sequence rows."""
    ctx.draw = inputs.Draw(ctx.seed, "library shapes", ctx.device)
    counts = {"shapes": 0, "three_tiles": 0, "not_multiples": 0, "decoded_rows": 0}
    lse_words = lse_differing = 0
    lse_worst = 0.0
    shapes = library_shapes(ctx)
    for number, shape in enumerate(shapes):
        form, size, rows = shape["form"], shape["size"], shape["rows"]
        with ctx.case(
            f"{number}: {form} B{shape['batch']} S{size} rows {rows} {shape['heads'][0]}/{shape['heads'][1]} {shape['kind']}"
        ) as draw:
            q, k, v = ctx.qkv(shape["batch"], size, size, heads=shape["heads"], kind=shape["kind"], layout=ctx.library_layout)
            counts["shapes"] += 1
            counts["three_tiles"] += size > 2 * ctx.tile
            counts["not_multiples"] += size % ctx.tile != 0
            if form == "packed":
                expected, ours = _packed_pair(ctx, q, k, v, draw)
            else:
                expected = _library(ctx, "extend" if form == "extend" else "prefill", q[:, :, size - rows :], k, v)
                ours = ctx.run(
                    "extend" if form == "extend" else "prefill", q[:, :, size - rows :], k, v, witness=number % 4 == 0
                )
            ctx.equal(ours[0], expected[0], f"{form} against the library")
            difference = words_differ(ours[1], expected[1])
            lse_words, lse_differing = lse_words + difference.words, lse_differing + difference.differing
            distance = (ours[1].double() - expected[1].double()).abs() / (1 + expected[1].double().abs())
            lse_worst = max(lse_worst, float(distance.max()))
            if form == "dense":
                for length in {size, draw.python.randint(1, size), draw.python.randint(1, size)} - {1}:
                    row = slice(length - 1, length)
                    got, _ = ctx.run("decode", q[:, :, row], k[:, :, :length], v[:, :, :length], witness=False)
                    ctx.equal(got, expected[0][:, :, row], f"decode over {length} keys against the library's prefill row")
                    counts["decoded_rows"] += 1
    ctx.tally.notes.update(counts, lse_words=lse_words, lse_differing=lse_differing, lse_worst_relative=lse_worst)
    if not lse_worst <= LSE_RELATIVE:
        ctx.tally.fail("all shapes", f"LSE differs from the library's by up to {lse_worst:.3g} (relative to 1 + its size)")


def _library(ctx: Context, entry: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    assert ctx.library is not None
    call = ctx.call(entry, q, k, v, closed=True, **options)
    ctx.library.run([call])
    return call.o, call.lse


def _packed_pair(ctx: Context, q: Any, k: Any, v: Any, draw: inputs.Draw) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The rows of all sequences as one packed batch of random parts: the library's result and ours."""
    packed = []
    for tensor in (q, k, v):
        flat = ctx.tensor(tensor.shape[0] * tensor.shape[2], tensor.shape[1], 128)
        packed.append(flat.copy_(tensor.transpose(1, 2).reshape(flat.shape)))
    total = packed[0].shape[0]
    starts = [0, draw.python.randint(2, total)]  # the library's call of single queries only is another kernel
    while starts[-1] < total:
        starts.append(
            min(total, starts[-1] + draw.python.choice((1, draw.python.randint(1, total), draw.python.randint(1, total))))
        )
    longest = max(b - a for a, b in itertools.pairwise(starts))
    options = {"cu_seqlens": ctx.ints(starts), "max_seqlen": longest}
    return _library(ctx, "packed", *packed, **options), ctx.run("packed", *packed, witness=False, **options)
