"""The forwards that patched modules of transformers get: its own loops around the target's operators.

A module finds its operators as `self._aligned` (tools/aligned/patch.py). Signatures are those that transformers calls.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tools.aligned.cache import KVCache
from tools.aligned.gradients import attend
from tools.aligned.operators import HEAD_DIM
from tools.core.errors import UserError

if TYPE_CHECKING:
    from tools.aligned.patch import Aligned

Tensor = torch.Tensor
ATTENTION = "areal_tik"  # the name in transformers' attention interface
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}  # package -> its classes' prefix


def _linear(self: Any, x: Tensor) -> Tensor:
    return self._aligned.run(self, "linear", x, self.weight, self.bias)  # type: ignore[no-any-return]


def _embedding(self: Any, ids: Tensor) -> Tensor:
    return self._aligned.run(self, "embedding", self.weight, ids, self.padding_idx)  # type: ignore[no-any-return]


def _norm(self: Any, x: Tensor) -> Tensor:
    return self._aligned.run(self, "rmsnorm", x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return]


def _angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    cosines, sines = self._aligned.layers.operators.angles(position_ids.expand(x.shape[:2]), self._aligned.frequencies)
    self._aligned.note(self, "angles, cosines", cosines)
    self._aligned.note(self, "angles, sines", sines)
    return cosines, sines


def _mlp(self: Any, x: Tensor) -> Tensor:
    hidden = self._aligned.run(self, "swiglu", self.gate_proj(x), self.up_proj(x))
    return self.down_proj(hidden)  # type: ignore[no-any-return]


def _router(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    aligned = self._aligned
    logits = aligned.run(self, "linear", x.reshape(-1, x.shape[-1]), self.weight)
    normalise = getattr(self, "norm_topk_prob", True)  # Mixtral always does
    chosen, weights = aligned.run(self, "route", logits, self.top_k, normalise=normalise)
    return logits, weights, chosen


def _experts(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """x [rows, width], chosen and weights [rows, top]: every product by its expert's rows together, then one fixed order."""
    aligned, layers = self._aligned, self._aligned.layers
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)  # slots by expert
    products: list[Tensor] = []
    start = 0
    for expert, count in enumerate(flat.bincount().tolist()):
        if count:
            rows = order[start : start + count] // chosen.shape[1]
            gate, up = layers.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            products.append(layers.linear(layers.swiglu(gate, up), self.down_proj[expert]))
            start += count
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    by_slot = torch.cat(products)[back].view(*chosen.shape, -1)
    aligned.note(self, "expert products", by_slot)
    return aligned.run(self, "combine", by_slot, weights)  # type: ignore[no-any-return]


def _moe(self: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    _, weights, chosen = self.gate(rows)
    return self.experts(rows, chosen, weights).view(x.shape)  # type: ignore[no-any-return]


def _attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
    cache: Any = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    aligned, shape = self._aligned, (*hidden_states.shape[:-1], -1, HEAD_DIM)
    q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = (aligned.layers.rope(x, *position_embeddings) for x in (q, k))
    aligned.note(self, "rope, q", q)
    aligned.note(self, "rope, k", k)
    interface = attention_functions().get(self.config._attn_implementation)
    if interface is not attention_interface:
        raise UserError(
            f"{aligned.names.get(id(self))}: attention runs as {self.config._attn_implementation!r}, not {ATTENTION!r}"
        )
    out, _ = interface(self, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask, cache=cache)
    return self.o_proj(out.flatten(2)), None


def attention_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, cache: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of new rows: query [B, H_Q, S, 128], key and value [B, H_KV, S, 128], before the cache has them.

    Returns [B, S, H_Q, 128]. Whole sequences take the prefill entry point, also where they fill an empty cache; rows behind
    others take decode or extend over the cache. Registered with transformers for patched models alone.
    """
    aligned = getattr(module, "_aligned", None)
    if aligned is None:
        raise UserError(f"{type(module).__name__}: attention {ATTENTION!r} needs a model that patch_model has patched")
    if attention_mask is not None:
        raise UserError(f"{aligned.names.get(id(module))}: attention takes no mask")
    layers, kernel, layer = aligned.layers, aligned.layers.kernel, module.layer_idx
    held = (key.transpose(1, 2), value.transpose(1, 2))  # what the cache holds of these rows afterwards
    if cache is None:
        out = layers.prefill(query, key, value)
    elif isinstance(cache, KVCache):
        cache.write(layers.operators, layer, *held)
        if aligned.trace is not None:
            held = cache.held(layer, query.shape[2])
        out = _cached(kernel, query, key, value, cache, layer)
    else:
        empty = cache.get_seq_length(layer) == 0
        keys, values = cache.update(key, value, layer)
        out = layers.prefill(query, key, value) if empty else attend(kernel, query, keys, values, whole=False)
    for name, rows in (("cache write, k", held[0]), ("cache write, v", held[1]), ("attention", out)):
        aligned.note(module, name, rows)
    return out, None


def _cached(kernel: Any, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, layer: int) -> Tensor:
    """Attention of rows that the cache has by now; rows that do not count come out as anything."""
    assert cache.counts is not None
    if not cache.lengths.any():
        return attend(kernel, query, key, value)
    k, v, ends = cache.k[layer], cache.v[layer], cache.lengths + cache.counts
    if int(cache.counts.min()) == query.shape[2]:
        return attend(kernel, query, k, v, ends, whole=False)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], HEAD_DIM)
    for b, count in enumerate(cache.counts.tolist()):  # extend counts queries from a sequence's end: each on its own
        one = slice(b, b + 1)
        out[one, :count] = attend(kernel, query[one, :, :count], k[one], v[one], ends[one], whole=False)
    return out


def _layer(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
    cache: Any = None, use_cache: bool | None = None, position_embeddings: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    aligned = self._aligned
    inner, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states), position_embeddings=position_embeddings,
        attention_mask=attention_mask, cache=cache,
    )  # fmt: skip
    middle = aligned.layers.add(hidden_states, inner)
    aligned.note(self, "add, attention", middle)
    out = aligned.layers.add(middle, self.mlp(self.post_attention_layernorm(middle)))
    aligned.note(self, "add, mlp", out)
    return out  # type: ignore[no-any-return]


def _base(
    self: Any, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
    cache: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None, **options: Any,
) -> Any:  # fmt: skip
    """transformers' own loop, after checks, with every row's position stated."""
    from transformers import DynamicCache

    aligned: Aligned = self._aligned
    aligned.verify()
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None:
        raise UserError("give input_ids or inputs_embeds")
    batch, rows = given.shape[:2]
    if cache is not None and type(cache) not in (KVCache, DynamicCache):
        raise UserError(f"cache is a {type(cache).__name__}, not a KVCache or DynamicCache")
    counts = _check_mask(attention_mask, batch, rows, cache)
    static = isinstance(cache, KVCache)
    past = 0 if cache is None or static else int(cache.get_seq_length())
    expected = cache.start(batch, rows) if static else torch.arange(past, past + rows).expand(batch, rows)
    if position_ids is not None and not torch.equal(position_ids.expand(batch, rows), expected):
        raise UserError("position_ids are not those that follow from the cache, or from 0: packed sequences are not supported")
    if aligned.trace is not None:
        aligned.trace.begin(expected, cache.counts if static else counts)
    own = functools.partial(type(self).forward, self, input_ids=input_ids, inputs_embeds=inputs_embeds)
    out = own(position_ids=expected, cache=cache, use_cache=use_cache, **options)
    if static:
        cache.finish()
    return out


def _check_mask(mask: Tensor | None, batch: int, rows: int, cache: Any) -> Tensor | None:
    """Rows of each sequence that count, where the mask hides some behind them; UserError for any other mask."""
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[0] != batch:
        raise UserError(f"attention_mask has shape {list(mask.shape)}, not [batch, length]")
    if bool((mask != 0).all()):
        return None
    if cache is not None:
        raise UserError("attention_mask hides tokens beside a cache: give KVCache.expect the rows that count")
    if mask.shape[1] != rows or bool(((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any()) or not bool((mask[:, 0] != 0).all()):
        raise UserError("attention_mask hides tokens before others: pad on the right")
    return (mask != 0).sum(1)


@functools.cache
def attention_functions() -> Any:
    """transformers' attention interface, with ours registered."""
    interface = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    interface.register(ATTENTION, attention_interface)
    return interface


FORWARDS: dict[str, Callable[..., Any]] = {
    "Attention": _attention, "DecoderLayer": _layer, "Experts": _experts, "MLP": _mlp, "Model": _base, "RMSNorm": _norm,
    "RotaryEmbedding": _angles, "SparseMoeBlock": _moe, "TopKRouter": _router,
}  # fmt: skip


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a module has to have; None for containers, activations and the model's outermost class."""
    if type(module) is nn.Linear:
        return _linear
    if type(module) is nn.Embedding:
        return _embedding
    return FORWARDS.get(role_of(module) or "")


def role_of(module: nn.Module) -> str | None:
    """A class of a supported family without the family's name, such as Attention; None for all others."""
    place = type(module).__module__.split(".")
    if place[:2] != ["transformers", "models"] or len(place) != 4 or place[2] not in FAMILIES:
        return None
    prefix = FAMILIES[place[2]]
    name = type(module).__name__
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def installed(module: Any) -> Callable[..., Any] | None:
    """The function behind a module's own forward attribute, where it has one."""
    return getattr(module.__dict__.get("forward"), "__func__", None)
