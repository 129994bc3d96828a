"""What a rollout engine and a trainer do with a patched model, in a few lines each.

    responses, scores = generate(model, prompts, 64, draw=torch.Generator().manual_seed(1))
    scores = replay(model, prompts, responses)        # the recorded tokens, one at a time, with a cache
    again = score(model, prompts, responses)          # the same log-probabilities in one pass over whole sequences
    assert equal_bits(scores, again)

Prompts and responses are lists of token lists of any lengths; log-probabilities come as a list of fp32 tensors, one a
sequence, [tokens of its response].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.aligned.cache import KVCache
from tools.aligned.patch import aligned_of
from tools.aligned.trace import words
from tools.core.errors import UserError

Tensor = torch.Tensor
Tokens = Sequence[int]


def padded(sequences: Sequence[Tokens]) -> Tensor:
    """Token lists as int64 [B, longest], token 0 behind the shorter ones."""
    if not sequences or not all(len(s) for s in sequences):
        raise UserError("a batch has at least one sequence, and a sequence at least one token")
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return ids


def full_logits(model: Any, sequences: Sequence[Tokens]) -> list[Tensor]:
    """Logits [tokens, vocabulary] of each sequence from one pass over all of them, padded on the right."""
    ids, mask = _batch(sequences)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [logits[i, : len(sequence)] for i, sequence in enumerate(sequences)]


def score(model: Any, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Tensor]:
    """Log-probabilities of the responses' tokens in one pass over whole sequences; differentiable.

    The LM head sees the rows that predict a response's token, and no others.
    """
    layers = aligned_of(model).layers
    ids, mask = _batch([[*p, *r] for p, r in zip(prompts, responses, strict=True)])
    hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    counts = [len(r) for r in responses]
    rows = [hidden[i, len(p) - 1 : len(p) - 1 + count] for i, (p, count) in enumerate(zip(prompts, counts, strict=True))]
    targets = torch.tensor([token for response in responses for token in response])
    return list(torch.split(layers.log_prob(model.lm_head(torch.cat(rows)), targets), counts))


def _batch(sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, longest], padded on the right."""
    ids = padded(sequences)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


@torch.no_grad()
def stepwise(
    model: Any, prompts: Sequence[Tokens], steps: int, choose: Callable[[int, Tensor], Tensor], cache: Any = None
) -> None:
    """Prefill the prompts, then `steps` tokens, one forward each.

    choose(step, logits [B, vocabulary]) is given the logits that predict token `step` of the responses and returns
    it, int64 [B]; it is called once more, with step = steps, for the logits behind the last token, and what it returns
    then is not used. cache: an empty KVCache to use again; a new one otherwise.
    """
    lengths = [len(p) for p in prompts]
    if cache is None:
        cache = KVCache(model, len(prompts), max(lengths) + steps)
    if bool(cache.lengths.any()):
        raise UserError(f"the cache holds {cache.lengths.tolist()} tokens: clear it first")
    cache.expect(lengths)
    hidden = model.model(input_ids=padded(prompts), cache=cache).last_hidden_state
    last = model.lm_head(hidden[torch.arange(len(prompts)), torch.tensor(lengths) - 1])
    for step in range(steps):
        tokens = choose(step, last)
        last = model(input_ids=tokens[:, None], cache=cache).logits[:, 0]
    choose(steps, last)


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[Tokens], steps: int, draw: torch.Generator | None = None, cache: Any = None
) -> tuple[list[list[int]], list[Tensor]]:
    """Responses of `steps` tokens, sampled at temperature 1 (the likeliest token without `draw`), and their scores."""
    layers = aligned_of(model).layers
    tokens: list[Tensor] = []
    scores: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        token = logits.argmax(-1)
        if draw is not None:
            token = torch.multinomial(logits.float().softmax(-1), 1, generator=draw)[:, 0]
        if step < steps:
            tokens.append(token)
            scores.append(layers.log_prob(logits, token))
        return token

    stepwise(model, prompts, steps, choose, cache)
    return torch.stack(tokens, 1).tolist(), list(torch.stack(scores, 1))


@torch.no_grad()
def replay_logits(model: Any, prompts: Sequence[Tokens], responses: Sequence[Tokens], cache: Any = None) -> list[Tensor]:
    """Logits [response tokens + 1, vocabulary] of each sequence: prefill, then the recorded tokens one at a time.

    Row i predicts token i of the response; the last row stands behind the whole sequence. Sequences whose response has
    ended go on with token 0, which nobody reads.
    """
    steps = max(map(len, responses))
    tokens = padded([[*r, *[0] * (steps - len(r))] for r in responses])
    rows: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        rows.append(logits)
        return tokens[:, min(step, steps - 1)]

    stepwise(model, prompts, steps, choose, cache)
    every = torch.stack(rows, 1)
    return [every[i, : len(r) + 1] for i, r in enumerate(responses)]


@torch.no_grad()
def replay(model: Any, prompts: Sequence[Tokens], responses: Sequence[Tokens], cache: Any = None) -> list[Tensor]:
    """Log-probabilities of recorded responses, as token-wise decode gives them."""
    layers = aligned_of(model).layers
    every = replay_logits(model, prompts, responses, cache)
    return [layers.log_prob(logits[:-1], torch.tensor(r)) for logits, r in zip(every, responses, strict=True)]


def equal_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors have the same shapes and the same raw words."""
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(words(a), words(b)) for a, b in zip(left, right, strict=True)
    )
