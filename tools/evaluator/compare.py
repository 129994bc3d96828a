"""Equality of raw words. Floats are never compared: NaN equals itself bit for bit or not at all, and -0.0 is not 0.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tools.evaluator.inputs import POISON


@dataclass(frozen=True)
class Difference:
    """words compared, words differing, and the first that differs (coordinates and both words in hex)."""

    words: int
    differing: int
    first: dict[str, Any] | None


def raw(tensor: Any) -> Any:
    """The integer view of a bf16 or fp32 tensor with innermost stride 1."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def words_differ(a: Any, b: Any) -> Difference:
    """Compare two tensors of one shape word by word."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"comparing {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} {b.dtype}")
    x, y = raw(a), raw(b)
    if torch.equal(x, y):
        return Difference(x.numel(), 0, None)
    unequal = x != y
    count = int(unequal.sum())
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    where = []
    for size in reversed(x.shape):
        where.append(flat % size)
        flat //= size
    where.reverse()
    mask = 0xFFFF if a.element_size() == 2 else 0xFFFFFFFF
    words = [f"0x{int(t[tuple(where)]) & mask:0{4 if mask == 0xFFFF else 8}x}" for t in (x, y)]
    return Difference(x.numel(), count, {"at": where, "got": words[0], "expected": words[1]})


def poison_(tensor: Any) -> None:
    """Fill an output with a NaN that no finite input leads to."""
    if tensor.element_size() == 2:
        raw(tensor).fill_(POISON)
    else:
        raw(tensor).fill_(0x7FFFFFFF)


def unwritten(tensor: Any) -> int:
    """Words that still hold the poison: the largest signed word, so that a maximum says quickly that there are none."""
    words, poison = raw(tensor), POISON if tensor.element_size() == 2 else 0x7FFFFFFF
    if not words.numel() or int(words.amax()) != poison:
        return 0
    return int(torch.count_nonzero(words == poison))


def _once(tensor: Any) -> Any:
    """The view of a tensor that holds every word of an expanded dimension once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def snapshot(tensor: Any) -> Any:
    """A copy of an input's words."""
    return None if tensor is None else raw(_once(tensor)).clone()


def unchanged(tensor: Any, before: Any) -> bool:
    """Whether an input still holds the words of its snapshot."""
    return tensor is None or torch.equal(raw(_once(tensor)), before)
