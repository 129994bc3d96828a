"""The Python interface of a kernel library: checked tensors in, raw calls out.

    kernel = load_kernel("h200")
    o = kernel.unified_prefill(q, k, v, H_Q, H_KV)             # whole sequences, causal
    o = kernel.unified_extend(q, k, v, H_Q, H_KV)              # the last Sq queries of Skv keys
    o = kernel.unified_decode(q, k, v, H_Q, H_KV)              # one query over all keys
    o, lse = kernel.unified_prefill(q, k, v, H_Q, H_KV, return_lse=True)

Dense: q [B, H_Q, Sq, 128], k and v [B, H_KV, Skv, 128], bf16. Any strides of batch, head and row (0 where batch or heads
are expanded), innermost stride 1, addresses and strides multiples of 16 bytes. k and v may be views of a larger cache;
`lengths`, int32 [B] on the device, then gives each sequence's keys (clamped to Skv). Packed prefill: q [total, H_Q, 128],
k and v [total, H_KV, 128], cu_seqlens int32 [n + 1] on the device. The output has q's shape, the LSE is fp32 natural log,
[B, H_Q, Sq] or [H_Q, total].

Calls run on the tensors' device and its current stream, can be captured in a CUDA graph and never wait for the device,
with one exception: packed prefill without max_seqlen reads cu_seqlens. Forward only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tools.core.config import Target, load_target
from tools.core.errors import UserError
from tools.loader import checks
from tools.loader.abi import DECODE, EXTEND, HEAD_DIM, PREFILL, Library, Params
from tools.loader.build import Built, build
from tools.loader.device import check_machine, resolve_device

Tensor = torch.Tensor
Result = Tensor | tuple[Tensor, Tensor]
MAX_KNOWN = 4096  # remembered forms; a ragged prefill has a new one for every length


class Kernel:
    """One loaded kernel library with the three entry points of a target."""

    def __init__(self, library: Path, target: Target, device: torch.device | str | None = None) -> None:
        """Load a library into this process. `device` without an index accepts tensors on any device of that type."""
        self.target = target
        self.device = torch.device(device if device is not None else target.config["target"]["device"])
        self.library = Library(library)
        self.built: Built | None = None
        self._known: dict[Any, bytes] = {}  # forms of calls that passed every check -> their Params without addresses

    def unified_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, H_Q: int, H_KV: int, *, return_lse: bool = False,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Whole sequences, dense (Sq = Skv) or packed (cu_seqlens); query i sees keys 0 .. i of its sequence.

        max_seqlen is the longest packed sequence; without it cu_seqlens is read (and checked), which no graph capture
        allows. Offsets that are not read are the caller's promise: from 0 to total, never falling, no sequence
        longer than max_seqlen. Rows that break it are not written.
        """
        if cu_seqlens is None:
            if max_seqlen is not None:
                raise UserError(f"max_seqlen is {max_seqlen!r} without cu_seqlens")
            return self._dense(PREFILL, q, k, v, H_Q, H_KV, None, return_lse, out, lse)
        return self._packed(q, k, v, H_Q, H_KV, cu_seqlens, max_seqlen, return_lse, out, lse)

    def unified_extend(
        self, q: Tensor, k: Tensor, v: Tensor, H_Q: int, H_KV: int, *, lengths: Tensor | None = None,
        return_lse: bool = False, out: Tensor | None = None, lse: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """The last Sq queries of sequences of n keys (Skv, or lengths[b]); query i sees keys 0 .. n - Sq + i.

        A query that sees no key (lengths[b] < Sq) gives zeros, LSE -inf.
        """
        return self._dense(EXTEND, q, k, v, H_Q, H_KV, lengths, return_lse, out, lse)

    def unified_decode(
        self, q: Tensor, k: Tensor, v: Tensor, H_Q: int, H_KV: int, *, lengths: Tensor | None = None,
        return_lse: bool = False, out: Tensor | None = None, lse: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """One query (Sq = 1) of each sequence over all its n keys (Skv, or lengths[b])."""
        return self._dense(DECODE, q, k, v, H_Q, H_KV, lengths, return_lse, out, lse)

    def _dense(
        self, entry: int, q: Tensor, k: Tensor, v: Tensor, heads_q: int, heads_kv: int, lengths: Tensor | None,
        return_lse: bool, out: Tensor | None, lse: Tensor | None,
    ) -> Result:  # fmt: skip
        """A call whose form (types, shapes, strides, devices) was checked before skips to what can still change:
        addresses and requires_grad."""
        form = _form((entry, heads_q, heads_kv, return_lse), (q, k, v, lengths, out, lse))
        known = None if form is None else self._known.get(form)
        if known is not None and not any(t.data_ptr() % checks.ALIGNMENT for t in (q, k, v, out) if t is not None):
            device = q.device
        else:
            device = self._check_common(q, k, v, {"lengths": lengths}, return_lse, out, lse, row_dim=-2)
            self._check_dense(entry, q, k, v, heads_q, heads_kv, lengths)
            known = None
        checks.check_grad({"q": q, "k": k, "v": v})
        out, lse = _outputs(q, (q.shape[0], heads_q, q.shape[2]), return_lse, out, lse, (k, v, lengths))
        if known is not None:
            params = Params.from_buffer_copy(known)
        else:
            params = Params(batch=q.shape[0], heads_q=heads_q, heads_kv=heads_kv, seqlen_q=q.shape[2], seqlen_kv=k.shape[2])
            for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
                _set_strides(params, name, tensor, (0, 1, 2))
            if lse is not None:
                params.lse_stride[:] = lse.stride()[:2]
            if form is not None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[form] = bytes(params)
        params.q, params.k, params.v, params.o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        params.lse, params.lengths = _address(lse), _address(lengths)
        self._launch(entry, params, device)
        return out if lse is None else (out, lse)

    @staticmethod
    def _check_dense(
        entry: int, q: Tensor, k: Tensor, v: Tensor, heads_q: int, heads_kv: int, lengths: Tensor | None
    ) -> None:  # fmt: skip
        """Shapes of a dense call."""
        checks.check_dense(q, k, v, heads_q, heads_kv)
        queries, keys = q.shape[2], k.shape[2]
        if entry == PREFILL and queries != keys:
            raise UserError(f"prefill needs as many queries as keys: q {checks.describe(q)}, k {checks.describe(k)}")
        if entry == DECODE and queries != 1:
            raise UserError(f"decode takes one query, q {checks.describe(q)} has {queries}")
        if queries > keys:
            raise UserError(f"q {checks.describe(q)} has {queries} queries, more than the {keys} keys of k")
        if lengths is not None:
            checks.check_vector("lengths", lengths, q.shape[0])

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, heads_q: int, heads_kv: int, cu_seqlens: Tensor, max_seqlen: int | None,
        return_lse: bool, out: Tensor | None, lse: Tensor | None,
    ) -> Result:  # fmt: skip
        device = self._check_common(q, k, v, {"cu_seqlens": cu_seqlens}, return_lse, out, lse, row_dim=0)
        checks.check_packed(q, k, v, heads_q, heads_kv)
        checks.check_vector("cu_seqlens", cu_seqlens, None)
        if cu_seqlens.shape[0] < 2:
            raise UserError(f"cu_seqlens has shape {checks.describe(cu_seqlens)}: no sequence")
        total = q.shape[0]
        if max_seqlen is not None and (not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool)):
            raise UserError(f"max_seqlen is {max_seqlen!r}, not a whole number")
        if max_seqlen is not None and not 1 <= max_seqlen <= total:
            raise UserError(f"max_seqlen is {max_seqlen}, not from 1 to the total of {total} rows")
        if max_seqlen is None or device.type == "cpu":
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UserError("max_seqlen is needed while a graph is captured: cu_seqlens cannot be read then")
            longest = checks.check_offsets(cu_seqlens.tolist(), total)
            if max_seqlen is not None and longest > max_seqlen:
                raise UserError(f"max_seqlen is {max_seqlen}, the longest sequence has {longest} rows")
            max_seqlen = longest
        checks.check_grad({"q": q, "k": k, "v": v})
        out, lse = _outputs(q, (heads_q, total), return_lse, out, lse, (k, v, cu_seqlens))
        params = Params(
            batch=cu_seqlens.shape[0] - 1, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=max_seqlen, seqlen_kv=max_seqlen,
            cu_seqlens=_address(cu_seqlens),
        )  # fmt: skip
        for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
            setattr(params, name, tensor.data_ptr())
            _set_strides(params, name, tensor, (None, 1, 0))
        if lse is not None:
            params.lse, params.lse_stride[1] = lse.data_ptr(), lse.stride(0)
        self._launch(PREFILL, params, device)
        return out if lse is None else (out, lse)

    def _check_common(
        self, q: Tensor, k: Tensor, v: Tensor, vectors: dict[str, Tensor | None], return_lse: bool, out: Tensor | None,
        lse: Tensor | None, row_dim: int,
    ) -> torch.device:  # fmt: skip
        """Device, dtype and layout of everything that was passed; returns the tensors' device."""
        if lse is not None and not return_lse:
            raise UserError("lse is given without return_lse=True")
        rows = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        present = {name: tensor for name, tensor in vectors.items() if tensor is not None}
        floats = {} if lse is None else {"lse": lse}
        device = checks.check_device({**rows, **floats, **present}, self.device)
        checks.check_dtype(rows, torch.bfloat16)
        checks.check_dtype(floats, torch.float32)
        checks.check_dtype(present, torch.int32)
        checks.check_rows(rows, row_dim)
        for name, tensor in present.items():
            checks.check_contiguous(name, tensor)
        if lse is not None and lse.dim() and lse.shape[-1] > 1 and lse.stride(-1) != 1:
            raise UserError(f"lse has innermost stride {lse.stride(-1)}, not 1")
        return device

    def _launch(self, entry: int, params: Params, device: torch.device) -> None:
        """Enqueue one call with a workspace of torch's allocator, which is kept apart for each device, stream and graph."""
        if device.type == "cpu":
            params.num_threads = torch.get_num_threads()
            self._call(entry, params, device, None)
        else:
            with torch.cuda.device(device):
                self._call(entry, params, device, torch.cuda.current_stream(device).cuda_stream)

    def _call(self, entry: int, params: Params, device: torch.device, stream: int | None) -> None:
        size = self.library.workspace_bytes(entry, params)
        # Freed on return, which is safe: the allocator hands the memory only to later work of the same stream.
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        params.workspace = _address(workspace)
        self.library.call(entry, params, stream)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _form(numbers: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
    """What the checks of a dense call depend on, addresses and requires_grad aside; None where that has no hash."""
    try:
        form = (
            *((type(number), number) for number in numbers),  # 8, 8.0 and True are equal, not the same
            *(None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.layout) for t in tensors),
        )
        hash(form)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return form


def _set_strides(params: Params, name: str, tensor: Tensor, dims: tuple[int | None, int, int]) -> None:
    """A tensor's batch, head and row strides. A dimension of one element has no meaningful stride and gets the head
    dimension, an aligned one."""
    sizes, strides = tensor.shape, tensor.stride()
    getattr(params, f"{name}_stride")[:] = [0 if dim is None else HEAD_DIM if sizes[dim] == 1 else strides[dim] for dim in dims]


def _outputs(
    q: Tensor, lse_shape: tuple[int, ...], return_lse: bool, out: Tensor | None, lse: Tensor | None,
    others: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output and LSE tensors: those passed, checked, or new ones."""
    names = ("k", "v", "lengths/cu_seqlens")
    inputs = {"q": q} | {name: tensor for name, tensor in zip(names, others, strict=True) if tensor is not None}
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        if out.shape != q.shape:
            raise UserError(f"out {checks.describe(out)} differs from q {checks.describe(q)}")
        checks.check_output("out", out, inputs)
        checks.check_grad({"out": out})
    if lse is None:
        return out, torch.empty(lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if tuple(lse.shape) != lse_shape:
        raise UserError(f"lse has shape {checks.describe(lse)}, not {list(lse_shape)}")
    checks.check_output("lse", lse, {**inputs, "out": out})
    checks.check_grad({"lse": lse})
    return out, lse


def load_kernel(
    gpu: str | None, *, source: Path | str | None = None, config: Path | str | None = None,
    device: torch.device | str | None = None, allow_compat: bool = False, verify_library: bool = False,
    verbose: bool = False,
) -> Kernel:  # fmt: skip
    """Check the machine, build (or find) a target's kernel and load it.

    gpu            a target's name (a folder under experimental/); None: the one of `config`
    source         a candidate in place of the config's source
    device         tensors' device; without an index any device of the target's type
    allow_compat   accept another GPU that can run the target's code
    verify_library prove on this machine that the contract's library (FlashAttention-3 on Hopper) has the same bits
    """
    target = load_target(gpu, Path(config) if config is not None else None)
    where = resolve_device(target, device)
    note = check_machine(target, where, allow_compat=allow_compat)
    if note and verbose:
        print(f"note      {note}", file=sys.stderr)
    built = build(target, Path(source) if source is not None else None, verbose=verbose)
    kernel = Kernel(built.library, target, where)
    kernel.built = built
    if verify_library:
        from tools.evaluator import providers

        providers.verify_library(kernel, target)
    return kernel
