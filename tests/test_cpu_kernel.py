"""The CPU kernel and its literal witness: equal raw words in every case, whatever compiler flags, threads and layout."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tools.core.config import load_target
from tools.core.errors import KernelError
from tools.loader.abi import DECODE, EXTEND, PREFILL, Params
from tools.loader.build import build
from tools.loader.interface import Kernel

BF16 = torch.bfloat16
Tensor = torch.Tensor
Outputs = list[Tensor]
KERNELS = Path(__file__).resolve().parents[1] / "experimental" / "cpu" / "kernels"


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    target = load_target("cpu")
    return Kernel(build(target).library, target)


@pytest.fixture(scope="module")
def witness() -> Kernel:
    target = load_target("cpu")
    return Kernel(build(target, role="witness").library, target)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(batch: int, heads_q: int, heads_kv: int, queries: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads_q, queries, 128), (batch, heads_kv, keys, 128), (batch, heads_kv, keys, 128))
    q, k, v = (torch.randn(shape, generator=draw).to(BF16) for shape in shapes)
    return q, k, v


def words(outputs: Outputs) -> Outputs:
    """The raw bits of outputs and LSEs."""
    return [t.contiguous().view(torch.int16 if t.dtype == BF16 else torch.int32) for t in outputs]


def differing(a: Outputs, b: Outputs) -> int:
    """How many words differ."""
    assert [t.shape for t in a] == [t.shape for t in b]
    return sum(int((x != y).sum()) for x, y in zip(words(a), words(b), strict=True))


def call(run: Kernel, entry: str, q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> Outputs:
    heads = (q.shape[1], k.shape[1])
    return list(getattr(run, f"unified_{entry}")(q, k, v, *heads, return_lse=True, **options))


def raw_call(heads: int = 2, keys: int = 4) -> tuple[Params, Outputs]:
    """A decode call, four query heads to a KV head, and the tensors that it points at."""
    q, k, v = inputs(1, heads, max(1, heads // 4), 1, keys)
    tensors = [q, k, v, torch.empty_like(q)]
    params = Params(batch=1, heads_q=heads, heads_kv=k.shape[1], seqlen_q=1, seqlen_kv=keys)
    for name, tensor in zip("qkvo", tensors, strict=True):
        setattr(params, name, tensor.data_ptr())
        getattr(params, f"{name}_stride")[:] = tensor.stride()[:3]
    return params, tensors


def tour(run: Kernel) -> Outputs:
    """A small call of every kind: both sides of a tile's edge, several tiles, groups, lengths, packing, wide scores."""
    q, k, v = inputs(2, 6, 2, 135, 135)
    q[1] *= 20
    v[:, :, :, 5] = 0.0
    v[:, :, :, 6] = torch.tensor(9.2e-41).to(BF16)
    results = call(run, "prefill", q, k, v)
    results += call(run, "extend", q[:, :, 60:70].contiguous(), k, v, lengths=torch.tensor([135, 4], dtype=torch.int32))
    for seed, (batch, heads_q, heads_kv, keys) in enumerate([(3, 4, 1, 64), (1, 16, 1, 65), (1, 1, 1, 1), (2, 14, 2, 200)]):
        results += call(run, "decode", *inputs(batch, heads_q, heads_kv, 1, keys, seed))
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in inputs(1, 3, 1, 100, 100, seed=9))
    results += call(run, "prefill", q, k, v, cu_seqlens=torch.tensor([0, 1, 1, 70, 100], dtype=torch.int32))
    return results


def test_tour(kernel: Kernel, witness: Kernel) -> None:
    assert differing(tour(kernel), tour(witness)) == 0


@pytest.mark.parametrize("group", range(1, 17))
def test_groups(kernel: Kernel, witness: Kernel, group: int) -> None:
    q, k, v = inputs(2, 2 * group, 2, 67, 67, seed=group)
    expected = call(witness, "prefill", q, k, v)
    assert differing(call(kernel, "prefill", q, k, v), expected) == 0
    last = [t[:, :, 66:] for t in expected]
    assert differing(call(kernel, "decode", q[:, :, 66:].clone(), k, v), last) == 0


def test_every_length(kernel: Kernel) -> None:
    """Prefill, extend in any partition and decode give a row the same bits at every length and offset."""
    q, k, v = inputs(1, 5, 1, 260, 260, seed=3)
    whole = call(kernel, "prefill", q, k, v)
    for n in range(1, 261):
        assert (
            differing(
                call(kernel, "decode", q[:, :, n - 1 : n].clone(), k[:, :, :n], v[:, :, :n]),
                [t[:, :, n - 1 : n] for t in whole],
            )
            == 0
        )
        assert (
            differing(call(kernel, "prefill", q[:, :, :n].clone(), k[:, :, :n], v[:, :, :n]), [t[:, :, :n] for t in whole]) == 0
        )
    for chunk in (2, 3, 7, 33, 64, 100):
        for start in range(0, 260, chunk):
            end = min(start + chunk, 260)
            part = call(kernel, "extend", q[:, :, start:end].clone(), k[:, :, :end], v[:, :, :end])
            assert differing(part, [t[:, :, start:end] for t in whole]) == 0


def rising(q: Tensor, k: Tensor, v: Tensor) -> None:
    k *= torch.linspace(0.1, 20, k.shape[2])[:, None]
    q.abs_(), k.abs_()


def falling(q: Tensor, k: Tensor, v: Tensor) -> None:
    k *= torch.linspace(20, 0.1, k.shape[2])[:, None]
    q.abs_(), k.abs_()


def wide(q: Tensor, k: Tensor, v: Tensor) -> None:
    q *= 20


def enormous(q: Tensor, k: Tensor, v: Tensor) -> None:
    q *= 2.0**40
    k *= 2.0**40
    v *= 2.0**100


def subnormal(q: Tensor, k: Tensor, v: Tensor) -> None:
    v *= 2.0**-128
    q *= 2.0**-120
    k[:, :, ::2] *= 2.0**-130


def negative_zero(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[:, :, 3] = -0.0
    k[:, :, ::3] = -0.0
    v[:, :, :, ::2] = -0.0
    v[:, :, 70:, 1] = -(2.0**-133)


def zero_columns(q: Tensor, k: Tensor, v: Tensor) -> None:
    v[:, :, :, 8:24] = 0.0
    k[:, :, 40:90] = 0.0


def ties(q: Tensor, k: Tensor, v: Tensor) -> None:
    k[:] = k[:, :, :1].clone()


VALUES = (rising, falling, wide, enormous, subnormal, negative_zero, zero_columns, ties)


@pytest.mark.parametrize("change", VALUES, ids=lambda f: f.__name__)
def test_values(kernel: Kernel, witness: Kernel, change: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    q, k, v = inputs(1, 4, 2, 150, 150, seed=5)
    change(q, k, v)
    got = call(kernel, "prefill", q, k, v)
    assert all(bool(t.isfinite().all()) for t in got)
    assert differing(got, call(witness, "prefill", q, k, v)) == 0
    for n in (1, 64, 150):
        assert (
            differing(
                call(kernel, "decode", q[:, :, n - 1 : n].clone(), k[:, :, :n], v[:, :, :n]), [t[:, :, n - 1 : n] for t in got]
            )
            == 0
        )


def test_subnormals_are_kept(kernel: Kernel) -> None:
    """Also where the caller flushes them; the caller's mode comes back."""
    q, k, v = inputs(1, 4, 1, 80, 80, seed=6)
    v *= 2.0**-128
    expected = call(kernel, "prefill", q, k, v)
    assert int(((expected[0] != 0) & (expected[0].abs() < 2.0**-126)).sum()) > 1000
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = call(kernel, "prefill", q, k, v)
        still_flushing = float(torch.tensor([2.0**-126]) * 0.25) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert differing(got, expected) == 0
    assert still_flushing


def test_strides(kernel: Kernel, witness: Kernel) -> None:
    """Rows-first tensors, slices of a larger cache and expanded heads and batches are read where they lie."""
    q, k, v = inputs(2, 8, 2, 70, 70, seed=7)
    expected = call(witness, "prefill", q, k, v)
    rows_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert differing(call(kernel, "prefill", *rows_first), expected) == 0
    cache = torch.full((2, 3, 2, 200, 128), math.nan, dtype=BF16)
    cache[:, 1, :, :70], cache[:, 2, :, :70] = k, v
    assert differing(call(kernel, "prefill", q, cache[:, 1, :, :70], cache[:, 2, :, :70]), expected) == 0
    one_k, one_v = k[:1, :1].expand(2, 2, 70, 128), v[:1, :1].expand(2, 2, 70, 128)
    assert differing(call(kernel, "prefill", q, one_k, one_v), call(witness, "prefill", q, one_k.clone(), one_v.clone())) == 0
    out, lse = torch.empty(2, 70, 8, 128, dtype=BF16).transpose(1, 2), torch.empty(2, 9, 90)[:, 1:, :70]
    kernel.unified_prefill(q, k, v, 8, 2, return_lse=True, out=out, lse=lse)
    assert differing([out, lse], expected) == 0


def test_offsets_past_2_to_31(kernel: Kernel) -> None:
    """65 rows of K and V spread over 4 GiB of memory that is reserved, not used."""
    q, k, v = inputs(1, 2, 1, 65, 65, seed=12)
    expected = call(kernel, "prefill", q, k, v)
    try:
        memory = torch.empty(65 * 2**25, dtype=BF16)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    far_k, far_v = (memory.as_strided((1, 1, 65, 128), (128, 128, 2**25, 1), at) for at in (0, 1024))
    far_k.copy_(k), far_v.copy_(v)
    assert differing(call(kernel, "prefill", q, far_k, far_v), expected) == 0


def test_garbage_behind_lengths(kernel: Kernel, witness: Kernel) -> None:
    """Rows of the cache past a sequence's length hold NaN; lengths are clamped; rows that see no key are +0 and -inf."""
    lengths = torch.tensor([1, 63, 64, 65, 0, 129, 500, -3], dtype=torch.int32)
    q, k, v = inputs(8, 6, 2, 4, 130, seed=8)
    dirty_k, dirty_v = k.clone(), v.clone()
    for b, n in enumerate(lengths.clamp(0, 130).tolist()):
        dirty_k[b, :, n:] = math.nan
        dirty_v[b, :, n:] = math.nan
    got = call(kernel, "extend", q, dirty_k, dirty_v, lengths=lengths)
    assert differing(got, call(witness, "extend", q, k, v, lengths=lengths)) == 0
    assert not bool(got[0].isnan().any())
    assert int(words(got)[0][[4, 7]].abs().sum()) == 0
    assert bool((got[1][[4, 7]] == -math.inf).all())
    one = q[:, :, :1].clone()
    assert (
        differing(
            call(kernel, "decode", one, dirty_k, dirty_v, lengths=lengths), call(witness, "decode", one, k, v, lengths=lengths)
        )
        == 0
    )


def test_non_finite_values_stay_in_their_rows(kernel: Kernel, witness: Kernel) -> None:
    q, k, v = inputs(1, 4, 2, 150, 150, seed=10)
    clean = call(kernel, "prefill", q, k, v)
    q[0, 1, 20, 5] = math.nan
    k[0, 0, 100, 7] = math.nan
    v[0, 1, 90, 11] = math.inf
    v[0, 1, 91, 12] = math.nan
    q[0, 3, 7] = math.inf
    got = call(kernel, "prefill", q, k, v)
    assert differing(got, call(witness, "prefill", q, k, v)) == 0
    assert bool(got[0][0, 1, 20].isnan().all()) and bool(got[1][0, 1, 20].isnan())
    assert bool(got[0][0, :2, 100:].isnan().all()) and bool(got[1][0, :2, 100:].isnan().all())
    hit = torch.zeros(1, 4, 150, 128, dtype=torch.bool)
    hit[0, 1, 20] = hit[0, :2, 100:] = hit[0, 2:, 90:, 11] = hit[0, 2:, 91:, 12] = hit[0, 3, 7] = True
    assert differing([got[0][~hit]], [clean[0][~hit]]) == 0
    assert bool((words([got[0][got[0].isnan()]])[0] == 0x7FC0).all())


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 33])
def test_threads(kernel: Kernel, witness: Kernel, threads: int) -> None:
    torch.set_num_threads(threads)
    assert differing(tour(kernel), tour(witness)) == 0


def test_calls_from_several_threads(kernel: Kernel) -> None:
    cases = [inputs(1, 4, 2, 1, keys, seed=keys) for keys in range(50, 250, 10)]
    expected = [call(kernel, "decode", *case) for case in cases]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            for got, want in zip(threads.map(lambda case: call(kernel, "decode", *case), cases), expected, strict=True):
                assert differing(got, want) == 0


def test_fork(kernel: Kernel) -> None:
    """A child forked after the pool has started has none of its threads, and works. (torch's own threads would hang there.)"""
    params, tensors = raw_call(heads=32, keys=300)
    params.num_threads = 4
    kernel.library.call(DECODE, params, None)
    expected = ctypes.string_at(params.o, tensors[3].nbytes)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        ctypes.memset(params.o, 0xFF, len(expected))
        kernel.library.call(DECODE, params, None)
        os._exit(0 if ctypes.string_at(params.o, len(expected)) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kernel.library.call(DECODE, params, None)
    assert ctypes.string_at(params.o, len(expected)) == expected


def test_accuracy(kernel: Kernel) -> None:
    """Against fp64: the output's error is bf16's rounding (2^-9 / sqrt(3) of a value at most), the LSE's a few fp32 ulps."""
    q, k, v = inputs(1, 4, 2, 700, 700, seed=11)
    out, lse = call(kernel, "prefill", q, k, v)
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(128)
    scores = scores.masked_fill(~torch.ones(700, 700, dtype=torch.bool).tril(), -math.inf)
    exact = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    error = (out.double() - exact).square().mean(-1).sqrt() / exact.square().mean(-1).sqrt()
    assert float(error.max()) < 0.0023
    rounded = (exact.to(BF16).double() - exact).square().mean().sqrt()
    assert float((out.double() - exact).square().mean().sqrt()) < 1.01 * float(rounded)
    assert float((lse.double() - scores.logsumexp(-1)).abs().max()) < 2e-6


# ---------------------------------------------------------------------------------------------------- other builds, mutants
def compile_kernel(
    folder: Path, name: str, flags: list[str], change: tuple[str, str] | None = None, compiler: str = "c++"
) -> Kernel:
    """A build of the kernel with other flags, or with one piece of its source replaced."""
    source = folder / "experimental" / "cpu" / "kernels" / f"{name}.cpp"
    shutil.copytree(KERNELS.parents[1] / "common", folder / "experimental" / "common", dirs_exist_ok=True)
    shutil.copytree(KERNELS, source.parent, dirs_exist_ok=True)
    text = (KERNELS / "unified_attn.cpp").read_text()
    if change:
        assert text.count(change[0]) == 1, change[0]
        text = text.replace(*change)
    source.write_text(text)
    library = folder / f"{name}.so"
    command = [
        compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",
        *flags,
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    return Kernel(library, load_target("cpu"))


def variants() -> list[tuple[str, str, list[str]]]:
    """Builds that this processor can run: name, compiler, flags."""
    found = [("O1", "c++", ["-O1", "-march=native"]), ("plain", "c++", ["-O2"])]
    if shutil.which("clang++"):
        found.append(("clang", "clang++", ["-O3", "-march=native"]))
    if platform.machine() in ("x86_64", "AMD64"):
        have = Path("/proc/cpuinfo").read_text()
        if "avx2" in have and "fma" in have:
            found.append(("avx2", "c++", ["-O3", "-mavx2", "-mfma"]))
        if "avx512f" in have:
            found.append(("avx512", "c++", ["-O2", "-mavx512f", "-mfma"]))
    return found


@pytest.mark.parametrize(("name", "compiler", "flags"), variants(), ids=lambda x: x if isinstance(x, str) else "")
def test_builds_agree(kernel: Kernel, tmp_path: Path, name: str, compiler: str, flags: list[str]) -> None:
    other = compile_kernel(tmp_path, name, flags, compiler=compiler)
    assert differing(tour(other), tour(kernel)) == 0


MUTANTS = {
    "tile_size": ("KEY_TILE = 64;", "KEY_TILE = 128;"),
    "score_order": ("for (int d = 0; d < HEAD_DIM; d++) {\n      if", "for (int d = HEAD_DIM - 1; d >= 0; d--) {\n      if"),
    "value_unfused": ("acc[r][c] = fma(w, x[c], acc[r][c]);", "acc[r][c] = w * x[c] + acc[r][c];"),
    "scale": ("SCALE_LOG2 = 0x1.0527dcp-3f", "SCALE_LOG2 = 0x1.0527dep-3f"),
    "exp2_coefficient": ("0x1.62e42ap-1f", "0x1.62e42cp-1f"),
    "causal_edge": ("keys - queries + row + 1, 0, keys", "keys - queries + row + 2, 0, keys"),
    "masked_keys_added": (
        "R>(s.o[r], s.p[r], values, stride, alpha, 0, shared, ahead)",
        "R>(s.o[r], s.p[r], values, stride, alpha, 0, count(r + block - 1), ahead)",
    ),
    "dropped_rescale": ("same ? nullptr : s.alpha + r", "tile ? nullptr : s.alpha + r"),
    "row_sum_order": ("sum[j] = sum[j] + sum[j + step];", "sum[j] = sum[2 * j] + sum[2 * j + 1];"),
    "wrong_kv_head": ("offset(p.v_stride, head_kv, 0)", "offset(p.v_stride, 0, 0)"),
    "flushed_subnormals": (
        "return (bits & 0x7fffffff) > 0x7f800000",
        "return (bits & 0x7f800000) == 0 ? 0 : (bits & 0x7fffffff) > 0x7f800000",
    ),
    "lse_in_base_2": ("(double)e * LN2", "(double)e"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(witness: Kernel, tmp_path: Path, name: str) -> None:
    mutant = compile_kernel(tmp_path, name, ["-O1", "-march=native"], MUTANTS[name])
    assert differing(tour(mutant), tour(witness)) > 0


# -------------------------------------------------------------------------------------------------------------- bad calls
OFFSETS = torch.tensor([0, 3, 2], dtype=torch.int32)
BAD = [
    (DECODE, {"k": None}, "must not be NULL"),
    (DECODE, {"batch": 0}, "at least 1"),
    (DECODE, {"seqlen_kv": 0}, "at least 1"),
    (DECODE, {"heads_q": 3, "heads_kv": 2}, "1 to 16 times"),
    (DECODE, {"heads_q": 17}, "1 to 16 times"),
    (DECODE, {"page_table": OFFSETS.data_ptr()}, "page_table must be NULL"),
    (DECODE, {"num_threads": -1}, "num_threads"),
    (DECODE, {"seqlen_q": 2}, "seqlen_q == 1"),
    (PREFILL, {}, "seqlen_q == seqlen_kv"),
    (PREFILL, {"seqlen_kv": 1, "lengths": OFFSETS.data_ptr()}, "takes no lengths"),
    (EXTEND, {"cu_seqlens": OFFSETS.data_ptr()}, "prefill only"),
    (PREFILL, {"seqlen_q": 4, "batch": 2, "cu_seqlens": OFFSETS.data_ptr()}, "not descend"),
    (PREFILL, {"seqlen_q": 2, "seqlen_kv": 2, "cu_seqlens": OFFSETS.data_ptr()}, "longer than seqlen_q"),
]


@pytest.mark.parametrize(("entry", "change", "sentence"), BAD)
def test_bad_calls(kernel: Kernel, entry: int, change: dict[str, int], sentence: str) -> None:
    params, tensors = raw_call()
    kernel.library.call(DECODE, params, None)
    for name, value in change.items():
        setattr(params, name, value)
    before = tensors[3].clone()
    with pytest.raises(KernelError, match=sentence) as caught:
        kernel.library.call(entry, params, None)
    assert caught.value.code < 0
    assert torch.equal(tensors[3], before)


def test_num_threads_zero(kernel: Kernel) -> None:
    """0 means one thread a core."""
    params, tensors = raw_call()
    kernel.library.call(DECODE, params, None)
    params.num_threads = 3
    expected = tensors[3].clone()
    kernel.library.call(DECODE, params, None)
    assert differing([tensors[3]], [expected]) == 0
