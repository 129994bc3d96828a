"""What aligned kernels change at the first minibatch of a policy update, measured beside transformers' own forward.

Both sides have the same weights and the same recorded tokens. Their rollout decodes one token at a time with a cache, their
trainer scores whole sequences in one pass. The ratio is exp(trainer's log-probability - rollout's), which is 1 for a policy
that has not moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tools.aligned.families import small_model
from tools.aligned.patch import patch_model, unpatch_model
from tools.aligned.rollout import generate, replay, score
from tools.aligned.trace import words

Tensor = torch.Tensor
Score = Callable[[], Tensor]
CLIP = 0.2


def standard_decode(model: Any, prompts: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities [B, tokens] by transformers' prefill of prompts [B, P] and cached decode of responses [B, tokens]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    rows = [model(input_ids=prompts, cache=cache, use_cache=True).logits[:, -1]]
    rows += [model(input_ids=token[:, None], cache=cache, use_cache=True).logits[:, -1] for token in responses.T[:-1]]
    return _gather(torch.stack(rows, 1), responses)


def standard_score(model: Any, prompts: Tensor, responses: Tensor) -> Tensor:
    """The same by one pass over whole sequences."""
    logits = model(input_ids=torch.cat((prompts, responses), 1), use_cache=False).logits
    return _gather(logits[:, prompts.shape[1] - 1 : -1], responses)


def _gather(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def loss_of(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The clipped objective over log-probabilities [B, tokens], advantages [B]."""
    ratio = (new - old).exp()
    weighted = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -weighted.mean()


def agreement(old: Tensor, new: Tensor) -> dict[str, float]:
    """How many log-probabilities have the same bits, and how far the ratio is from 1."""
    ratio = (new.double() - old.double()).exp()
    return {
        "tokens": old.numel(),
        "equal": int((words(old) == words(new)).sum()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "ratio_std": float(((ratio - 1) ** 2).mean().sqrt()),
    }


def step_seconds(model: Any, trainer: Score, advantages: Tensor, old: Tensor | None, repeats: int) -> float:
    """Median time of forward, backward and optimizer step; old None: the old log-probabilities are computed before it.

    The learning rate is 0, so that every step is of the same weights.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        before = old
        if before is None:
            with torch.no_grad():
                before = trainer()
        optimizer.zero_grad()
        loss_of(trainer(), before, advantages).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one also builds the optimizer's state


def measure(
    family: str, *, sequences: int, prompt: int, response: int, repeats: int, seed: int, **changes: int
) -> dict[str, dict[str, float]]:
    """Agreement and step times by side: "unified", "standard". changes: keys of the small model's config."""
    model = small_model(family, seed=seed, **changes)
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, model.config.vocab_size, (sequences, prompt), generator=draw)
    rewards = torch.randn(sequences, generator=draw)
    advantages = (rewards - rewards.mean()) / rewards.std().clamp(min=1e-6)
    found: dict[str, dict[str, float]] = {}

    def side(name: str, old: Tensor, trainer: Score) -> None:
        with torch.no_grad():
            found[name] = agreement(old, trainer())
        found[name]["step_with_old_pass_s"] = step_seconds(model, trainer, advantages, None, repeats)
        found[name]["step_s"] = step_seconds(model, trainer, advantages, old, repeats)

    patch_model(model)
    tokens, scores = generate(model, prompts.tolist(), response, draw=draw)
    responses = torch.tensor(tokens)
    assert all(torch.equal(a, b) for a, b in zip(scores, replay(model, prompts.tolist(), tokens), strict=True))
    side("unified", torch.stack(scores), lambda: torch.stack(score(model, prompts.tolist(), tokens)))
    unpatch_model(model)
    with torch.no_grad():
        old = standard_decode(model, prompts, responses)
    side("standard", old, lambda: standard_score(model, prompts, responses))
    return found
