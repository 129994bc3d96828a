"""Hugging Face transformers models whose full-sequence and token-wise forward passes agree bit for bit.

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)   # Qwen2, Qwen3, Qwen3-MoE or Mixtral
    patch_model(model)                                                       # in place; unpatch_model(model) undoes it
    logits = model(input_ids=ids).logits                                     # [B, S, vocabulary], bf16
    logits = model(input_ids=ids, cache=KVCache(model, B, 4096)).logits      # then one token at a time with the same cache

Every module that computes gets a forward made of the target's operators; transformers' own loops call them, and attention
goes through its attention interface under the name "areal_tik". What a row gives depends on its tokens and position alone:
not on the batch, on padding behind it, on how a sequence is cut into calls, or on threads.

Batches: one length, or padding on the right (nothing that counts sees it). A cache is tools.aligned.cache.KVCache, or
transformers' DynamicCache for sequences of one length (so `generate` works for these). Training: full sequences without a
cache have a backward pass (tools/aligned/gradients.py says which).

Refused, with one UserError line that names the module: another architecture or version of transformers, a dtype other than
bf16, another device, a head dimension other than 128, quantised weights, tensor parallelism, a sliding window, dropout, other
positions than the default rope, other activations than silu, and any module that is not one of the family's own. The
modules are looked at again in every forward, so one that was exchanged after the patch is refused there.
"""

from __future__ import annotations

import copy
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools.aligned.cache import KVCache
from tools.aligned.gradients import Layers, attend
from tools.aligned.operators import HALF, HEAD_DIM, WIDTH_UNIT, load_operators
from tools.aligned.trace import Trace
from tools.core.errors import UserError
from tools.loader.interface import load_kernel

Tensor = torch.Tensor
ATTENTION = "areal_tik"  # the name in transformers' attention interface
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral"}
VERSIONS = "5.24."  # of transformers, whose loops call the patched modules
MAX_GROUP = 16
ACTIVATIONS = ("SiLU", "SiLUActivation")


class Aligned:
    """What patch_model leaves on every module as `_aligned`: operators, and which module computes what."""

    def __init__(self, layers: Layers, root: Any, frequencies: Tensor) -> None:
        self.layers = layers
        self.frequencies = frequencies  # fp32 [64], turns a position
        self.modules = dict(root.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        self.root = root
        patched = getattr(root, "_aligned", None)  # the attention that unpatch_model puts back:
        self.before: str = root.config._attn_implementation if patched is None else patched.before
        self.trace: Trace | None = None

    @property
    def contract(self) -> str:
        """SHA-256 of the arithmetic of a forward pass."""
        return self.layers.operators.contract

    def __deepcopy__(self, memo: dict[int, Any]) -> Aligned:
        """For a copy of the whole model: the same loaded libraries, the copied modules."""
        twin = Aligned.__new__(Aligned)
        memo[id(self)] = twin
        twin.layers, twin.frequencies, twin.before, twin.trace = self.layers, self.frequencies, self.before, None
        twin.root = copy.deepcopy(self.root, memo)
        twin.modules = {name: copy.deepcopy(module, memo) for name, module in self.modules.items()}
        twin.names = {id(module): name for name, module in twin.modules.items()}
        return twin

    def verify(self) -> None:
        """UserError naming the first module that is not the one which was patched, or computes by other means."""
        found = dict(self.root.named_modules())
        for name, module in found.items():
            forward = _forward_of(module)
            if module is not self.modules.get(name) or (forward is not None and _installed(module) is not forward):
                raise UserError(f"{name or 'the model'}: a {type(module).__name__} that is not patched: call patch_model again")
        if missing := self.modules.keys() - found.keys():
            raise UserError(f"{min(missing)}: is gone since the model was patched: call patch_model again")

    def run(self, module: nn.Module, operator: str, *arguments: Any, **options: Any) -> Any:
        """One operator for a module; its name goes into errors and traces."""
        name = self.names.get(id(module), type(module).__name__)
        try:
            out = getattr(self.layers, operator)(*arguments, **options)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if operator == "route":
            self.note(module, "route, experts", out[0])
            self.note(module, "route, weights", out[1])
        else:
            self.note(module, operator, out)
        return out

    def note(self, module: nn.Module, what: str, output: Tensor) -> None:
        """Record an output under the module's name, where a trace is on and the output has the forward's rows."""
        if self.trace is None or self.trace.positions is None:
            return
        rows = self.trace.positions.shape
        if output.shape[:2] == rows or output.shape[:1] == (rows.numel(),):
            self.trace.note(f"{self.names.get(id(module), '?')} {what}", output)


# ------------------------------------------------------------------------------------------------------ patched forwards
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
    # One trace name each: q and k are turned by the same operator.
    q, k = (aligned.layers.rope(x, *position_embeddings) for x in (q, k))
    aligned.note(self, "rope, q", q)
    aligned.note(self, "rope, k", k)
    interface = _attention_functions().get(self.config._attn_implementation)
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
    out = type(self).forward(
        self,
        input_ids=input_ids,
        position_ids=expected,
        cache=cache,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **options,
    )
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


_FORWARDS: dict[str, Callable[..., Any]] = {
    "Attention": _attention, "DecoderLayer": _layer, "Experts": _experts, "MLP": _mlp, "Model": _base, "RMSNorm": _norm,
    "RotaryEmbedding": _angles, "SparseMoeBlock": _moe, "TopKRouter": _router,
}  # fmt: skip


def _forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a module has to have; None for containers, activations and the model's outermost class."""
    if type(module) is nn.Linear:
        return _linear
    if type(module) is nn.Embedding:
        return _embedding
    return _FORWARDS.get(_role(module) or "")


def _role(module: nn.Module) -> str | None:
    """A class of a supported family without the family's name, such as Attention; None for all others."""
    place = type(module).__module__.split(".")
    if place[:2] != ["transformers", "models"] or len(place) != 4 or place[2] not in FAMILIES:
        return None
    prefix = FAMILIES[place[2]]
    name = type(module).__name__
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _installed(module: Any) -> Callable[..., Any] | None:
    """The function behind a module's own forward attribute, where it has one."""
    return getattr(module.__dict__.get("forward"), "__func__", None)


# -------------------------------------------------------------------------------------------------------------- refusals
def examine(model: Any) -> None:
    """UserError for the first thing that keeps a model from being patched; changes nothing."""
    _check_library()
    config = getattr(model, "config", None)
    name = type(model).__name__
    if not isinstance(model, nn.Module) or _role(model) != "ForCausalLM":
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
    role = _role(module)
    known = role in _FORWARDS or role == "ForCausalLM" or type(module) in (nn.Linear, nn.Embedding, nn.ModuleList)
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


@functools.cache
def _attention_functions() -> Any:
    """transformers' attention interface, with ours registered."""
    interface = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    interface.register(ATTENTION, attention_interface)
    return interface


def patch_model(model: Any, gpu: str = "cpu", layers: Layers | None = None) -> Any:
    """Give every module of a model the target's operators, in place; returns the model. See above for what is refused.

    layers: operators to use in place of the target's own (tests perturb them).
    """
    examine(model)
    if layers is None:
        layers = Layers(load_operators(gpu), load_kernel(gpu))
    theta = float(model.config.rope_parameters["rope_theta"])
    frequencies = torch.tensor([theta ** (-i / HALF) for i in range(HALF)], dtype=torch.float32)
    _attention_functions()
    aligned = Aligned(layers, model, frequencies)
    for module in model.modules():
        module._aligned = aligned
        if (forward := _forward_of(module)) is not None:
            _install(module, forward)
    model.set_attn_implementation(ATTENTION)
    return model


def _install(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Bind a forward to one module; the class, and other models of it, keep theirs."""
    module.forward = types.MethodType(forward, module)


def unpatch_model(model: Any) -> Any:
    """Give a model transformers' own forwards back; returns the model."""
    before = aligned_of(model).before
    for module in model.modules():
        module.__dict__.pop("_aligned", None)
        module.__dict__.pop("forward", None)
    model.set_attn_implementation(before)
    return model


def aligned_of(model: Any) -> Aligned:
    """What patch_model left on a model; UserError where it is not patched."""
    aligned = getattr(model, "_aligned", None)
    if not isinstance(aligned, Aligned):
        raise UserError(f"{type(model).__name__} is not patched: call patch_model first")
    return aligned
