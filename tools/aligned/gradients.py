"""Operators whose forward is ours and whose backward is torch's.

    layers = Layers(load_operators("cpu"), load_kernel("cpu"))
    y = layers.linear(x, weight, bias); y.sum().backward()

What backward is used, so that nobody mistakes it for aligned arithmetic: linear layers multiply the output's gradient in
fp32 with torch's own product; attention recomputes its weights from the forward's log-sum-exp, in fp32; every other operator
is written once more in plain torch, in fp32, and torch differentiates that. Gradients are therefore those of the exact
function to rounding (bf16's roundings count as identity), they repeat on one machine as torch's own do, and they are no part
of the contract: bits are promised for the forward pass alone.

Without grad mode, or where no input asks for a gradient, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tools.aligned.operators import HALF, HEAD_DIM, Operators
from tools.loader.interface import Kernel

Tensor = torch.Tensor
SCALE = HEAD_DIM**-0.5


class Layers:
    """The operators of one target, attention among them, each with a backward pass. Shapes: tools/aligned/operators.py."""

    def __init__(self, operators: Operators, kernel: Kernel) -> None:
        self.operators = operators
        self.kernel = kernel

    def embedding(self, table: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
        """Rows of table at ids; the row of the token `padding` gets no gradient."""
        return _run(lambda t: self.operators.embedding(t, ids), lambda t: functional.embedding(ids, t, padding), table)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return _run(self.operators.add, torch.add, a, b)

    def rmsnorm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x over its root mean square, times weight."""

        def reference(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

        return _run(lambda x, w: self.operators.rmsnorm(x, w, epsilon), reference, x, weight)

    def rope(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x [..., heads, 128] turned by the angles of its row; no gradient of the angles."""

        def reference(x: Tensor) -> Tensor:
            low, high = x[..., :HALF], x[..., HALF:]
            c, s = cosines[..., None, :], sines[..., None, :]
            return torch.cat((low * c - high * s, high * c + low * s), -1)

        return _run(lambda x: self.operators.rope(x, cosines, sines), reference, x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the rows of weight, plus bias."""
        if not _wanted(x, weight, bias):
            return self.operators.linear(x, weight, bias)
        return _Linear.apply(self.operators, x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return _run(self.operators.swiglu, lambda g, u: functional.silu(g) * u, gate, up)

    def route(self, logits: Tensor, top: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """The chosen experts and their weights; the choice itself has no gradient."""
        chosen, weights = self.operators.route(logits, top, normalise=normalise)

        def reference(logits: Tensor) -> Tensor:
            w = logits.softmax(-1).gather(-1, chosen)
            return w / w.sum(-1, keepdim=True) if normalise else w

        return chosen, _run(lambda _: weights, reference, logits)

    def combine(self, products: Tensor, weights: Tensor) -> Tensor:
        """products [..., top, width] summed with weights [..., top]."""
        return _run(self.operators.combine, lambda p, w: (p * w[..., None]).sum(-2), products, weights)

    def log_prob(self, logits: Tensor, targets: Tensor) -> Tensor:
        """log softmax of logits at targets, fp32."""

        def reference(logits: Tensor) -> Tensor:
            return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

        return _run(lambda x: self.operators.log_prob(x, targets), reference, logits)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of whole sequences: q [B, H_Q, S, 128], k and v [B, H_KV, S, 128] -> [B, S, H_Q, 128]."""
        if not _wanted(q, k, v):
            return attend(self.kernel, q, k, v)
        return _Prefill.apply(self.kernel, q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, *, whole: bool = True) -> Tensor:
    """One call of the attention kernel; [B, Sq, H_Q, 128], as the output projection reads it.

    whole: prefill, k and v are those of the queries. Else decode (one query) or extend, over keys 0 .. lengths[b] - 1 of a
    cache, or over all keys without lengths.
    """
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], HEAD_DIM, dtype=q.dtype, device=q.device)
    heads = (q.shape[1], k.shape[1])
    if whole:
        kernel.unified_prefill(q, k, v, *heads, out=out.transpose(1, 2))
    elif q.shape[2] == 1:
        kernel.unified_decode(q, k, v, *heads, lengths=lengths, out=out.transpose(1, 2))
    else:
        kernel.unified_extend(q, k, v, *heads, lengths=lengths, out=out.transpose(1, 2))
    return out


def _wanted(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _run(forward: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """forward(*inputs), differentiated as reference(*inputs in fp32) where that is asked for."""
    if not _wanted(*inputs):
        return forward(*inputs)
    return _Recomputed.apply(forward, reference, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.reference = reference
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with torch.enable_grad():
            again = [x.detach().float().requires_grad_(want) for x, want in zip(inputs, needed, strict=True)]
            out = ctx.reference(*again)
        found = iter(torch.autograd.grad(out, [x for x in again if x.requires_grad], gradient.float()))
        return None, None, *(next(found).to(x.dtype) if want else None for x, want in zip(inputs, needed, strict=True))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operators: Operators, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return operators.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).float()
        _, for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            None,
            (rows @ weight.float()).to(x.dtype).view(x.shape) if for_x else None,
            (rows.T @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if for_weight else None,
            rows.sum(0).to(weight.dtype) if for_bias else None,
        )


class _Prefill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[2], q.shape[1], HEAD_DIM, dtype=q.dtype, device=q.device)
        heads = (q.shape[1], k.shape[1])
        _, lse = kernel.unified_prefill(q, k, v, *heads, return_lse=True, out=out.transpose(1, 2))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """P = exp(S - lse) again, then the chain rule of O = P V and of the softmax; one KV head of a sequence at a time."""
        q, k, v, out, lse = ctx.saved_tensors
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        found = [torch.empty_like(x) for x in (q, k, v)]
        for b in range(q.shape[0]):
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                queries, keys, values = q[b, heads].float(), k[b, head].float(), v[b, head].float()
                g, o = gradient[b, :, heads].transpose(0, 1).float(), out[b, :, heads].transpose(0, 1).float()
                p = (queries @ keys.T * SCALE - lse[b, heads, :, None]).masked_fill(unseen, -torch.inf).exp()
                scores = p * (g @ values.T - (g * o).sum(-1, keepdim=True)) * SCALE
                found[0][b, heads] = (scores @ keys).to(q.dtype)
                found[1][b, head] = (scores.transpose(1, 2) @ queries).sum(0).to(q.dtype)
                found[2][b, head] = (p.transpose(1, 2) @ g).sum(0).to(q.dtype)
        return None, *found
