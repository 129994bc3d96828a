"""What keeps a model from being patched: one UserError line that names the module, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tools.aligned.forwards import FAMILIES, FORWARDS, role_of
from tools.aligned.operators import HEAD_DIM, WIDTH_UNIT
from tools.core.errors import UserError

VERSIONS = "5.24."  # of transformers, whose loops call the patched modules
MAX_GROUP = 16  # query heads for each KV head
ACTIVATIONS = ("SiLU", "SiLUActivation")


def examine(model: Any) -> None:
    """UserError for the first thing that keeps a model from being patched; changes nothing."""
    _check_library()
    config = getattr(model, "config", None)
    name = type(model).__name__
    if not isinstance(model, nn.Module) or role_of(model) != "ForCausalLM":
        known = ", ".join(f"{prefix}ForCausalLM" for prefix in FAMILIES.values())
        raise UserError(f"the model: {name} is not supported; supported: {known}")
    if getattr(model, "hf_quantizer", None) is not None or getattr(config, "quantization_config", None) is not None:
        raise UserError(f"the model: {name} is quantised; these operators take bf16 weights")
    devices: int = getattr(model, "_tp_size", None) or 1
    if devices > 1:
        raise UserError(f"the model: {name} is split over {devices} devices; tensor parallelism is not supported")
    for place, module in model.named_modules():
        _examine_module(place or "the model", module, config)


def _examine_module(name: str, module: Any, config: Any) -> None:
    role = role_of(module)
    known = role in FORWARDS or role == "ForCausalLM" or type(module) in (nn.Linear, nn.Embedding, nn.ModuleList)
    absorbed = name.endswith(".act_fn")  # its module computes the activation itself
    if absorbed and type(module).__name__ not in ACTIVATIONS:
        raise UserError(f"{name}: activation {type(module).__name__} is not silu")
    if not known and not absorbed:
        raise UserError(f"{name}: no operator for a {type(module).__module__}.{type(module).__name__}")
    for key, weight in module.named_parameters(recurse=False):
        if hasattr(weight, "to_local"):
            raise UserError(
                f"{name}: {key} is a {type(weight).__name__}: tensor parallelism and sharded weights are not supported"
            )
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise UserError(f"{name}: {key} is {weight.dtype}: quantised weights are not supported")
        if weight.dtype != torch.bfloat16:
            raise UserError(f"{name}: {key} is {weight.dtype}, not {torch.bfloat16}")
        if weight.device.type != "cpu":
            raise UserError(f"{name}: {key} is on {weight.device}; these operators run on the CPU")
    if type(module) is nn.Linear and module.in_features % WIDTH_UNIT:
        raise UserError(f"{name}: {module.in_features} inputs are no multiple of {WIDTH_UNIT}")
    if role == "Attention":
        _examine_attention(name, module, config)
    if role == "RotaryEmbedding" and module.rope_type != "default":
        raise UserError(f"{name}: rope of type {module.rope_type!r} is not supported")
    if noise := getattr(module, "jitter_noise", None):
        raise UserError(f"{name}: router noise of {noise} is not supported")


def _examine_attention(name: str, module: Any, config: Any) -> None:
    if module.head_dim != HEAD_DIM:
        raise UserError(f"{name}: head dimension {module.head_dim} is not {HEAD_DIM}")
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    if window is not None:
        raise UserError(f"{name}: a sliding window of {window} tokens is not supported")
    if module.attention_dropout:
        raise UserError(f"{name}: dropout of {module.attention_dropout} is not supported")
    heads, heads_kv = config.num_attention_heads, config.num_key_value_heads
    if heads % heads_kv or heads > MAX_GROUP * heads_kv:
        raise UserError(f"{name}: {heads} query heads to {heads_kv} KV heads is not a whole number from 1 to {MAX_GROUP}")
    if module.scaling != HEAD_DIM**-0.5:
        raise UserError(f"{name}: scores scaled by {module.scaling}, not {HEAD_DIM**-0.5}")


def _check_library() -> None:
    """UserError for another transformers than the one whose loops are known."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise UserError("transformers is not installed: pip install -c constraints.txt '.[models]'") from None
    if not transformers.__version__.startswith(VERSIONS):
        raise UserError(f"transformers {transformers.__version__} is not {VERSIONS}x, whose loops call the patched modules")
