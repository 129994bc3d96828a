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
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools.aligned.forwards import ATTENTION, attention_functions, forward_of, installed
from tools.aligned.gradients import Layers
from tools.aligned.operators import HALF, load_operators
from tools.aligned.refusals import examine
from tools.aligned.trace import Trace
from tools.core.errors import UserError
from tools.loader.interface import load_kernel

Tensor = torch.Tensor


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
            forward = forward_of(module)
            if module is not self.modules.get(name) or (forward is not None and installed(module) is not forward):
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


def patch_model(model: Any, gpu: str = "cpu", layers: Layers | None = None) -> Any:
    """Give every module of a model the target's operators, in place; returns the model. See above for what is refused.

    layers: operators to use in place of the target's own (tests perturb them).
    """
    examine(model)
    if layers is None:
        layers = Layers(load_operators(gpu), load_kernel(gpu))
    theta = float(model.config.rope_parameters["rope_theta"])
    frequencies = torch.tensor([theta ** (-i / HALF) for i in range(HALF)], dtype=torch.float32)
    attention_functions()
    aligned = Aligned(layers, model, frequencies)
    for module in model.modules():
        module._aligned = aligned
        if (forward := forward_of(module)) is not None:
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
