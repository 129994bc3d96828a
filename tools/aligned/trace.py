"""Find the first operator whose bits differ between two ways to compute the same rows.

    with recorded(model) as full:
        model(input_ids=whole)
    with recorded(model) as steps:
        ...                                   # prefill, then one token at a time, with a cache
    difference = first_difference(full, steps)   # None, or what differs where

Every operator of a patched model is noted with the positions of its rows. Operators are looked through in the order of
the forward pass and over all positions; all that stands before the one named is equal at every position, so it is that
operator which computes a row in two ways. Recording copies every output: it is for small cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.core.errors import UserError

Tensor = torch.Tensor
_WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.int64: torch.int64, torch.int32: torch.int32}


def words(tensor: Tensor) -> Tensor:
    """A tensor's raw bits as integers."""
    return tensor.detach().contiguous().view(_WORDS[tensor.dtype])


@dataclass
class Trace:
    """The outputs of operators by name, in the order of the forward pass, each as (positions, rows that count, output)."""

    outputs: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    positions: Tensor | None = None  # int64 [B, S] of the forward at work
    counts: Tensor | None = None  # int [B] of it

    def begin(self, positions: Tensor, counts: Tensor | None) -> None:
        """A forward of rows at these positions starts; counts: leading rows of each sequence that are tokens."""
        self.positions = positions.clone()
        self.counts = torch.full((len(positions),), positions.shape[1]) if counts is None else counts.clone()

    def note(self, name: str, output: Tensor) -> None:
        """Keep an operator's output, whose leading elements are the rows of the forward."""
        assert self.positions is not None and self.counts is not None
        rows = words(output).clone().view(*self.positions.shape, -1)
        self.outputs.setdefault(name, []).append((self.positions, self.counts, rows))

    def table(self, name: str, sequence: int) -> dict[int, Tensor]:
        """Position -> raw words of one sequence's row in an operator's output."""
        found = {}
        for positions, counts, rows in self.outputs[name]:
            for row in range(int(counts[sequence])):
                found[int(positions[sequence, row])] = rows[sequence, row]
        return found


@dataclass(frozen=True)
class Difference:
    """The first operator that differs, and its first differing element."""

    operator: str
    sequence: int
    position: int
    element: int
    left: int  # raw words
    right: int
    elements: int  # of this operator that differ, in all positions of all sequences

    def __str__(self) -> str:
        digits = 4 if all(abs(word) <= 2**15 for word in (self.left, self.right)) else 8
        left, right = (f"{word & (16**digits - 1):#0{digits + 2}x}" for word in (self.left, self.right))
        return (
            f"{self.operator}: sequence {self.sequence}, position {self.position}, element {self.element}: "
            f"{left} against {right} ({self.elements} elements differ)"
        )


def first_difference(left: Trace, right: Trace, sequences: dict[int, int] | None = None) -> Difference | None:
    """The first difference over positions that both have; sequences: those of left -> those of right (default: the same).

    UserError where the two ran other operators, or share no position.
    """
    if list(left.outputs) != list(right.outputs):
        odd = sorted(set(left.outputs) ^ set(right.outputs))
        raise UserError(f"the traces hold other operators: {', '.join(odd[:3]) or 'another order'}")
    compared = 0
    for name in left.outputs:
        first: tuple[int, int, int, int, int] | None = None
        count = 0
        pairs = sequences or {i: i for i in range(len(left.outputs[name][0][0]))}
        for mine, other in pairs.items():
            rows, others = left.table(name, mine), right.table(name, other)
            for position in sorted(rows.keys() & others.keys()):
                compared += 1
                differ = (rows[position] != others[position]).nonzero()
                if len(differ):
                    count += len(differ)
                    at = int(differ[0])
                    first = first or (mine, position, at, int(rows[position][at]), int(others[position][at]))
        if first:
            return Difference(name, *first, count)
    if not compared:
        raise UserError("the traces share no position")
    return None


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[Trace]:
    """Note every operator of a patched model's forwards."""
    aligned = getattr(model, "_aligned", None)
    if aligned is None:
        raise UserError(f"{type(model).__name__} is not patched")
    before, aligned.trace = aligned.trace, Trace()
    try:
        yield aligned.trace
    finally:
        aligned.trace = before
