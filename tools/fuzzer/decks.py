"""How single features are drawn: small spaces are enumerated in shuffled order, large ones drawn with a bias to edges."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
TILES = (16, 32, 64, 128, 256)


class Deck(Generic[T]):
    """Deals every value once in shuffled order, then shuffles again."""

    def __init__(self, values: Sequence[T], rng: random.Random) -> None:
        self._values, self._rng = list(values), rng
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._values[:]
            self._rng.shuffle(self._left)
        return self._left.pop()


def edges(largest: int) -> list[int]:
    """Multiples of usual tile sizes and powers of two, one less and one more, up to `largest`."""
    places = {m * tile for tile in TILES for m in range(1, largest // tile + 2)} | {2**i for i in range(20)}
    return sorted({place + d for place in places for d in (-1, 0, 1) if 1 <= place + d <= largest})


class Sizes:
    """Whole numbers from 1 to `largest`: half dealt from all of them, a third at edges, the rest log-uniform."""

    def __init__(self, largest: int, rng: random.Random) -> None:
        self._rng, self._largest = rng, largest
        self._all, self._edges = Deck(range(1, largest + 1), rng), edges(largest)

    def draw(self, limit: int) -> int:
        """A size of at most `limit`."""
        limit = min(limit, self._largest)
        way = self._rng.randrange(6)
        if way < 3:
            size = self._all.deal()
            return size if size <= limit else self._rng.randint(1, limit)
        if way < 5:
            return self._edges[self._rng.randrange(bisect.bisect_right(self._edges, limit))]
        return min(limit, int(2.0 ** self._rng.uniform(0.0, limit.bit_length())))
