"""Rollout log-probabilities as the old policy's, audited: a sample is computed again and any unequal bit is an error.

    rollout = record(model, prompts, responses, scores, weights="step 17")   # as generate() returned them
    audit = AuditedReuse(model, tokens=8)
    old = audit.take(rollout, weights="step 17")     # list of fp32 tensors, one a sequence; raises, or they are the trainer's
    new = score(model, prompts, responses)           # with gradients; the ratio of the first minibatch is exactly 1

What is carried beside the values: the hash of the contract (arithmetic and sources) under which they were computed and the
version of the weights, which is the caller's word; weights_digest() makes one from the weights' bytes. Values of another
contract or other weights are refused. Memory that changed, a rank with stale weights, another build or an operator that
depends on the batch show as unequal bits in the sample.

What a sample can miss: k tokens of n find a share p of wrong ones with probability 1 - (1 - p)^k. A token costs a forward
over its prefix, several tokens of one sequence one forward.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tools.aligned.patch import aligned_of
from tools.aligned.rollout import Tokens, score
from tools.aligned.trace import words
from tools.core.errors import UserError

Tensor = torch.Tensor


class BitMismatch(UserError):
    """A recorded log-probability is not what the trainer computes."""


@dataclass(frozen=True)
class Rollout:
    """Responses with the log-probabilities of their tokens, and what these are of."""

    prompts: list[list[int]]
    responses: list[list[int]]
    scores: list[Tensor]  # fp32, one a sequence, [tokens of its response]
    contract: str  # SHA-256
    weights: str  # the version, in the caller's words


def record(
    model: Any, prompts: Sequence[Tokens], responses: Sequence[Tokens], scores: Sequence[Tensor], *, weights: str
) -> Rollout:
    """A rollout by a patched model with these weights; UserError where the scores are not one fp32 value a token."""
    if not len(prompts) == len(responses) == len(scores) > 0:
        raise UserError(f"{len(prompts)} prompts, {len(responses)} responses and {len(scores)} scores are not as many")
    for index, (response, values) in enumerate(zip(responses, scores, strict=True)):
        if values.dtype != torch.float32 or values.shape != (len(response),) or not response:
            raise UserError(f"scores of sequence {index}: {values.dtype} {list(values.shape)}, not fp32 [{len(response)}]")
    kept = [values.detach().clone() for values in scores]
    return Rollout([list(p) for p in prompts], [list(r) for r in responses], kept, aligned_of(model).contract, weights)


def weights_digest(model: Any) -> str:
    """SHA-256 of all parameters' names, shapes and bytes; reads every weight once."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class AuditedReuse:
    """Hands out recorded log-probabilities after computing some of them again."""

    def __init__(self, model: Any, *, tokens: int = 8, seed: int | None = None) -> None:
        """tokens: sampled in each call of take. seed: of the sample; unpredictable without one."""
        if tokens < 1:
            raise UserError(f"tokens is {tokens}: an audit computes at least 1")
        self.model = model
        self.tokens = tokens
        self.audited = 0  # tokens so far
        self._draw = random.Random(seed)

    def take(self, rollout: Rollout, *, weights: str) -> list[Tensor]:
        """The scores of a rollout by these weights. UserError for another contract or version; BitMismatch, see above."""
        contract = aligned_of(self.model).contract
        if rollout.contract != contract:
            raise UserError(f"the rollout is of contract {rollout.contract[:12]}..., the trainer of {contract[:12]}...")
        if rollout.weights != weights:
            raise UserError(f"the rollout is of weights {rollout.weights!r}, the trainer has {weights!r}")
        places = [(s, t) for s, response in enumerate(rollout.responses) for t in range(len(response))]
        chosen = self._draw.sample(places, min(self.tokens, len(places)))
        last: dict[int, int] = {}  # sequence -> its last sampled token
        for sequence, token in chosen:
            last[sequence] = max(token, last.get(sequence, 0))
        with torch.no_grad():
            again = score(
                self.model,
                [rollout.prompts[s] for s in last],
                [rollout.responses[s][: end + 1] for s, end in last.items()],
            )
        values = dict(zip(last, again, strict=True))
        for sequence, token in sorted(chosen):
            recorded, computed = rollout.scores[sequence][token], values[sequence][token]
            if int(words(recorded)) != int(words(computed)):
                raise BitMismatch(
                    f"sequence {sequence}, response token {token}: the rollout has log-probability {recorded:.9g}, "
                    f"the trainer computes {computed:.9g}"
                )
        self.audited += len(chosen)
        return rollout.scores
