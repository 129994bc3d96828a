"""The libraries that a kernel is measured beside, each behind one small interface.

A provider computes causal attention on tensors of the logical shapes q [B,Hq,Sq,128], k/v [B,Hkv,Skv,128] (packed:
[total,H,128]). `layout` says which storage suits the library: "bhsd", or "bshd" where it wants [B,S,H,128] in memory;
the judge stores the inputs that way, so no library pays for a transposition. A *route* is one way of calling it (splits,
tensor cores, programmatic launch); the judge screens all routes of a cell and keeps the fastest.

Providers run in workers, whose memory their outputs live in. Whatever a library raises is reported as the reason why
the route is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import threading
import time
from collections.abc import Callable
from typing import Any

Tensors = dict[str, Any]  # q, k, v, lengths, cu_seqlens
Output = tuple[Any, Any]  # o in the logical shape, LSE or None
HEAD_DIM = 128


def version_of(*packages: str) -> str | None:
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class Provider:
    """What every baseline offers."""

    name = ""
    layout = "bhsd"
    compiles = False  # on first use, which `warm` does ahead

    def available(self) -> tuple[bool, str | None, str | None]:
        """(usable here, reason where not, package and version)."""
        raise NotImplementedError

    def routes(self, entry: str) -> list[str]:
        """Routes for "prefill", "packed", "extend" or "decode", the aligned or default one first."""
        return ["default"]

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        """A function without arguments that enqueues the call on the current stream."""
        raise NotImplementedError

    def warm(self, heads_q: int, heads_kv: int) -> None:
        """Build whatever the library compiles on first use."""


# ---------------------------------------------------------------- FlashAttention


class _FlashAttention(Provider):
    """The two generations share the [B,S,H,D] interface."""

    layout = "bshd"
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._module: Any = None

    def available(self) -> tuple[bool, str | None, str | None]:
        reasons = []
        for name in self.modules:
            try:
                self._module = importlib.import_module(name)
                return True, None, version_of(*self.packages) or name
            except Exception as problem:  # an installed library may fail to load in many ways
                reasons.append(f"{name}: {problem}")
        return False, "; ".join(reasons), None

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        options = self.options(entry, route)
        if entry == "packed":
            function, cu = self._module.flash_attn_varlen_func, tensors["cu_seqlens"]
            return lambda: self.unpack(function(q, k, v, cu, cu, max_seqlen, max_seqlen, causal=True, **options), False)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        function = self._module.flash_attn_func
        return lambda: self.unpack(function(q, k, v, causal=True, **options), True)

    def options(self, entry: str, route: str | None) -> dict[str, Any]:
        return {}

    @staticmethod
    def unpack(result: Any, dense: bool) -> Output:
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        return (out.transpose(1, 2) if dense else out), lse


class FlashAttention3(_FlashAttention):
    """FlashAttention-3, from its own package or a forward-only build of it."""

    name = "fa3"
    modules = ("flash_attn_interface", "fa3_fwd_interface")
    packages = ("flash_attn_3", "flash-attn-3", "fa3-fwd")

    def routes(self, entry: str) -> list[str]:
        return ["num_splits=1", "num_splits=0"] if entry in ("decode", "extend") else ["num_splits=1"]

    def options(self, entry: str, route: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_splits": 0 if route == "num_splits=0" else 1}
        names = inspect.signature(self._module.flash_attn_func).parameters
        if "return_attn_probs" in names:  # asks for the LSE as well; it is computed in any case
            options["return_attn_probs"] = True
        return options


class FlashAttention3Aligned(FlashAttention3):
    """FlashAttention-3 in the bits of its own full-sequence call: without splits, and in decode with a second query, since
    one query alone goes to another kernel. The second query repeats the first, in place or copied within the timed call."""

    name = "fa3_aligned"

    def routes(self, entry: str) -> list[str]:
        return ["two queries", "two queries, copied"] if entry == "decode" else ["num_splits=1"]

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        if entry != "decode":
            return super().prepare(entry, tensors, max_seqlen, route)
        copied, prepare = route == "two queries, copied", super().prepare

        def run() -> Output:
            q = tensors["q"].expand(-1, -1, 2, -1)
            q = q.transpose(1, 2).contiguous().transpose(1, 2) if copied else q
            out, lse = prepare("extend", {**tensors, "q": q}, max_seqlen, None)()
            return out[:, :, 1:], None if lse is None else lse[:, :, 1:]

        return run


class FlashAttention2(_FlashAttention):
    name = "fa2"
    modules = ("flash_attn",)
    packages = ("flash-attn", "flash_attn")


# ---------------------------------------------------------------- torch


class _Sdpa(Provider):
    """torch's scaled_dot_product_attention with one backend."""

    backend = ""

    def routes(self, entry: str) -> list[str]:
        return ["enable_gqa", "expanded"]

    def available(self) -> tuple[bool, str | None, str | None]:
        import torch

        if self.backend != "CPU" and not torch.cuda.is_available():
            return False, "no CUDA device", None
        return True, None, f"torch {torch.__version__}"

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if entry not in ("prefill", "decode"):
            raise ValueError(f"no route for {entry}")
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        causal, backend, grouped = entry == "prefill", getattr(SDPBackend, self.backend), route != "expanded"
        if not grouped:  # ahead of the timed call, to the library's advantage
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))

        def run() -> Output:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped), None

        return run


class SdpaFlash(_Sdpa):
    name, backend = "sdpa_flash", "FLASH_ATTENTION"


class SdpaCudnn(_Sdpa):
    name, backend = "cudnn", "CUDNN_ATTENTION"


class SdpaCpu(_Sdpa):
    """Plain SDPA on the CPU: grouped heads natively, expanded to one KV head a query head, or a decode's group of
    heads as the rows of one call."""

    name, backend = "sdpa_cpu", "CPU"

    def routes(self, entry: str) -> list[str]:
        return ["enable_gqa", "expanded"] + (["group_as_rows"] if entry == "decode" else [])

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        import torch.nn.functional as F

        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        if entry not in ("prefill", "decode"):
            raise ValueError(f"no route for {entry}")
        causal, (batch, heads, rows, dim), heads_kv = entry == "prefill", q.shape, k.shape[1]
        group = heads // heads_kv

        def native() -> Output:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), None

        def expanded() -> Output:
            wide_k, wide_v = (t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
            return F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=causal), None

        def group_as_rows() -> Output:
            out = F.scaled_dot_product_attention(q.reshape(batch, heads_kv, group, dim), k, v)
            return out.reshape(batch, heads, rows, dim), None

        return {"expanded": expanded, "group_as_rows": group_as_rows}.get(route or "", native)


# ---------------------------------------------------------------- FlashInfer


class FlashInfer(Provider):
    """Decode through BatchDecodeWithPagedKVCacheWrapper, pages of 16 keys, planned outside the graph."""

    name = "flashinfer"
    layout = "bshd"
    compiles = True
    PAGE, WORKSPACE_BYTES = 16, 128 << 20
    COMPILE_S = 240.0

    def __init__(self) -> None:
        self._device = "cuda"
        self._module: Any = None
        self._workspace: Any = None
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._broken: dict[str, str] = {}  # route without its launch option -> why

    def available(self) -> tuple[bool, str | None, str | None]:
        import torch

        if not torch.cuda.is_available():
            return False, "no CUDA device", None
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}" + ("a" if major >= 9 else ""))
        try:
            self._module = importlib.import_module("flashinfer")
        except Exception as problem:  # an installed library may fail to load in many ways
            return False, f"flashinfer: {problem}", None
        return True, None, version_of("flashinfer-python", "flashinfer") or "flashinfer"

    def routes(self, entry: str) -> list[str]:
        import torch

        if entry != "decode":
            return []
        routes = ["fa2 tensor_cores pdl", "fa2 tensor_cores", "fa2 cuda_cores pdl", "fa2 cuda_cores"]
        return routes + (["fa3 tensor_cores"] if torch.cuda.get_device_capability()[0] == 9 else [])

    def _plan(self, batch: int, length: int, heads_q: int, heads_kv: int, backend: str, tensor_cores: bool, page: int) -> Any:
        import torch

        key = (batch, length, heads_q, heads_kv, backend, tensor_cores, page)
        if key in self._plans:
            return self._plans[key]
        if self._workspace is None:
            self._workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, kv_layout="NHD", use_tensor_cores=tensor_cores, backend=backend
        )
        pages = length // page
        starts = torch.arange(batch + 1, dtype=torch.int32) * pages
        last = torch.full((batch,), page, dtype=torch.int32)
        indices = torch.arange(batch * pages, dtype=torch.int32, device=self._device)
        wrapper.plan(
            starts, indices, last, heads_q, heads_kv, HEAD_DIM, page, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
        )
        torch.cuda.synchronize()
        while len(self._plans) >= 8:  # captured graphs keep theirs alive themselves
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = wrapper
        return wrapper

    def prepare(self, entry: str, tensors: Tensors, max_seqlen: int, route: str | None) -> Callable[[], Output]:
        import torch

        backend, cores, *rest = (route or "fa2 tensor_cores").split()
        if reason := self._broken.get(f"{backend} {cores}"):
            raise RuntimeError(reason)
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        batch, heads_q, rows, dim = q.shape
        heads_kv, length = k.shape[1], k.shape[2]
        page = self.PAGE if length % self.PAGE == 0 else 1
        wrapper = self._plan(batch, length, heads_q, heads_kv, backend, cores == "tensor_cores", page)
        q = q.reshape(batch, heads_q, dim)
        k, v = (t.transpose(1, 2).view(batch * length // page, page, heads_kv, dim) for t in (k, v))
        out = torch.empty(batch, heads_q, dim, dtype=torch.bfloat16, device=self._device)
        options: dict[str, Any] = {"out": out}
        if "enable_pdl" in inspect.signature(type(wrapper).run).parameters:
            options["enable_pdl"] = "pdl" in rest
        elif "pdl" in rest:
            raise ValueError("this version has no switch for programmatic dependent launch")

        def run() -> Output:
            wrapper.run(q, (k, v), **options)
            return out.view(batch, heads_q, rows, dim), None

        return run

    def warm(self, heads_q: int, heads_kv: int) -> None:
        """Compile the modules of all routes side by side; one that fails or takes too long is not tried again."""
        import torch

        def build(route: str) -> None:
            shape = (1, self.PAGE, heads_kv, HEAD_DIM)
            tensors = {
                name: torch.zeros(shape, dtype=torch.bfloat16, device=self._device).transpose(1, 2) for name in ("k", "v")
            }
            tensors["q"] = torch.zeros(1, heads_q, 1, HEAD_DIM, dtype=torch.bfloat16, device=self._device)
            try:
                self.prepare("decode", tensors, 0, route)()
                self._broken.pop(route, None)
            except Exception as problem:  # whatever a compilation may raise is the route's reason
                self._broken[route] = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]

        routes = [route for route in self.routes("decode") if "pdl" not in route]
        threads = [threading.Thread(target=build, args=(route,), daemon=True) for route in routes]
        deadline = time.monotonic() + self.COMPILE_S
        for thread in threads:
            thread.start()
        for route, thread in zip(routes, threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._broken[route] = f"its compilation took more than {self.COMPILE_S:g} s"
        for route in [route for route in self._broken if not threads[routes.index(route)].is_alive()]:
            del self._broken[route]  # once more, alone: the libraries' own caches are not made for threads
            build(route)
        torch.cuda.synchronize()


class FlashInferStreamOrdered(FlashInfer):
    """FlashInfer without programmatic dependent launch: a call starts when the one before has ended."""

    name = "flashinfer_stream_ordered"

    def routes(self, entry: str) -> list[str]:
        return [route for route in super().routes(entry) if not route.endswith(" pdl")]


_PROVIDERS: dict[str, type[Provider]] = {
    cls.name: cls
    for cls in (
        FlashAttention3,
        FlashAttention3Aligned,
        FlashAttention2,
        SdpaFlash,
        SdpaCudnn,
        SdpaCpu,
        FlashInfer,
        FlashInferStreamOrdered,
    )
}
NAMES = tuple(_PROVIDERS)


def make(name: str) -> Provider:
    return _PROVIDERS[name]()


# ---------------------------------------------------------------- the start-up check

VERIFY_SHAPES = ((1, 1, 32, 8), (2, 129, 12, 2), (1, 777, 64, 4), (1, 1500, 8, 8), (2, 513, 5, 1))  # batch, rows, heads


def verify_library(kernel: Any, target: Any) -> dict[str, Any]:
    """Prove on this machine that the contract's library has a loaded kernel's bits, full-sequence and decoded.

    kernel: a tools.loader.interface.Kernel. Returns {"library", "version", "shapes", "words"}; UserError where the
    library is missing, not named by the contract, or differs in a single word.
    """
    import torch

    from tools.core.errors import UserError
    from tools.evaluator.compare import words_differ

    name = target.config["contract"].get("library")
    if name is None:
        raise UserError(f"the contract {target.config['contract']['name']} names no library to compare with")
    provider = make(name)
    available, reason, version = provider.available()
    if not available:
        raise UserError(f"{name} is not available: {reason}")
    device, words = target.config["target"]["device"], 0
    generator = torch.Generator(device=device).manual_seed(1)
    for batch, rows, heads_q, heads_kv in VERIFY_SHAPES:

        def draw(heads: int, batch: int = batch, rows: int = rows) -> Any:
            values = torch.randn(batch, rows, heads, HEAD_DIM, generator=generator, device=device)
            return values.to(torch.bfloat16).transpose(1, 2)

        q, k, v = draw(heads_q), draw(heads_kv), draw(heads_kv)
        expected, _ = provider.prepare("prefill", {"q": q, "k": k, "v": v}, rows, None)()
        ours = kernel.unified_prefill(q, k, v, heads_q, heads_kv)
        pairs = [("prefill", ours, expected)]
        for length in sorted({1, rows, rows // 2 + 1}):
            row = slice(length - 1, length)
            got = kernel.unified_decode(q[:, :, row], k[:, :, :length], v[:, :, :length], heads_q, heads_kv)
            pairs.append((f"decode over {length} keys", got, expected[:, :, row]))
        for what, got, want in pairs:
            found = words_differ(got, want)
            words += found.words
            if found.differing:
                shape = f"B{batch} S{rows} heads {heads_q}/{heads_kv}"
                raise UserError(
                    f"{name} ({version}) differs from {what} in {found.differing} of {found.words} words at {shape}"
                )
    return {"library": name, "version": version, "shapes": len(VERIFY_SHAPES), "words": words}
