"""Scaled-down models of the supported families: real head dimension and ratios, few layers, random weights.

    model = small_model("qwen3_moe", seed=1)

Built from configurations, so nothing is downloaded. Heads are those of a published model of the family, divided alike.
"""

from __future__ import annotations

from typing import Any

import torch

from tools.core.errors import UserError

SHAPES: dict[str, dict[str, Any]] = {  # query heads / KV heads of Qwen2.5-1.5B, Qwen3-8B, Qwen3-30B-A3B, Mixtral-8x7B
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 320},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 384},
    "qwen3_moe": {
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 384,
        "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    },
    "mixtral": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 192,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
DEFAULTS = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 4096}


def small_config(family: str, **changes: Any) -> Any:
    """The configuration of a small model; changes: keys of the family's config."""
    if family not in SHAPES:
        raise UserError(f"unknown family {family!r}; known: {', '.join(SHAPES)}")
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**DEFAULTS, "pad_token_id": None, "eos_token_id": None, **SHAPES[family], **changes})


def small_model(family: str, seed: int = 0, spread: float = 0.06, **changes: Any) -> Any:
    """A bf16 model of transformers with weights drawn from a seed.

    spread: standard deviation of all matrices; with 0.02, the families' own, small models give nearly uniform logits.
    Norm weights and biases are drawn too, so that no factor is 1 and no term 0.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(small_config(family, **changes), dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(noise * spread if weight.dim() > 1 else 1.0 + 0.1 * noise)
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.copy_(torch.randn(weight.shape, generator=draw) * spread)
    return model.eval()
