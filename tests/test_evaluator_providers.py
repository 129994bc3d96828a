"""The baselines' providers: layouts and arguments, with stand-ins for libraries that need a GPU, and torch's own."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.core.errors import UserError
from tools.evaluator import providers
from tools.evaluator.baselines import Baselines
from tools.evaluator.runner import Stop, WorkerFailure


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of the last rows, in fp32."""
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True)


def inputs(rows: int, keys: int, layout: str) -> dict[str, Any]:
    def made(heads: int, length: int) -> Any:
        shape = (2, heads, length, 128) if layout == "bhsd" else (2, length, heads, 128)
        tensor = torch.randn(shape).bfloat16()
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    return {"q": made(6, rows), "k": made(2, keys), "v": made(2, keys), "lengths": None, "cu_seqlens": None}


def close(got: Any, want: Any) -> bool:
    return got.shape == want.shape and torch.allclose(got.float(), want, atol=2e-2)


@pytest.mark.parametrize(("entry", "rows"), [("prefill", 48), ("decode", 1)])
def test_torch_on_the_cpu(entry: str, rows: int) -> None:
    provider = providers.make("sdpa_cpu")
    assert provider.available()[0]
    tensors = inputs(rows, 48, "bhsd")
    for route in provider.routes(entry):
        out, lse = provider.prepare(entry, tensors, 0, route)()
        assert close(out, attention(tensors["q"], tensors["k"], tensors["v"])) and lse is None, route


def fake_flash_attention() -> Any:
    """A module with FlashAttention-3's interface: [B,S,H,D], last rows causal, (out, lse) on request."""

    def flash_attn_func(
        q: Any, k: Any, v: Any, causal: bool = False, num_splits: int = 1, return_attn_probs: bool = False
    ) -> Any:
        assert causal and q.is_contiguous() and k.is_contiguous() and num_splits in (0, 1)
        out = attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).bfloat16()
        lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        return (out, lse) if return_attn_probs else out

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool = False, num_splits: int = 1,
        return_attn_probs: bool = False,
    ) -> Any:  # fmt: skip
        assert causal and max_q == max_k == int((cu_q[1:] - cu_q[:-1]).max())
        parts = [
            attention(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)))[0].transpose(0, 1)
            for a, b in itertools.pairwise(cu_q)
        ]
        return torch.cat(parts).bfloat16(), torch.zeros(q.shape[1], q.shape[0])

    return types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


def test_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = providers.make("fa3")
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: fake_flash_attention())
    assert provider.available()[0] and provider.layout == "bshd"
    for entry, rows in (("prefill", 40), ("extend", 7), ("decode", 1)):
        tensors = inputs(rows, 40, "bshd")
        for route in provider.routes(entry):
            out, lse = provider.prepare(entry, tensors, 0, route)()
            assert close(out, attention(tensors["q"], tensors["k"], tensors["v"]))
            assert lse.shape == (2, 6, rows)
    q, k, v = (torch.randn(50, heads, 128).bfloat16() for heads in (6, 2, 2))
    starts = torch.tensor([0, 1, 20, 50], dtype=torch.int32)
    out, lse = provider.prepare("packed", {"q": q, "k": k, "v": v, "cu_seqlens": starts}, 30, None)()
    assert out.shape == q.shape and lse.shape == (6, 50)
    assert close(out[20:].transpose(0, 1)[None], attention(*(t[20:].transpose(0, 1)[None] for t in (q, k, v))))


def test_the_aligned_peer_never_sees_a_single_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """In decode a second query, in extend no splits: single queries and splits go to kernels with other bits."""
    library, rows_seen, splits = fake_flash_attention(), [], []
    call = library.flash_attn_func

    def watched(q: Any, k: Any, v: Any, causal: bool = False, num_splits: int = 1, return_attn_probs: bool = False) -> Any:
        rows_seen.append(q.shape[1])
        splits.append(num_splits)
        return call(q.contiguous(), k, v, causal=causal, num_splits=num_splits, return_attn_probs=return_attn_probs)

    library.flash_attn_func = watched
    provider = providers.make("fa3_aligned")
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: library)
    assert provider.available()[0] and provider.layout == "bshd"
    for entry, rows, seen in (("decode", 1, 2), ("extend", 7, 7), ("prefill", 40, 40)):
        for route in provider.routes(entry):
            tensors = inputs(rows, 40, "bshd")
            out, lse = provider.prepare(entry, tensors, 0, route)()
            assert close(out, attention(tensors["q"], tensors["k"], tensors["v"])), (entry, route)
            assert lse.shape == (2, 6, rows) and rows_seen[-1] == seen and splits[-1] == 1


def test_missing_library_gives_a_reason() -> None:
    available, reason, version = providers.make("fa3").available()
    assert not available and reason and "flash_attn_interface" in reason and version is None


class FakeWrapper:
    """BatchDecodeWithPagedKVCacheWrapper on the CPU: gathers the pages that it was planned for."""

    def __init__(self, workspace: Any, kv_layout: str, use_tensor_cores: bool, backend: str) -> None:
        assert kv_layout == "NHD" and workspace.numel() and backend in ("fa2", "fa3")

    def plan(
        self, starts: Any, indices: Any, last: Any, heads_q: int, heads_kv: int, dim: int, page: int, **types: Any
    ) -> None:
        assert (heads_q, heads_kv, dim) == (6, 2, 128) and types["q_data_type"] == torch.bfloat16
        self.starts, self.indices, self.last, self.page = starts, indices, last, page

    def run(self, q: Any, cache: Any, *, out: Any = None, enable_pdl: bool | None = None) -> Any:
        assert enable_pdl is not None
        for b in range(q.shape[0]):
            pages = self.indices[self.starts[b] : self.starts[b + 1]].long()
            k, v = (c[pages].reshape(-1, 2, 128).transpose(0, 1)[None] for c in cache)
            keys = (len(pages) - 1) * self.page + int(self.last[b])
            out[b] = attention(q[b][None, :, None], k[:, :, :keys], v[:, :, :keys])[0, :, 0]
        return out


def test_flashinfer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    provider: Any = providers.make("flashinfer")
    monkeypatch.setattr(provider, "_device", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    provider._module = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    for keys in (48, 37):  # whole pages of 16, and pages of 1
        tensors = inputs(1, keys, "bshd")
        for route in provider.routes("decode"):
            out, _ = provider.prepare("decode", tensors, 0, route)()
            assert close(out, attention(tensors["q"], tensors["k"], tensors["v"])), route
    provider.warm(6, 2)
    assert provider._broken == {}
    provider._module = types.SimpleNamespace()
    provider._plans.clear()
    provider.warm(6, 2)
    with pytest.raises(RuntimeError, match="AttributeError"):
        provider.prepare("decode", inputs(1, 48, "bshd"), 0, "fa2 tensor_cores pdl")
    assert provider.routes("prefill") == []
    ordered: Any = providers.make("flashinfer_stream_ordered")
    assert [route for route in provider.routes("decode") if "pdl" not in route] == ordered.routes("decode") != []


# ---------------------------------------------------------------- the start-up check


class Reference:
    """A kernel whose bits are the stand-in library's, but for one word where `wrong` is set."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def unified_prefill(self, q: Any, k: Any, v: Any, heads_q: int, heads_kv: int) -> Any:
        return self._changed(attention(q, k, v).bfloat16(), "prefill")

    def unified_decode(self, q: Any, k: Any, v: Any, heads_q: int, heads_kv: int) -> Any:
        whole = torch.zeros(q.shape[0], heads_q, k.shape[2], 128, dtype=q.dtype)
        whole[:, :, -1:] = q
        return self._changed(attention(whole, k, v)[:, :, -1:].bfloat16(), "decode")

    def _changed(self, out: Any, what: str) -> Any:
        if self.wrong == what:
            out.view(torch.int16)[0, 0, 0, 0] ^= 1
        return out


def test_verify_library(monkeypatch: pytest.MonkeyPatch) -> None:
    target = types.SimpleNamespace(config={"contract": {"name": "c", "library": "fa3"}, "target": {"device": "cpu"}})
    with pytest.raises(UserError, match="not available"):
        providers.verify_library(Reference(), target)
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: fake_flash_attention())
    monkeypatch.setattr(providers, "VERIFY_SHAPES", ((1, 1, 6, 2), (2, 9, 4, 2)))
    for wrong in ("prefill", "decode"):
        with pytest.raises(UserError, match=wrong):
            providers.verify_library(Reference(wrong), target)
    monkeypatch.setattr(providers, "VERIFY_SHAPES", ((3, 1, 6, 2),))
    assert providers.verify_library(Reference(), target)["words"] == 2 * 3 * 6 * 128
    with pytest.raises(UserError, match="names no library"):
        providers.verify_library(Reference(), types.SimpleNamespace(config={"contract": {"name": "c"}}))


# ---------------------------------------------------------------- which baselines a run wants


class Stub:
    """A runner whose provider is, or is not, there."""

    def __init__(self, available: bool, dies: bool = False) -> None:
        self.available, self.dies, self.killed = available, dies, False

    def settle(self, cmd: str, timeout_s: float) -> dict[str, Any]:
        return {}

    def load_provider(self, name: str) -> dict[str, Any]:
        if self.dies:
            raise WorkerFailure("RUNTIME_ERROR", name, "died from signal SIGSEGV")
        return {
            "available": self.available,
            "reason": None if self.available else "no GPU",
            "version": "1",
            "layout": "bhsd",
            "compiles": False,
        }

    def request(self, cmd: str, **arguments: Any) -> dict[str, Any]:
        return {"routes": ["default"]}

    def kill(self) -> None:
        self.killed = True

    def alive(self) -> bool:
        return not self.killed


def test_baselines_of_a_run() -> None:
    config = {"baselines": {"full": ["a", "b"], "decode": ["c", "b"], "quick": ["b"]}, "contract": {"library": "b"}}
    config["workloads"] = {
        "prefill": {"batch": [1], "seqlen": [8]},
        "extend": {"batch": [1], "context": [8], "new": 2},
        "decode": {"batch": [1], "context": [8]},
    }
    target: Any = types.SimpleNamespace(config=config)
    assert Baselines(target, "full", (), {}).wanted(True) == ["a", "b", "c"]
    assert Baselines(target, "quick", ("c",), {}).wanted(True) == ["b", "c"]
    assert Baselines(target, "full", ("a",), {}).wanted(False) == ["a", "b"]
    baselines = Baselines(target, "full", (), {})
    for name, stub in (("a", Stub(False)), ("b", Stub(True)), ("c", Stub(True, dies=True))):
        baselines.add(name, stub)  # type: ignore[arg-type]
    baselines.load((32, 8))
    assert [racer.name for racer in baselines.racers()] == ["b"]
    assert baselines.records["a"]["reason"] == "no GPU" and "SIGSEGV" in baselines.records["c"]["reason"]
    assert list(baselines.references()) == ["full:b", "decode:b"]
    assert set(baselines.records["b"]["routes"]) == {"prefill", "extend", "decode"}
    strict = Baselines(target, "full", ("a",), {})
    strict.add("a", Stub(False))  # type: ignore[arg-type]
    with pytest.raises(Stop, match="required baseline a"):
        strict.load((32, 8))
