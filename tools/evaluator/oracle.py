"""The fp64 oracle: what a row should be, and how far an output is from it.

For a query row with output o (128 numbers) and reference r, both in fp64:

    error(row) = rms(o - r) / rms(r),      rms(x) = sqrt(mean(x^2)) over the 128 dims

and the figure of a tensor is the RMS of error(row) over the rows looked at. It is relative to each row's own scale, so
a long context, whose outputs are small, is held to the same standard as a short one. A row whose reference is exactly 0
must be exactly 0. NaN and infinity give an infinite error. Rounding an exact result to bf16 once costs about 0.0017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

SCALE = 1.0 / math.sqrt(128.0)


@dataclass(frozen=True)
class Accuracy:
    """rms: the figure above. worst: the largest error(row). rows: how many were looked at."""

    rms: float
    worst: float
    rows: int

    def within(self, bound: float) -> bool:
        return self.rms <= bound  # False for NaN


def reference(q: Any, k: Any, v: Any, rows: list[int], offset: int) -> tuple[Any, Any]:
    """fp64 attention of some query rows of one sequence: ([Hq,R,128], natural-log LSE [Hq,R]).

    q [Hq,Sq,128], k/v [Hkv,Skv,128]; query row i sees keys 0 .. offset + i.
    """
    heads_kv, group = k.shape[0], q.shape[0] // k.shape[0]
    last = offset + max(rows)
    picked = q[:, rows].double().reshape(heads_kv, group * len(rows), -1)
    scores = (picked @ k[:, : last + 1].double().transpose(1, 2)) * SCALE
    seen = torch.arange(last + 1, device=q.device) <= (torch.tensor(rows, device=q.device) + offset)[:, None]
    scores = scores.reshape(heads_kv, group, len(rows), -1).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).reshape(heads_kv, group * len(rows), -1)
    out = weights @ v[:, : last + 1].double()
    return out.reshape(q.shape[0], len(rows), -1), lse.reshape(q.shape[0], len(rows))


def errors(out: Any, expected: Any) -> Any:
    """error(row) of tensors [..., 128]; infinite for NaN, infinity, or anything but 0 against a reference of 0."""
    difference = (out.double() - expected).square().mean(-1).sqrt()
    scale = expected.square().mean(-1).sqrt()
    relative = torch.where(scale > 0, difference / scale, torch.where(difference == 0, 0.0, math.inf))
    return torch.where(torch.isfinite(relative), relative, math.inf)


def summarise(parts: list[Any]) -> Accuracy:
    every = torch.cat([part.reshape(-1) for part in parts]).double()
    return Accuracy(float(every.square().mean().sqrt()), float(every.max()), every.numel())


def sample_rows(length: int, tile: int, count: int, random: Any) -> list[int]:
    """Up to `count` rows of a sequence: first, last, the edges of a tile, and random others."""
    edges = {0, length - 1, tile - 1, tile, (length // tile) * tile - 1, (length // tile) * tile}
    rows = {row for row in edges if 0 <= row < length}
    while len(rows) < min(count, length):
        rows.add(random.randrange(length))
    return sorted(rows)


def measure(
    outputs: list[Any],
    q: Any,
    k: Any,
    v: Any,
    *,
    rows: list[int],
    offset: int = 0,
    lengths: list[int] | None = None,
    batches: list[int] | None = None,
) -> list[Accuracy]:
    """Accuracy of several outputs [B,Hq,Sq,128] of the same inputs, over the given rows of the given sequences."""
    parts: list[list[Any]] = [[] for _ in outputs]
    for b in batches if batches is not None else range(q.shape[0]):
        n = lengths[b] if lengths is not None else k.shape[2]
        expected, _ = reference(q[b], k[b, :, :n], v[b, :, :n], rows, n - q.shape[2] if lengths is not None else offset)
        for part, out in zip(parts, outputs, strict=True):
            part.append(errors(out[b, :, rows], expected))
    return [summarise(part) for part in parts]
