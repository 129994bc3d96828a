"""The operators between attention calls: checked tensors in, rows whose bits depend on themselves alone out.

    operators = load_operators("cpu")
    y = operators.linear(x, weight, bias)               # x [..., inputs], weight [outputs, inputs]; y [..., outputs]
    y = operators.rmsnorm(x, weight, epsilon)           # x [..., width]; a QK norm is the same over the last 128 elements

The arithmetic is the table at the top of the target's operator source, and `contract` in its operators.yaml. Tensors are
bf16 on the host unless a function says otherwise; leading dimensions are rows, in any number, and no row's bits depend on
how many there are. Inputs are made contiguous, outputs are new. Forward only: tools/aligned/gradients.py has a backward.
Errors: UserError names the tensor and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tools.aligned.abi import OperatorLibrary
from tools.core.config import EXPERIMENTAL, Target, load_target, target_names
from tools.core.errors import UserError
from tools.core.files import sha256_json
from tools.loader.build import Built, build

HEAD_DIM = 128
HALF = HEAD_DIM // 2
WIDTH_UNIT = 16  # a contraction's width is a multiple of it
MAX_POSITION = 2**24
Tensor = torch.Tensor


class Operators:
    """One loaded operator library."""

    def __init__(self, library: Path, target: Target) -> None:
        """Load a library of the target's contract into this process."""
        self.target = target
        self.library = OperatorLibrary(library)
        self.built: Built | None = None

    @property
    def contract(self) -> str:
        """SHA-256 of what decides a forward pass's bits: the contract's section, and every source of it and of attention."""
        attention = load_target(self.target.name)
        sources = {**attention.kernel_files(), **self.target.kernel_files()}
        return sha256_json({"contract": self.target.sections["contract"], "sources": sources})

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of table [vocabulary, width] at ids (int64, any shape): [..., width]."""
        table, ids = _rows("table", table, 2), _integers("ids", ids)
        out = table.new_empty(ids.numel(), table.shape[1])
        self._call("embedding", table, ids, out, *table.shape[:1], ids.numel(), table.shape[1])
        return out.view(*ids.shape, table.shape[1])

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b of one shape."""
        a, b = _rows("a", a), _rows("b", b)
        _same("b", b.shape, a.shape)
        out = torch.empty_like(a)
        self._call("add", a, b, out, a.numel())
        return out

    def rmsnorm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x [..., width] over its root mean square, times weight [width]."""
        x, weight = _rows("x", x), _rows("weight", weight, 1)
        _same("weight", weight.shape, x.shape[-1:])
        _multiple("x", x.shape[-1])
        out = torch.empty_like(x)
        self._call("rmsnorm", x, weight, out, x.numel() // x.shape[-1], x.shape[-1], epsilon)
        return out

    def angles(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 [..., 64], of positions (int64 [...], 0 to 2^24) times frequencies (fp32 [64])."""
        positions = _integers("positions", positions)
        frequencies = _rows("frequencies", frequencies, 1, torch.float32)
        _same("frequencies", frequencies.shape, (HALF,))
        cosines, sines = (frequencies.new_empty(*positions.shape, HALF) for _ in range(2))
        self._call("angles", positions, frequencies, cosines, sines, positions.numel())
        return cosines, sines

    def rope(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """x [..., heads, 128] turned by the angles of its row (fp32 [..., 64]): element i with element i + 64."""
        x = _rows("x", x)
        _same("x's last dimension", x.shape[-1:], (HEAD_DIM,))
        cosines, sines = _rows("cosines", cosines, dtype=torch.float32), _rows("sines", sines, dtype=torch.float32)
        for name, table in (("cosines", cosines), ("sines", sines)):
            _same(name, table.shape, (*x.shape[:-2], HALF))
        out = torch.empty_like(x)
        self._call("rope", x, cosines, sines, out, x.numel() // (x.shape[-2] * HEAD_DIM), x.shape[-2])
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., inputs] times the rows of weight [outputs, inputs], plus bias [outputs]: [..., outputs]."""
        x, weight = _rows("x", x), _rows("weight", weight, 2)
        _same("x's last dimension", x.shape[-1:], weight.shape[1:])
        _multiple("x", x.shape[-1])
        if bias is not None:
            bias = _rows("bias", bias, 1)
            _same("bias", bias.shape, weight.shape[:1])
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        self._call("linear", x, weight, bias, out, x.numel() // x.shape[-1], weight.shape[1], weight.shape[0])
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [..., width]."""
        gate, up = _rows("gate", gate), _rows("up", up)
        _same("up", up.shape, gate.shape)
        _multiple("gate", gate.shape[-1])
        out = torch.empty_like(gate)
        width = gate.shape[-1]
        self._call("swiglu", gate, up, out, gate.numel() // width, width, width)
        return out

    def route(self, logits: Tensor, top: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """Experts (int64 [..., top], by descending logit, the lower index first among equals) and their weights (fp32).

        The weights are the softmax over all experts of logits [..., experts]; normalise: divided by the sum of the chosen.
        """
        logits = _rows("logits", logits)
        experts = logits.shape[-1]
        if not 1 <= top <= experts:
            raise UserError(f"top is {top}, not from 1 to the {experts} experts")
        chosen = torch.empty(*logits.shape[:-1], top, dtype=torch.int64)
        weights = torch.empty(*logits.shape[:-1], top, dtype=torch.float32)
        self._call("route", logits, chosen, weights, logits.numel() // experts, experts, top, int(normalise))
        return chosen, weights

    def combine(self, products: Tensor, weights: Tensor) -> Tensor:
        """products [..., top, width] summed with weights (fp32 [..., top]), in the order of the slots: [..., width]."""
        products, weights = _rows("products", products), _rows("weights", weights, dtype=torch.float32)
        _same("weights", weights.shape, products.shape[:-1])
        top, width = products.shape[-2:]
        _multiple("products", width)
        out = products.new_empty(*products.shape[:-2], width)
        self._call("combine", products, weights, out, products.numel() // (top * width), top, width)
        return out

    def cache_write(self, x: Tensor, cache: Tensor, sequence: Tensor, position: Tensor) -> None:
        """cache[sequence[r], :, position[r]] = x[r] for rows x [rows, heads, 128]; no other word of the cache changes.

        cache: bf16 [sequences, heads, capacity, 128], contiguous, in place. sequence, position: int64 [rows]. Nothing is
        written where one is out of range; of equal places the last row's value or any other's may stay.
        """
        x, sequence, position = _rows("x", x, 3), _integers("sequence", sequence), _integers("position", position)
        _check("cache", cache, torch.bfloat16)
        if cache.dim() != 4 or not cache.is_contiguous():
            raise UserError(f"cache {list(cache.shape)} is not a contiguous [sequences, heads, capacity, {HEAD_DIM}]")
        _same("x's heads and head dimension", x.shape[1:], (cache.shape[1], HEAD_DIM))
        _same("cache's head dimension", cache.shape[3:], (HEAD_DIM,))
        for name, index in (("sequence", sequence), ("position", position)):
            _same(name, index.shape, x.shape[:1])
        self._call("cache_write", x, sequence, position, cache, x.shape[0], cache.shape[1], cache.shape[0], cache.shape[2])

    def log_prob(self, logits: Tensor, targets: Tensor) -> Tensor:
        """log softmax of logits [..., vocabulary] at targets (int64 [...]): fp32 [...], natural log."""
        logits, targets = _rows("logits", logits), _integers("targets", targets)
        _same("targets", targets.shape, logits.shape[:-1])
        out = torch.empty(targets.shape, dtype=torch.float32)
        self._call("log_prob", logits, targets, out, targets.numel(), logits.shape[-1])
        return out

    def _call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        raw = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        self.library.call(name, *raw, threads=torch.get_num_threads())


def _check(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """UserError for a tensor that is elsewhere, of another type, or has no element."""
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UserError(f"{name} is on {tensor.device} in layout {tensor.layout}; these operators run on the CPU")
    if tensor.dtype != dtype:
        raise UserError(f"{name} is {tensor.dtype}, not {dtype}")
    if tensor.numel() == 0:
        raise UserError(f"{name} has shape {list(tensor.shape)}: no element")


def _rows(name: str, tensor: Tensor, dims: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A checked tensor without its gradient, contiguous."""
    _check(name, tensor, dtype)
    if tensor.dim() < 1 or (dims is not None and tensor.dim() != dims):
        raise UserError(f"{name} has shape {list(tensor.shape)}, not {dims or 'at least 1'} dimension(s)")
    return tensor.detach().contiguous()


def _integers(name: str, tensor: Tensor) -> Tensor:
    _check(name, tensor, torch.int64)
    return tensor.contiguous()


def _same(name: str, actual: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(actual) != tuple(expected):
        raise UserError(f"{name}: shape {list(actual)} is not {list(expected)}")


def _multiple(name: str, width: int) -> None:
    if width % WIDTH_UNIT:
        raise UserError(f"{name} has {width} columns, not a multiple of {WIDTH_UNIT}")


def operators_config(gpu: str) -> Path:
    """The file that states a target's operators; UserError for a target that is unknown or has none yet."""
    if gpu not in target_names():
        raise UserError(f"unknown target {gpu!r}; known: {', '.join(target_names())}")
    path = EXPERIMENTAL / gpu / "operators.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.parent.name for p in EXPERIMENTAL.glob("*/operators.yaml")))
        raise UserError(
            f"target {gpu} has an attention kernel only: its other operators do not exist yet (they do for: {known})"
        )
    return path


def load_operators(gpu: str, *, source: Path | None = None, role: str = "kernel") -> Operators:
    """Build (or find) a target's operators and load them; role "witness": their literal, scalar twin."""
    target = load_target(gpu, operators_config(gpu))
    built = build(target, source, role=role)
    operators = Operators(built.library, target)
    operators.built = built
    return operators
