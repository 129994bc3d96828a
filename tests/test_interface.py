"""The Python interface on the CPU kernel: layouts never change bits, and bad tensors are named in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.core.config import load_target
from tools.core.errors import KernelError, UserError
from tools.load_kernel import load_kernel
from tools.loader import interface
from tools.loader.abi import PREFILL, Params

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernel() -> interface.Kernel:
    return load_kernel("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last Sq queries and its LSE, in fp64."""
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(128)
    queries, keys = scores.shape[-2:]
    scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -math.inf)
    return scores.softmax(-1) @ v.double().repeat_interleave(group, 1), scores.logsumexp(-1)


def test_entries_are_right_and_agree(kernel: interface.Kernel) -> None:
    q, k, v = rand(2, 6, 150, 128), rand(2, 2, 150, 128, seed=1), rand(2, 2, 150, 128, seed=2)
    out, lse = kernel.unified_prefill(q, k, v, 6, 2, return_lse=True)
    expected, expected_lse = reference(q, k, v)
    assert (out.double() - expected).abs().max() < 0.02
    assert (lse.double() - expected_lse).abs().max() < 1e-3
    assert lse.dtype == torch.float32 and lse.shape == (2, 6, 150)
    extended, extended_lse = kernel.unified_extend(q[:, :, 100:].clone(), k, v, 6, 2, return_lse=True)
    assert same(extended, out[:, :, 100:])
    assert torch.equal(extended_lse, lse[:, :, 100:])
    assert same(kernel.unified_decode(q[:, :, 149:].clone(), k, v, 6, 2), out[:, :, 149:])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 4), (4, 1), (16, 1), (6, 2)]),
    st.integers(1, 40),
    st.integers(0, 140),
    st.data(),
)
def test_layout_never_changes_bits(
    kernel: interface.Kernel, batch: int, heads: tuple[int, int], queries: int, before: int, data: st.DataObject
) -> None:
    heads_q, heads_kv = heads
    keys = queries + before
    q, k, v = (
        rand(batch, heads_q, queries, 128),
        rand(batch, heads_kv, keys, 128, seed=1),
        rand(batch, heads_kv, keys, 128, seed=2),
    )
    expected = kernel.unified_extend(q, k, v, heads_q, heads_kv)
    order = data.draw(st.permutations([0, 1, 2]))
    room = data.draw(st.integers(0, 3))

    def relaid(tensor: torch.Tensor) -> torch.Tensor:
        sizes = [tensor.shape[dim] + room for dim in order] + [128 + 8 * room]
        big = torch.full(sizes, math.nan, dtype=BF16)
        view = big.permute(*[order.index(dim) for dim in range(3)], 3)[
            : tensor.shape[0], : tensor.shape[1], : tensor.shape[2], :128
        ]
        return view.copy_(tensor)

    out = relaid(torch.zeros_like(q))
    result = kernel.unified_extend(relaid(q), relaid(k), relaid(v), heads_q, heads_kv, out=out)
    assert result is out
    assert same(out, expected)


def test_expanded_keys_and_values(kernel: interface.Kernel) -> None:
    q, k, v = rand(3, 4, 1, 128), rand(1, 1, 70, 128, seed=1), rand(1, 1, 70, 128, seed=2)
    wide = (3, 2, 70, 128)
    expected = kernel.unified_decode(q, k.expand(wide).contiguous(), v.expand(wide).contiguous(), 4, 2)
    assert same(kernel.unified_decode(q, k.expand(wide), v.expand(wide), 4, 2), expected)


def test_lengths_in_a_cache(kernel: interface.Kernel) -> None:
    q, cache_k, cache_v = rand(3, 4, 2, 128), rand(3, 2, 200, 128, seed=1), rand(3, 2, 200, 128, seed=2)
    lengths = torch.tensor([2, 129, 200], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        cache_k[row, :, length:], cache_v[row, :, length:] = math.nan, math.inf
    out, lse = kernel.unified_extend(q, cache_k, cache_v, 4, 2, lengths=lengths, return_lse=True)
    one = kernel.unified_decode(q[:, :, 1:].clone(), cache_k, cache_v, 4, 2, lengths=lengths)
    assert same(one, out[:, :, 1:])
    for row, length in enumerate(lengths.tolist()):
        part = slice(row, row + 1)
        alone = kernel.unified_extend(q[part], cache_k[part, :, :length].clone(), cache_v[part, :, :length].clone(), 4, 2)
        assert same(out[part], alone)
    nothing, lse = kernel.unified_extend(
        q, cache_k, cache_v, 4, 2, lengths=torch.tensor([0, 1, 2], dtype=torch.int32), return_lse=True
    )
    assert same(nothing[0], torch.zeros_like(nothing[0]))
    assert bool((lse[0] == -math.inf).all()) and bool((lse[1, :, 0] == -math.inf).all()) and bool(lse[2].isfinite().all())


def test_packed_equals_dense(kernel: interface.Kernel) -> None:
    sizes = [5, 0, 130, 1]
    q, k, v = rand(136, 4, 128), rand(136, 2, 128, seed=1), rand(136, 2, 128, seed=2)
    offsets = torch.tensor([0, 5, 5, 135, 136], dtype=torch.int32)
    out, lse = kernel.unified_prefill(q, k, v, 4, 2, cu_seqlens=offsets, return_lse=True)
    assert lse.shape == (4, 136)
    longest = kernel.unified_prefill(q, k, v, 4, 2, cu_seqlens=offsets, max_seqlen=130)
    assert same(longest, out)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        if size:
            alone, alone_lse = kernel.unified_prefill(
                *(tensor[rows].transpose(0, 1)[None] for tensor in (q, k, v)), 4, 2, return_lse=True
            )
            assert same(out[rows].transpose(0, 1)[None], alone)
            assert torch.equal(lse[:, rows][None], alone_lse)


def test_outputs_that_are_given_are_used(kernel: interface.Kernel) -> None:
    q, k, v = rand(1, 2, 9, 128), rand(1, 2, 9, 128, seed=1), rand(1, 2, 9, 128, seed=2)
    expected, expected_lse = kernel.unified_prefill(q, k, v, 2, 2, return_lse=True)
    out, big = torch.empty_like(q), torch.full((1, 4, 20), 7.0)
    lse = big[:, ::2, 3:12]
    result = kernel.unified_prefill(q, k, v, 2, 2, return_lse=True, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert same(out, expected) and torch.equal(lse, expected_lse)
    assert bool((big[:, 1::2] == 7).all()) and bool((big[:, :, :3] == 7).all()) and bool((big[:, :, 12:] == 7).all())


def test_thread_count_is_torchs(kernel: interface.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(kernel.library, "call", lambda entry, params, stream: seen.append(params.num_threads))
    before = torch.get_num_threads()
    q = rand(1, 1, 1, 128)
    try:
        torch.set_num_threads(1)
        kernel.unified_decode(q, q, q, 1, 1)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_library_errors_become_sentences(kernel: interface.Kernel) -> None:
    with pytest.raises(KernelError, match=r"unified_prefill: .+ \(code -?\d+\)") as caught:
        kernel.library.call(PREFILL, Params(page_table=16, batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1), None)
    assert caught.value.code != 0


# ----------------------------------------------------------------------------------------------------------- bad input

Q, K = (2, 4, 5, 128), (2, 2, 5, 128)
INT = torch.int32


def bad(change: dict[str, Any], entry: str = "prefill") -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        arguments: dict[str, Any] = {"q": rand(*Q), "k": rand(*K), "v": rand(*K), "H_Q": 4, "H_KV": 2}
        if entry == "packed":
            arguments |= {"q": rand(8, 4, 128), "k": rand(8, 2, 128), "v": rand(8, 2, 128)}
            arguments["cu_seqlens"] = torch.tensor([0, 3, 8], dtype=INT)
        if entry == "decode":
            arguments["q"] = rand(2, 4, 1, 128)
        return arguments | {name: value() if callable(value) else value for name, value in change.items()}

    return make


def shifted() -> torch.Tensor:
    return torch.zeros(2 * 4 * 5 * 128 + 1, dtype=BF16)[1:].view(Q)


def zeros(*shape: int, **options: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(shape, **{"dtype": BF16, **options})


HUGE = 2**31
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("prefill", {"q": None}, "q is a NoneType, not a tensor"),
    ("prefill", {"q": zeros(*Q, device="meta")}, "q is on meta, this kernel runs on cpu"),
    ("prefill", {"v": zeros(*K, device="meta")}, "v is on meta, this kernel runs on cpu"),
    ("prefill", {"k": lambda: rand(*K).to_sparse()}, "k has layout torch.sparse_coo"),
    ("prefill", {"q": zeros(*Q, dtype=torch.float16)}, "q is torch.float16, not torch.bfloat16"),
    ("prefill", {"out": zeros(*Q, dtype=torch.float32)}, "out is torch.float32, not torch.bfloat16"),
    ("prefill", {"q": lambda: rand(2, 4, 128, 5).transpose(2, 3)}, "q has innermost stride 5, not 1"),
    ("prefill", {"q": shifted}, "not a multiple of 16 bytes"),
    ("prefill", {"k": lambda: rand(2, 2, 5, 132)[:1, :1, :, :128]}, "k has stride 132 in dimension 2, not a multiple of 8 elements"),
    ("prefill", {"v": lambda: rand(1, 1, 1, 128).expand(K)}, "v has row stride 0, less than a row of 128 elements"),
    ("prefill", {"q": zeros(2, 5, 128)}, "q [2, 5, 128] has 3 dimensions, not 4"),
    ("prefill", {"q": lambda: torch.tensor(1.0, dtype=BF16)}, "q is a scalar"),
    ("prefill", {"q": zeros(2, 4, 5, 64)}, "q [2, 4, 5, 64] has head dimension 64, not 128"),
    ("prefill", {"q": zeros(0, 4, 5, 128)}, "q [0, 4, 5, 128] is empty in dimension 0"),
    ("prefill", {"k": zeros(2, 2, 0, 128)}, "k [2, 2, 0, 128] is empty in dimension 2"),
    ("prefill", {"q": lambda: rand(1, 1, 1, 128).expand(HUGE, 4, 1, 128)}, f"q [{HUGE}, 4, 1, 128] has {4 * HUGE} rows, more than"),
    ("prefill", {"H_Q": 0}, "H_Q is 0, not a whole number >= 1"),
    ("prefill", {"H_KV": 2.0}, "H_KV is 2.0, not a whole number >= 1"),
    ("prefill", {"H_Q": True}, "H_Q is True, not a whole number"),
    ("prefill", {"H_Q": 5}, "H_Q / H_KV is 5 / 2, not a whole number from 1 to 16"),
    ("prefill", {"H_Q": 34}, "H_Q / H_KV is 34 / 2, not a whole number from 1 to 16"),
    ("prefill", {"H_Q": 8}, "q [2, 4, 5, 128] has 4 heads, H_Q is 8"),
    ("prefill", {"H_KV": 4}, "k [2, 2, 5, 128] has 2 heads, H_KV is 4"),
    ("prefill", {"k": zeros(3, 2, 5, 128)}, "k [3, 2, 5, 128] has batch 3, q [2, 4, 5, 128] has 2"),
    ("prefill", {"v": zeros(2, 2, 6, 128)}, "v [2, 2, 6, 128] differs from k [2, 2, 5, 128]"),
    ("prefill", {"k": zeros(2, 2, 6, 128), "v": zeros(2, 2, 6, 128)}, "prefill needs as many queries as keys"),
    ("prefill", {"max_seqlen": 5}, "max_seqlen is 5 without cu_seqlens"),
    ("prefill", {"lse": zeros(2, 4, 5, dtype=torch.float32)}, "lse is given without return_lse=True"),
    ("prefill", {"lse": zeros(2, 4, 5), "return_lse": True}, "lse is torch.bfloat16, not torch.float32"),
    ("prefill", {"lse": zeros(2, 5, 4, dtype=torch.float32), "return_lse": True}, "lse has shape [2, 5, 4], not [2, 4, 5]"),
    ("prefill", {"lse": lambda: torch.zeros(2, 5, 4).mT, "return_lse": True}, "lse has innermost stride 4, not 1"),
    ("prefill", {"lse": lambda: torch.zeros(1, 4, 5).expand(2, 4, 5), "return_lse": True}, "lse has strides (0, 5, 1): its own"),
    ("prefill", {"out": zeros(2, 4, 6, 128)}, "out [2, 4, 6, 128] differs from q [2, 4, 5, 128]"),
    ("prefill", {"out": lambda: rand(1, 4, 5, 128).expand(Q)}, "out has strides (0, 640, 128, 1): its own elements overlap"),
    ("prefill", {"q": lambda: rand(*Q).requires_grad_()}, "q requires grad: there is no backward pass"),
    ("prefill", {"v": lambda: torch.nn.Parameter(rand(*K))}, "v requires grad"),
    ("extend", {"q": zeros(2, 4, 6, 128)}, "q [2, 4, 6, 128] has 6 queries, more than the 5 keys of k"),
    ("extend", {"lengths": zeros(2, dtype=torch.int64)}, "lengths is torch.int64, not torch.int32"),
    ("extend", {"lengths": zeros(2, dtype=INT, device="meta")}, "lengths is on meta"),
    ("extend", {"lengths": [5, 5]}, "lengths is a list, not a tensor"),
    ("extend", {"lengths": zeros(3, dtype=INT)}, "lengths has shape [3], not [2]"),
    ("extend", {"lengths": zeros(2, 1, dtype=INT)}, "lengths has shape [2, 1], not [2]"),
    ("extend", {"lengths": lambda: torch.zeros(4, dtype=INT)[::2]}, "lengths has stride 2, not 1"),
    ("decode", {"q": zeros(2, 4, 2, 128)}, "decode takes one query, q [2, 4, 2, 128] has 2"),
    ("packed", {"q": zeros(2, 4, 5, 128)}, "q [2, 4, 5, 128] has 4 dimensions, not 3"),
    ("packed", {"k": zeros(7, 2, 128), "v": zeros(7, 2, 128)}, "k [7, 2, 128] has 7 rows, q [8, 4, 128] has 8"),
    ("packed", {"cu_seqlens": zeros(3, dtype=torch.int64)}, "cu_seqlens is torch.int64, not torch.int32"),
    ("packed", {"cu_seqlens": zeros(1, dtype=INT)}, "cu_seqlens has shape [1]: no sequence"),
    ("packed", {"cu_seqlens": zeros(2, 2, dtype=INT)}, "cu_seqlens has shape [2, 2], not [n + 1]"),
    ("packed", {"cu_seqlens": lambda: torch.tensor([0, 3, 7], dtype=INT)}, "cu_seqlens runs from 0 to 7, not from 0 to the total of 8"),
    ("packed", {"cu_seqlens": lambda: torch.tensor([0, 9, 8], dtype=INT)}, "cu_seqlens falls from 9 to 8 at sequence 1"),
    ("packed", {"max_seqlen": 0}, "max_seqlen is 0, not from 1 to the total of 8 rows"),
    ("packed", {"max_seqlen": 4}, "max_seqlen is 4, the longest sequence has 5 rows"),
    ("packed", {"max_seqlen": 2.5}, "max_seqlen is 2.5, not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize("entry, change, words", BAD)
def test_bad_input(kernel: interface.Kernel, entry: str, change: dict[str, Any], words: str) -> None:
    method = getattr(kernel, "unified_prefill" if entry == "packed" else f"unified_{entry}")
    method(**bad({}, entry)())
    with pytest.raises(UserError) as caught:
        method(**bad(change, entry)())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checks_come_in_order(kernel: interface.Kernel) -> None:
    wrong_shape = torch.zeros(3, 7, dtype=torch.float32).T
    with pytest.raises(UserError, match=r"not torch\.bfloat16"):
        kernel.unified_prefill(wrong_shape, rand(*K), rand(*K), 4, 2)
    with pytest.raises(UserError, match="on meta"):
        kernel.unified_prefill(wrong_shape, rand(*K), torch.zeros(K, device="meta"), 4, 2)
    with pytest.raises(UserError, match="innermost stride"):
        kernel.unified_prefill(wrong_shape.to(BF16), rand(*K), rand(*K), 4, 2)


def test_output_must_not_overlap_inputs(kernel: interface.Kernel) -> None:
    buffer = rand(2, 2, 10, 128)
    q, k, v = rand(2, 2, 5, 128), buffer[:, :, :5], rand(2, 2, 5, 128)
    with pytest.raises(UserError, match="out overlaps the memory of k"):
        kernel.unified_prefill(q, k, v, 2, 2, out=buffer[:, :, 5:])
    with pytest.raises(UserError, match="out overlaps the memory of q"):
        kernel.unified_prefill(q, k, v, 2, 2, out=q)


def test_grad_is_allowed_where_no_gradient_is_recorded(kernel: interface.Kernel) -> None:
    q, k = rand(*Q).requires_grad_(), rand(*K)
    with torch.no_grad():
        assert not kernel.unified_prefill(q, k, k, 4, 2).requires_grad


def test_packed_capture_needs_the_longest_length(kernel: interface.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(kernel, "_check_common", lambda *args, **kwargs: torch.device("cuda"))
    with pytest.raises(UserError, match="max_seqlen is needed while a graph is captured"):
        kernel.unified_prefill(**bad({}, "packed")())


def test_targets_state_the_interfaces_numbers() -> None:
    for name in ("cpu", "h200"):
        contract = load_target(name).config["contract"]
        assert (contract["dtype"], contract["head_dim"]) == ("bf16", 128)


@pytest.mark.gpu
def test_tensors_on_another_gpu(gpu: str) -> None:
    """The launch goes where the tensors are, not to the current device, which stays what it was."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    loaded = load_kernel(gpu, allow_compat=True)
    q, k, v = rand(2, 8, 300, 128), rand(2, 2, 300, 128, seed=1), rand(2, 2, 300, 128, seed=2)
    results = []
    for where in ("cuda:1", "cuda:0"):
        with torch.cuda.device(0):
            args = [tensor.to(where) for tensor in (q, k, v)]
            out = loaded.unified_prefill(*args, 8, 2)
            one = loaded.unified_decode(args[0][:, :, -1:], *args[1:], 8, 2)
            assert torch.cuda.current_device() == 0
            assert str(out.device) == str(one.device) == where
            torch.cuda.synchronize(where)
            assert same(out[:, :, -1:].cpu(), one.cpu())
            results.append(out.cpu())
    assert same(*results)
    pinned = load_kernel(gpu, device="cuda:1", allow_compat=True)
    with pytest.raises(UserError, match="q is on cuda:0, this kernel runs on cuda:1"):
        pinned.unified_prefill(*(tensor.to("cuda:0") for tensor in (q, k, v)), 8, 2)


def test_a_repeated_call_is_still_checked(kernel: interface.Kernel) -> None:
    """The form of a good call is remembered; what its checks cannot see in the form is checked every time."""
    q, k, v = rand(1, 4, 1, 128), rand(1, 2, 9, 128, seed=1), rand(1, 2, 9, 128, seed=2)
    out = torch.empty_like(q)
    first = kernel.unified_decode(q, k, v, 4, 2)
    kernel.unified_decode(q, k, v, 4, 2, out=out)
    assert len(kernel._known) >= 2
    other = rand(1, 4, 1, 128, seed=3)
    assert same(kernel.unified_decode(q, k, v, 4, 2), first) and not same(kernel.unified_decode(other, k, v, 4, 2), first)
    odd = torch.zeros(k.numel() + 1, dtype=BF16)[1:].view_as(k)
    q_odd = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view_as(q)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("k starts at address", lambda: kernel.unified_decode(q, odd, v, 4, 2)),
        ("out starts at address", lambda: kernel.unified_decode(q, k, v, 4, 2, out=q_odd)),
        ("out overlaps the memory of q", lambda: kernel.unified_decode(q, k, v, 4, 2, out=q)),
        ("q requires grad", lambda: kernel.unified_decode(q.clone().requires_grad_(), k, v, 4, 2)),
        ("H_KV is 2.0", lambda: kernel.unified_decode(q, k, v, 4, 2.0)),  # type: ignore[arg-type]
        ("H_KV is \\[2\\]", lambda: kernel.unified_decode(q, k, v, 4, [2])),  # type: ignore[arg-type]
        ("prefill needs", lambda: kernel.unified_prefill(q, k, v, 4, 2)),
    ]
    for words, call in bad:
        with pytest.raises(UserError, match=words):
            call()
