"""A static KV cache: one block of memory a layer, filled by the operator that writes k and v.

    cache = KVCache(model, sequences=4, capacity=2048)
    cache.expect([17, 3, 1024, 1])           # rows of the next forward that are tokens, a sequence; all of them else
    model(input_ids=right_padded, cache=cache)
    cache.lengths                            # int32 [sequences]: tokens that it holds
    cache.clear()                            # or clear([2]): those places may be used again

Words behind a sequence's length are never read, so nothing is erased. A forward adds to all its sequences; the lengths move
when it has ended. It is no transformers cache: it serves patched models alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tools.aligned.operators import HEAD_DIM, Operators
from tools.core.errors import UserError

Tensor = torch.Tensor


class KVCache:
    """k and v of every layer, each bf16 [sequences, H_KV, capacity, 128]."""

    def __init__(self, model: Any, sequences: int, capacity: int) -> None:
        config = model.config
        if sequences < 1 or capacity < 1:
            raise UserError(f"a cache of {sequences} sequences and {capacity} tokens: both are at least 1")
        shape = (sequences, config.num_key_value_heads, capacity, HEAD_DIM)
        self.k, self.v = ([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(config.num_hidden_layers)] for _ in range(2))
        self.capacity = capacity
        self.lengths = torch.zeros(sequences, dtype=torch.int32)
        self.counts: Tensor | None = None  # int32 [sequences], rows that the forward at work adds
        self._expected: Tensor | None = None

    def expect(self, counts: Sequence[int]) -> None:
        """Say how many leading rows of each sequence the next forward adds; the rows behind them are padding."""
        if len(counts) != len(self.lengths) or min(counts) < 1:
            raise UserError(f"counts {list(counts)}: one for each of {len(self.lengths)} sequences, at least 1")
        self._expected = torch.tensor(counts, dtype=torch.int32)

    def clear(self, sequences: Iterable[int] | None = None) -> None:
        """Forget all sequences, or some."""
        for index in range(len(self.lengths)) if sequences is None else sequences:
            self.lengths[index] = 0
        self._expected = self.counts = None

    def start(self, batch: int, rows: int) -> Tensor:
        """Begin a forward of ids [batch, rows]: the position of every row, int64 [batch, rows]."""
        if batch != len(self.lengths):
            raise UserError(f"input_ids has {batch} sequences, the cache {len(self.lengths)}")
        counts = torch.full((batch,), rows, dtype=torch.int32) if self._expected is None else self._expected
        self._expected = None
        if int(counts.max()) > rows:
            raise UserError(f"counts {counts.tolist()} do not fit input_ids of {rows} columns")
        if int((self.lengths + counts).max()) > self.capacity:
            raise UserError(f"lengths {(self.lengths + counts).tolist()} exceed the cache's capacity of {self.capacity} tokens")
        self.counts = counts
        return self.lengths[:, None].long() + torch.arange(rows)

    def write(self, operators: Operators, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the counted rows of k and v [B, S, H_KV, 128] behind those that the layer holds."""
        assert self.counts is not None
        kept = torch.arange(k.shape[1]) < self.counts[:, None]
        sequence, row = kept.nonzero(as_tuple=True)
        position = self.lengths.long()[sequence] + row
        operators.cache_write(k[kept], self.k[layer], sequence, position)
        operators.cache_write(v[kept], self.v[layer], sequence, position)

    def held(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """What k and v hold now at the places of the forward's rows: [B, rows, H_KV, 128] each."""
        places = (self.lengths[:, None].long() + torch.arange(rows)).clamp(max=self.capacity - 1)
        sequence = torch.arange(len(places))[:, None]
        return self.k[layer][sequence, :, places], self.v[layer][sequence, :, places]

    def finish(self) -> None:
        """End a forward: its rows count from now on."""
        assert self.counts is not None
        self.lengths += self.counts
        self.counts = None
