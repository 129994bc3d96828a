"""Values of q, k and v for correctness cases, drawn by the judge from the run's seed.

A kind fills logical tensors q [B,Hq,Sq,128] and k/v [B,Hkv,Skv,128] (any strides) in place. `Draw` derives an
independent generator from the run's seed and a label, so that a case can be repeated alone.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import torch

SMALLEST = 2.0**-133  # the smallest positive bf16 (subnormal)
BLOCK = 1_048_573  # words: a prime, so that repetitions are aligned differently
POISON = 0x7FFF  # a bf16 NaN


class Draw:
    """Random numbers of one case: `torch` for tensors on the device, `python` for shapes."""

    def __init__(self, seed: int, label: str, device: str) -> None:
        digest = hashlib.sha256(f"{seed}:{label}".encode()).digest()
        self.seed = int.from_bytes(digest[:8], "little") >> 1
        self.device = device
        self.torch = torch.Generator(device=device).manual_seed(self.seed)
        self.python = random.Random(self.seed)

    def normal_(self, tensor: Any, scale: float = 1.0) -> Any:
        """Fill any view with N(0, scale^2)."""
        return tensor.normal_(0.0, scale, generator=self.torch)

    def fill_(self, tensor: Any, scale: float = 1.0) -> Any:
        """Fill a contiguous tensor with N(0, scale^2). On the CPU, where drawing is slow, a large one repeats BLOCK words."""
        if self.device != "cpu" or tensor.numel() <= BLOCK:
            return self.normal_(tensor, scale)
        flat = tensor.view(-1)
        block = self.normal_(flat[:BLOCK], scale)
        for start in range(BLOCK, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            part.copy_(block[: part.numel()])
        return tensor

    def normal(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self.torch, device=self.device)


def _ramp(draw: Draw, q: Any, k: Any, v: Any, low: float, high: float) -> None:
    """Scores that change by tens from one end of the keys to the other."""
    draw.normal_(v)
    direction = draw.normal(q.shape[-1]).sign()
    steps = torch.linspace(low, high, k.shape[2], device=q.device)[:, None]
    q.copy_((direction + 0.1 * draw.normal(*q.shape)).to(q.dtype))
    k.copy_((direction * steps + 0.1 * draw.normal(*k.shape)).to(k.dtype))


def normal(draw: Draw, q: Any, k: Any, v: Any) -> None:
    for tensor in (q, k, v):
        draw.normal_(tensor)


def large_scores(draw: Draw, q: Any, k: Any, v: Any) -> None:
    normal(draw, q, k, v)
    q.mul_(20.0)


def equal_scores(draw: Draw, q: Any, k: Any, v: Any) -> None:
    normal(draw, q, k, v)
    k.copy_(draw.normal(k.shape[-1]).to(k.dtype).expand_as(k))


def rising(draw: Draw, q: Any, k: Any, v: Any) -> None:
    _ramp(draw, q, k, v, -4.0, 4.0)


def falling(draw: Draw, q: Any, k: Any, v: Any) -> None:
    _ramp(draw, q, k, v, 4.0, -4.0)


def jumps(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """A few keys far above the rest, so that the running maximum jumps at places of its own."""
    normal(draw, q, k, v)
    loud = torch.rand(k.shape[:3], generator=draw.torch, device=draw.device) < 0.02
    k.mul_(torch.where(loud, 12.0, 1.0)[..., None].to(k.dtype))


def below_any_mask(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """Every raw score is -3.2e9, lower than the finite constants used as masks; V decides the output alone."""
    q.fill_(5000.0)
    k.fill_(-5000.0)
    draw.normal_(v)


def underflow(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """Probabilities from 1 down through subnormals to 0."""
    _ramp(draw, q, k, v, -9.0, 9.0)


def tiny_v(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """V of a few of the smallest normal and subnormal numbers."""
    normal(draw, q, k, v)
    v.copy_((draw.normal(*v.shape) * 2.0**-125).to(v.dtype))


def subnormal_v(draw: Draw, q: Any, k: Any, v: Any) -> None:
    normal(draw, q, k, v)
    v.copy_(((draw.normal(*v.shape) * 20).round() * SMALLEST).to(v.dtype))


def zero_columns(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """Some dims of V are 0 and some -0.0; a jump of the maximum meets both."""
    jumps(draw, q, k, v)
    v[..., 3::16] = 0.0
    v[..., 8::16] = -0.0


def quiet_values(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """V of the loud keys is 0 or -0.0: outputs rest on probabilities of 2^-24 in the first head to 2^-126 in the last."""
    direction = draw.normal(q.shape[-1]).sign()
    batch, heads, keys = k.shape[:3]
    depth = torch.linspace(24.0, 126.0, batch * heads, device=k.device).reshape(batch, heads, 1)
    depth = depth + 6.0 * torch.rand((batch, heads, keys), generator=draw.torch, device=k.device) - 3.0
    loud = torch.rand((batch, heads, keys), generator=draw.torch, device=k.device) < 0.03
    loud[:, :, 0] = True
    steps = 4.2 - depth.masked_fill(loud, 0.0) * (math.log(2.0) / math.sqrt(q.shape[-1]))
    q.copy_((direction + 0.1 * draw.normal(*q.shape)).to(q.dtype))
    k.copy_((direction * steps[..., None] + 0.1 * draw.normal(*k.shape)).to(k.dtype))
    draw.normal_(v)
    v[..., 8::16] = (draw.normal(*v[..., 8::16].shape).sign() * SMALLEST).to(v.dtype)
    v.masked_fill_(loud[..., None], 0.0)
    v[..., 8::16].masked_fill_(loud[..., None], -0.0)


def cancelling_values(draw: Draw, q: Any, k: Any, v: Any) -> None:
    """Neighbouring keys of almost equal scores and opposite values: outputs show the last bits of probabilities."""
    direction = draw.normal(q.shape[-1]).sign()
    exponents = 0.4 + 0.1 * torch.rand(k.shape[:3], generator=draw.torch, device=k.device)
    exponents += torch.randint(3, k.shape[:3], generator=draw.torch, device=k.device)
    exponents[:, :, 1::2] = exponents[:, :, 0 : exponents.shape[2] - 1 : 2]
    exponents[:, :, 0] = 0.0  # the largest score
    q.copy_((direction + 0.05 * draw.normal(*q.shape)).to(q.dtype))
    q[..., 0] *= 2.0**-5  # neighbours' keys differ in this dim, by one bit
    k.copy_((-direction * exponents[..., None] * (math.log(2.0) / math.sqrt(q.shape[-1]))).to(k.dtype))
    k[:, :, 1::2, 0] *= 1.0 + 2.0**-7
    v.zero_()
    keys = torch.arange(k.shape[2], device=k.device)
    v[:, :, keys, keys // 2 % v.shape[-1]] = (1.0 - 2.0 * (keys % 2)).to(v.dtype)


def zero_rows(draw: Draw, q: Any, k: Any, v: Any) -> None:
    normal(draw, q, k, v)
    q[:, :, ::3] = 0.0
    k[:, :, ::5] = 0.0


def negative_zeros(draw: Draw, q: Any, k: Any, v: Any) -> None:
    normal(draw, q, k, v)
    q[:, :, ::3] = -0.0
    k[:, :, ::4] = -0.0
    v[:, :, ::2] = -0.0


Fill = Callable[[Draw, Any, Any, Any], None]
KINDS: dict[str, Fill] = {
    f.__name__: f
    for f in (
        normal,
        large_scores,
        equal_scores,
        rising,
        falling,
        jumps,
        below_any_mask,
        underflow,
        tiny_v,
        subnormal_v,
        zero_columns,
        quiet_values,
        cancelling_values,
        zero_rows,
        negative_zeros,
    )
}
# An error relative to a row's own scale says nothing where the row lies among the subnormals, or is what cancellation left.
NO_ORACLE = ("tiny_v", "subnormal_v", "quiet_values", "cancelling_values")
GARBAGE = (float("nan"), float("inf"), float("-inf"), 3.0e38, -3.0e38)


def garbage_(draw: Draw, tensor: Any) -> None:
    """Fill a view with values that no computation may touch."""
    choice = torch.randint(len(GARBAGE), tensor.shape, generator=draw.torch, device=draw.device)
    tensor.copy_(torch.tensor(GARBAGE, device=draw.device)[choice].to(tensor.dtype))
