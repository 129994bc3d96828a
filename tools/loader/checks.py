"""Checks of the tensors of one call, in the order device, dtype, layout, shape; every message names the value.

Raises UserError; returns nothing but facts. See tools/loader/interface.py for the shapes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tools.core.errors import UserError
from tools.loader.abi import HEAD_DIM

ALIGNMENT = 16  # bytes of addresses and of every stride but the innermost
MAX_GROUP = 16  # query heads for each KV head
MAX_COUNT = 2**31 - 1  # rows of a tensor, batch, length


def describe(tensor: torch.Tensor) -> str:
    """A tensor's shape as messages print it."""
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def check_device(tensors: dict[str, Any], device: torch.device) -> torch.device:
    """All are strided tensors on one device of the kernel's kind; returns that device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UserError(f"{name} is a {type(tensor).__name__}, not a plain tensor")
    first: torch.device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            raise UserError(f"{name} is on {tensor.device}, this kernel runs on {device}")
        if tensor.device != first:
            raise UserError(f"{name} is on {tensor.device}, {next(iter(tensors))} on {first}")
        if tensor.layout != torch.strided:
            raise UserError(f"{name} has layout {tensor.layout}, not {torch.strided}")
    return first


def check_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """All have one dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise UserError(f"{name} is {tensor.dtype}, not {dtype}")


def check_rows(tensors: dict[str, torch.Tensor], row_dim: int) -> None:
    """Rows of consecutive elements at 16-byte addresses that do not overlap their neighbours.

    `row_dim` is the dimension that counts rows of a head (-2 dense, 0 packed); strides of the others may be anything
    that keeps the alignment, 0 included.
    """
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise UserError(f"{name} is a scalar")
        strides, sizes = tensor.stride(), tensor.shape
        if strides[-1] != 1 and sizes[-1] != 1:
            raise UserError(f"{name} has innermost stride {strides[-1]}, not 1")
        if tensor.data_ptr() % ALIGNMENT:
            raise UserError(f"{name} starts at address {tensor.data_ptr():#x}, not a multiple of {ALIGNMENT} bytes")
        unit = ALIGNMENT // tensor.element_size()
        for dim in range(tensor.dim() - 1):
            if sizes[dim] > 1 and strides[dim] % unit:
                raise UserError(f"{name} has stride {strides[dim]} in dimension {dim}, not a multiple of {unit} elements")
        if tensor.dim() >= abs(row_dim) and sizes[row_dim] > 1 and strides[row_dim] < sizes[-1]:
            raise UserError(f"{name} has row stride {strides[row_dim]}, less than a row of {sizes[-1]} elements")


def check_output(name: str, tensor: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """An output's elements share no memory with one another or with the range of an input."""
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                raise UserError(f"{name} has strides {tuple(tensor.stride())}: its own elements overlap")
            reached += stride * (size - 1)
    start, end = _extent(tensor)
    for other_name, other in inputs.items():
        other_start, other_end = _extent(other)
        if start < other_end and other_start < end:
            raise UserError(f"{name} overlaps the memory of {other_name}")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of the memory that a tensor spans."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """A vector of consecutive elements."""
    if tensor.dim() == 1 and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise UserError(f"{name} has stride {tensor.stride(0)}, not 1")


def check_heads(heads_q: Any, heads_kv: Any) -> None:
    """H_Q and H_KV are counts, and H_Q / H_KV is a whole number up to 16."""
    for name, value in (("H_Q", heads_q), ("H_KV", heads_kv)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r}, not a whole number >= 1")
    if heads_q % heads_kv or heads_q // heads_kv > MAX_GROUP:
        raise UserError(f"H_Q / H_KV is {heads_q} / {heads_kv}, not a whole number from 1 to {MAX_GROUP}")


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads_q: int, heads_kv: int) -> None:
    """q [B, H_Q, Sq, 128], k and v [B, H_KV, Skv, 128], nothing empty, nothing past the limits."""
    _check_ranks({"q": q, "k": k, "v": v}, 4, "[batch, heads, length, 128]")
    check_heads(heads_q, heads_kv)
    _check_size("q", q, 1, heads_q, "H_Q")
    _check_size("k", k, 1, heads_kv, "H_KV")
    if k.shape[0] != q.shape[0]:
        raise UserError(f"k {describe(k)} has batch {k.shape[0]}, q {describe(q)} has {q.shape[0]}")
    if v.shape != k.shape:
        raise UserError(f"v {describe(v)} differs from k {describe(k)}")


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads_q: int, heads_kv: int) -> None:
    """q [total, H_Q, 128], k and v [total, H_KV, 128]."""
    _check_ranks({"q": q, "k": k, "v": v}, 3, "[total, heads, 128]")
    check_heads(heads_q, heads_kv)
    _check_size("q", q, 1, heads_q, "H_Q")
    _check_size("k", k, 1, heads_kv, "H_KV")
    if k.shape[0] != q.shape[0]:
        raise UserError(f"k {describe(k)} has {k.shape[0]} rows, q {describe(q)} has {q.shape[0]}")
    if v.shape != k.shape:
        raise UserError(f"v {describe(v)} differs from k {describe(k)}")


def _check_ranks(tensors: dict[str, torch.Tensor], rank: int, form: str) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise UserError(f"{name} {describe(tensor)} has {tensor.dim()} dimensions, not {rank}: {form}")
        if tensor.shape[-1] != HEAD_DIM:
            raise UserError(f"{name} {describe(tensor)} has head dimension {tensor.shape[-1]}, not {HEAD_DIM}")
        for dim, size in enumerate(tensor.shape):
            if size < 1:
                raise UserError(f"{name} {describe(tensor)} is empty in dimension {dim}")
        rows = tensor.numel() // HEAD_DIM
        if rows > MAX_COUNT:
            raise UserError(f"{name} {describe(tensor)} has {rows} rows, more than {MAX_COUNT}")


def _check_size(name: str, tensor: torch.Tensor, dim: int, size: int, what: str) -> None:
    if tensor.shape[dim] != size:
        raise UserError(f"{name} {describe(tensor)} has {tensor.shape[dim]} heads, {what} is {size}")


def check_vector(name: str, tensor: torch.Tensor, size: int | None) -> None:
    """A vector, of a given number of elements where that is known."""
    if tensor.dim() != 1 or (size is not None and tensor.shape[0] != size):
        raise UserError(f"{name} has shape {describe(tensor)}, not [{'n + 1' if size is None else size}]")


def check_grad(tensors: dict[str, torch.Tensor]) -> None:
    """None asks for a gradient in grad mode: the kernels are forward-only."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise UserError(f"{name} requires grad: there is no backward pass; call under torch.no_grad() or detach it")


def check_offsets(offsets: list[int], total: int) -> int:
    """Offsets of packed sequences on the host: from 0 up to the total, never falling; returns the longest length."""
    if offsets[0] != 0 or offsets[-1] != total:
        raise UserError(f"cu_seqlens runs from {offsets[0]} to {offsets[-1]}, not from 0 to the total of {total} rows")
    lengths = [after - before for before, after in itertools.pairwise(offsets)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise UserError(f"cu_seqlens falls from {offsets[index]} to {offsets[index + 1]} at sequence {index}")
    return max(lengths)
