"""Parts of a call: what a slow witness can repeat of a large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.evaluator.runner import Call

Take = Callable[[Any], Any]


def part_of(call: Call, random: Any, flop: float, make: Callable[..., Call]) -> tuple[Call, Take]:
    """A call of at most about `flop` operations that computes part of `call`, and the function that takes the same part
    of its output or LSE.

    random: a random.Random that chooses the part. make(entry, q, k, v, lse=, **options) makes a call with outputs.
    """
    packed, q, k = call.entry == "packed", call.q, call.k
    rows, keys = (call.max_seqlen, call.max_seqlen) if packed else (q.shape[2], k.shape[2])
    sequences = call.cu_seqlens.shape[0] - 1 if packed else q.shape[0]
    row_flop = 4.0 * 128 * keys * (0.5 if rows == keys and rows > 1 else 1.0)
    lse = call.lse is not None
    options = {"lengths": call.lengths, "cu_seqlens": call.cu_seqlens, "max_seqlen": call.max_seqlen}
    if row_flop * rows * sequences * q.shape[1] <= flop:
        return make(call.entry, q, k, call.v, lse=lse, **options), lambda t: t
    head = random.randrange(k.shape[1])
    group = q.shape[1] // k.shape[1]
    one = slice(head * group, head * group + group)
    if packed:
        part = make("packed", q[:, one], k[:, head : head + 1], call.v[:, head : head + 1], lse=lse, **options)
        return part, lambda t: t[one] if t.ndim == 2 else t[:, one]
    b = random.randrange(q.shape[0])
    fit = max(1, int(flop / (row_flop * group)))
    if call.entry == "decode":
        count = min(q.shape[0] - b, fit)
        chosen = slice(b, b + count)
        lengths = None if call.lengths is None else call.lengths[chosen]
        part = make(
            "decode", q[chosen, one], k[chosen, head : head + 1], call.v[chosen, head : head + 1], lse=lse, lengths=lengths
        )
        return part, lambda t: t[chosen, one]
    # Some last rows of a sequence: an extend over the keys that they see.
    count = min(rows, fit)
    ends = [random.randrange(count, rows + 1) for _ in range(2)]
    last = rows if call.lengths is not None else max(ends)  # as likely as it sees keys: that is where the work is
    seen = keys - rows + last
    lengths = None if call.lengths is None else call.lengths[b : b + 1]
    part = make(
        "extend",
        q[b : b + 1, one, last - count : last],
        k[b : b + 1, head : head + 1, :seen],
        call.v[b : b + 1, head : head + 1, :seen],
        lse=lse,
        lengths=lengths,
    )
    return part, lambda t: t[b : b + 1, one, last - count : last]
