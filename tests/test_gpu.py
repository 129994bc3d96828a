"""What only the target's GPU can show of the kernel interface (`make gpu-check`); the evaluator does the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tools.core.config import load_target, target_names
from tools.core.errors import UserError
from tools.evaluator import providers
from tools.load_kernel import load_kernel
from tools.loader.interface import Kernel

pytestmark = pytest.mark.gpu
HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load_kernel(str(request.config.getoption("--gpu")), allow_compat=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(17)


def rows(batch: int, heads: int, length: int) -> torch.Tensor:
    """Random bf16 [batch, heads, length, 128] on the GPU."""
    return torch.randn(batch, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def test_last_row_of_prefill_is_decode(kernel: Kernel) -> None:
    q, k, v = rows(1, HEADS_Q, 1024), rows(1, HEADS_KV, 1024), rows(1, HEADS_KV, 1024)
    full = kernel.unified_prefill(q, k, v, HEADS_Q, HEADS_KV)
    one = kernel.unified_decode(q[:, :, -1:].contiguous(), k, v, HEADS_Q, HEADS_KV)
    assert same_bits(full[:, :, -1:], one)


def test_one_captured_graph_serves_a_growing_batch(kernel: Kernel) -> None:
    q, k, v = rows(3, HEADS_Q, 1), rows(3, HEADS_KV, 700), rows(3, HEADS_KV, 700)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    kernel.unified_decode(q, k, v, HEADS_Q, HEADS_KV, lengths=lengths, out=out)
    with torch.cuda.graph(graph):
        kernel.unified_decode(q, k, v, HEADS_Q, HEADS_KV, lengths=lengths, out=out)
    for given in ([5, 128, 129], [640, 1, 700]):
        lengths.copy_(torch.tensor(given, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        for b, n in enumerate(given):
            alone = kernel.unified_decode(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], HEADS_Q, HEADS_KV)
            assert same_bits(out[b : b + 1], alone)


def test_the_first_call_of_a_process_may_be_captured(gpu: str, repo: Path) -> None:
    program = f"""
import torch
from tools.load_kernel import load_kernel
kernel = load_kernel({gpu!r}, allow_compat=True)
q, k = torch.randn(1, 8, 1, {HEAD_DIM}).bfloat16().cuda(), torch.randn(1, 2, 300, {HEAD_DIM}).bfloat16().cuda()
out = torch.full_like(q, float("nan"))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kernel.unified_decode(q, k, k, 8, 2, out=out)
graph.replay()
assert torch.equal(out.view(torch.int16), kernel.unified_decode(q, k, k, 8, 2).view(torch.int16))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_offsets_past_two_to_the_31_elements(kernel: Kernel) -> None:
    """Q of B16 H32 passes 2^31 elements from S = 32,784 on; the last sequence alone must give the same bits."""
    batch, length = 16, 32_784
    q, k, v = rows(batch, HEADS_Q, length), rows(batch, HEADS_KV, length), rows(batch, HEADS_KV, length)
    assert q.numel() > 2**31
    full = kernel.unified_prefill(q, k, v, HEADS_Q, HEADS_KV)
    last = slice(batch - 1, batch)
    assert same_bits(full[last], kernel.unified_prefill(q[last], k[last], v[last], HEADS_Q, HEADS_KV))


def test_cache_strides_past_two_to_the_31_elements(kernel: Kernel) -> None:
    capacity = 2**31 // (HEADS_KV * HEAD_DIM) + 16
    q, cache = rows(2, HEADS_Q, 1), torch.empty(2, HEADS_KV, capacity, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k = v = cache[:, :, -300:]
    k.normal_()
    assert cache.stride(0) > 2**31
    both = kernel.unified_decode(q, k, v, HEADS_Q, HEADS_KV)
    assert same_bits(both[1:], kernel.unified_decode(q[1:], k[1:].clone(), v[1:].clone(), HEADS_Q, HEADS_KV))


def test_work_goes_to_the_current_stream(kernel: Kernel) -> None:
    """The call waits for a copy that the same stream still has to make."""
    q, k, v = rows(1, HEADS_Q, 1), rows(1, HEADS_KV, 4096), rows(1, HEADS_KV, 4096)
    expected = kernel.unified_decode(q, k, v, HEADS_Q, HEADS_KV)
    late = torch.full_like(k, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(k)
        out = kernel.unified_decode(q, late, v, HEADS_Q, HEADS_KV)
    stream.synchronize()
    assert same_bits(out, expected)


def test_bad_tensors_are_named(kernel: Kernel) -> None:
    q, k, v = rows(1, HEADS_Q, 4), rows(1, HEADS_KV, 4), rows(1, HEADS_KV, 4)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("cpu", lambda: kernel.unified_prefill(q.cpu(), k, v, HEADS_Q, HEADS_KV)),
        ("float16", lambda: kernel.unified_prefill(q.half(), k, v, HEADS_Q, HEADS_KV)),
        ("16", lambda: kernel.unified_prefill(q, k, v, 16, HEADS_KV)),
        ("requires", lambda: kernel.unified_prefill(q.clone().requires_grad_(), k, v, HEADS_Q, HEADS_KV)),
    ]
    for word, call in bad:
        with pytest.raises(UserError, match=word):
            call()


def test_the_library_has_our_bits(gpu: str) -> None:
    if load_target(gpu).config["contract"].get("library") is None:
        pytest.skip(f"the contract of {gpu} names no library")
    load_kernel(gpu, verify_library=True, allow_compat=True)


def test_the_aligned_peer_has_the_librarys_own_rows(gpu: str) -> None:
    """FlashAttention-3 with a second query, in decode, and without splits, in extend, against its full-sequence call."""
    provider = providers.make("fa3_aligned")
    if not provider.available()[0]:
        pytest.skip("FlashAttention-3 is not installed")
    for batch, size in ((1, 129), (3, 1000), (2, 4096)):
        q, k, v = (torch.randn(batch, size, heads, HEAD_DIM).bfloat16().cuda().transpose(1, 2) for heads in (32, 8, 8))
        whole, _ = provider.prepare("prefill", {"q": q, "k": k, "v": v}, size, None)()
        for entry, rows in (("decode", 1), ("extend", 100)):
            for route in provider.routes(entry):
                part, _ = provider.prepare(entry, {"q": q[:, :, -rows:], "k": k, "v": v}, size, route)()
                assert torch.equal(part.view(torch.int16), whole[:, :, -rows:].view(torch.int16)), (batch, size, entry, route)


def test_another_targets_gpu_is_refused() -> None:
    here = torch.cuda.get_device_name()
    for name in target_names():
        names = load_target(name).config["target"].get("gpu_names")
        if names and here not in names:
            with pytest.raises(UserError, match=names[0]) as caught:
                load_kernel(name)
            assert here in str(caught.value)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(gpu: str, repo: Path, tool: str) -> None:
    """Small calls of every entry point under each tool of compute-sanitizer.

    racecheck does not see that one lane arrives at a barrier for its warp: where a target has a debug build, in which every
    lane does, that is checked. A warp that copies a partial tile of decode by hand still arrives by one lane there, so that
    calls with lengths are left out of it.
    """
    debug = repo / "experimental" / gpu / "debug.yaml"
    every_lane = tool == "racecheck" and debug.exists()
    config = f"Path({str(debug)!r})" if every_lane else None
    program = f"""
from pathlib import Path
import torch
from tools.load_kernel import load_kernel
kernel = load_kernel({gpu!r}, config={config}, allow_compat=True)
make = lambda *shape: torch.randn(*shape, {HEAD_DIM}).bfloat16().cuda()
for heads, kv, length in ((8, 2, 200), (16, 1, 129), (3, 3, 1)):
    q, k, v = make(2, heads, length), make(2, kv, length), make(2, kv, length)
    kernel.unified_prefill(q, k, v, heads, kv, return_lse=True)
    kernel.unified_extend(q[:, :, -(length + 1) // 2 :], k, v, heads, kv)
    lengths = None if {every_lane} else torch.tensor([length, (length + 1) // 2], dtype=torch.int32).cuda()
    kernel.unified_decode(q[:, :, -1:], k, v, heads, kv, lengths=lengths, return_lse=True)
big = make(40, 2, 300)
kernel.unified_decode(make(40, 8, 1), big, big, 8, 2)
kernel.unified_decode(make(1, 80, 1), make(1, 80, 257), make(1, 80, 257), 80, 80)
for batch, heads, kv in ((25, 4, 2), (25, 32, 2), (40, 32, 2)):  # two CTAs a KV head; one, and 16 query heads
    kernel.unified_decode(make(batch, heads, 1), make(batch, kv, 300), make(batch, kv, 300), heads, kv)
cu = torch.tensor([0, 1, 130, 200], dtype=torch.int32).cuda()
kernel.unified_prefill(make(200, 8), make(200, 2), make(200, 2), 8, 2, cu_seqlens=cu, max_seqlen=129)
torch.cuda.synchronize()
"""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    try:
        done = subprocess.run([*command, sys.executable, "-c", program], cwd=repo, capture_output=True, text=True, timeout=240)
    except FileNotFoundError:
        pytest.skip("compute-sanitizer is not installed")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
