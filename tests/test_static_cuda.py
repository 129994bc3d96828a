"""Static evidence of CUDA candidates: calls, device code, its identity and its census. Needs nvcc, no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.core.config import Target, load_target
from tools.core.errors import BuildError, UserError
from tools.evaluator import census
from tools.evaluator.static import inspect, refusal
from tools.loader import elf, sources
from tools.loader.build import Built, build
from tools.loader.cubin import device_code
from tools.loader.elf import Elf
from tools.loader.toolchain import find_cutlass, find_nvcc


def there(find: Callable[[], object]) -> bool:
    try:
        find()
    except UserError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not there(find_nvcc), reason="no nvcc on this machine")
LAUNCH = "int n = (long)s; k<<<1, 32, 0, (cudaStream_t)s>>>((float*)p, n)"
PLAIN = "namespace { __global__ void k(float* x, int n) { x[threadIdx.x] = exp2f(x[n]) + float(n); } }"
ENTRY = 'extern "C" int unified_prefill(const void* p, void* s) { BODY; return 0; }\n'


def on_cuda(folder: Path, head: str, body: str = LAUNCH, target: Target | None = None) -> Built:
    """A candidate of a few lines. `body` stands in an entry point."""
    path = folder / "candidate.cu"
    path.write_text(f"#include <cuda_runtime.h>\n{head}\n{ENTRY.replace('BODY', body)}")
    return build(target or load_target("h200"), path, fresh=folder / f"build-{len(list(folder.iterdir()))}")


@needs_nvcc
@pytest.mark.parametrize(("name", "kernels"), [("h200", 11), ("a100", 7)])
def test_packaged_cuda_kernel_passes(name: str, kernels: int) -> None:
    built = build(load_target(name))
    evidence = inspect(built, "cuda", built)
    assert refusal(evidence) is None
    assert len(evidence["kernels"]) == len(built.resources) == kernels
    for kernel in evidence["kernels"]:
        (said,) = [use for use in built.resources if use["kernel"] == kernel["name"]]
        assert kernel["registers"] == said["registers"]
        assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == 0
        assert kernel["parent"] == "identical"
        if kernel["census"]:
            assert kernel["census"]["mma"] >= 64 and kernel["census"]["exponential"] > 0
    assert evidence["ptx"] == (["compute_80"] if name == "a100" else [])
    assert evidence["host_code"] == "identical" and evidence["removed_kernels"] == []
    assert refusal({**evidence, "device": "cpu"}) is not None


ASKS = {
    "cudaMalloc": "cudaMalloc((void**)p, 4)", "cudaHostAlloc": "cudaHostAlloc((void**)p, 4, 0)",
    "cudaStreamCreateWithFlags": "cudaStreamCreateWithFlags((cudaStream_t*)p, 1)",
    "cudaStreamIsCapturing": "cudaStreamIsCapturing((cudaStream_t)s, (cudaStreamCaptureStatus*)p)",
    "cudaGraphLaunch": "cudaGraphLaunch((cudaGraphExec_t)p, (cudaStream_t)s)", "cudaDeviceSynchronize": "cudaDeviceSynchronize()",
    "cudaStreamSynchronize": "cudaStreamSynchronize((cudaStream_t)s)",
    "cudaDeviceSetLimit": "cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 1 << 20)",
    "cudaCtxResetPersistingL2Cache": "cudaCtxResetPersistingL2Cache()", "cudaEventRecord": "cudaEventRecord((cudaEvent_t)p, 0)",
    "cudaStreamSetAttribute": "cudaStreamSetAttribute((cudaStream_t)s, cudaLaunchAttributeAccessPolicyWindow, "
                              "(cudaStreamAttrValue*)p)",
    "cudaLaunchHostFunc": "cudaLaunchHostFunc((cudaStream_t)s, (cudaHostFn_t)p, s)",
    "cudaMemcpyAsync": "cudaMemcpyAsync(s, p, 4, cudaMemcpyDefault, 0)",
    "cudaGetDriverEntryPointByVersion": 'cudaGetDriverEntryPointByVersion("cuMemAlloc", (void**)p, 12000, 0, nullptr)',
    "cudaIpcOpenMemHandle": "cudaIpcOpenMemHandle((void**)p, cudaIpcMemHandle_t{}, 1)",
    "cublasGemmEx": "cublasGemmEx(p)", "pthread_create": "pthread_create((pthread_t*)p, nullptr, nullptr, s)",
}  # fmt: skip


@needs_nvcc
def test_cuda_calls_that_no_kernel_needs_are_refused_by_name(tmp_path: Path) -> None:
    head = f'#include <pthread.h>\nextern "C" void cublasGemmEx(const void*);\n{PLAIN}'
    evidence = inspect(on_cuda(tmp_path, head, "; ".join([LAUNCH, *ASKS.values()])), "cuda")
    assert set(evidence["refused_imports"]) == set(ASKS)
    for name in ASKS:
        assert f"it asks other libraries for {name}," in str(refusal({**evidence, "refused_imports": [name]}))
    assert refusal({**evidence, "refused_imports": []}) is None


@needs_nvcc
def test_device_code_that_calls_out_or_keeps_state_is_refused(tmp_path: Path) -> None:
    head = (
        "#include <cassert>\n#include <cstdio>\nnamespace { __device__ int seen; __device__ char tag; __constant__ float table[4] = {1, 2, 3, 4};\n"
        '__global__ void k(float* x, int n) { assert(n > 3); x[1] = table[n] + tag; if (seen++ > n) printf("%d", n); '
        "*(void**)x = malloc(n); } }"
    )
    evidence = inspect(on_cuda(tmp_path, head), "cuda")
    assert {"vprintf", "malloc"} <= set(evidence["device_imports"])
    assert "its device code calls" in str(refusal(evidence))
    reason = str(refusal({**evidence, "device_imports": ["__assertfail"]}))
    assert "it keeps the variable" in reason and "seen" in reason
    others = [variable for variable in evidence["device_variables"] if "seen" not in variable["name"]]
    assert {variable["name"] for variable in others if variable["bytes"] > 1} & {"$str", "__unnamed_1"}
    assert refusal({**evidence, "device_imports": ["__assertfail"], "device_variables": others}) is None
    assert "it keeps the variable" in str(refusal({**evidence, "device_imports": [], "device_variables": others}))


@needs_nvcc
def test_device_code_is_only_where_the_compiler_puts_it(tmp_path: Path) -> None:
    """Device code in a constant, registered by hand."""
    honest = inspect(on_cuda(tmp_path, PLAIN), "cuda")
    assert refusal(honest) is None and honest["registrations"] == 1
    head = (
        "static const unsigned blob[] __attribute__((used)) = {0xBA55ED50u, 0x00100001u, 0u, 0u};\n"
        'extern "C" void** __cudaRegisterFatBinary(void*);\n' + PLAIN
    )
    evidence = inspect(on_cuda(tmp_path, head, f"{LAUNCH}; __cudaRegisterFatBinary((void*)blob)"), "cuda")
    assert refusal(evidence) == "it hides a code image in section .rodata"
    assert refusal({**evidence, "hidden_images": []}) == "it registers device code 2 times"


@needs_nvcc
def test_no_pass_of_the_cuda_compiler_reads_undeclared_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device pass alone, the host pass alone, and the host's assembler."""
    monkeypatch.setattr(sources, "undeclared_read", lambda data: None)
    (tmp_path / "far.h").write_text("#define SECRET 1\n")
    for text in (f'#ifdef __CUDA_ARCH__\n#include "{tmp_path}/far.h"\n#endif', f'#ifndef __CUDA_ARCH__\n#include "{tmp_path}/far.h"\n#endif',
                 f'#ifndef __CUDA_ARCH__\nasm(R"(.incbin "{tmp_path}/far.h")");\n#endif'):  # fmt: skip
        with pytest.raises(BuildError, match=r"candidate.cu: includes .*far.h, which the config does not declare"):
            on_cuda(tmp_path, f"{text}\n{PLAIN}")


@needs_nvcc
def test_foreign_bytes_among_the_device_images_are_refused(tmp_path: Path) -> None:
    built = on_cuda(tmp_path, PLAIN + '\nasm(".section .nv_fatbin,\\"a\\"\\n .quad 1, 2, 3\\n .text");')
    with pytest.raises(UserError, match=r"kernel.o: malformed: .nv_fatbin holds something else than device images"):
        inspect(built, "cuda")


@needs_nvcc
def test_kernels_of_a_parent_are_compared(tmp_path: Path) -> None:
    """Neither a comment nor a line table nor a new module id changes a kernel; an instruction or a constant does."""
    two = PLAIN + "namespace { __global__ void other(float* x) { x[0] += 1; } }"
    launch = LAUNCH + "; other<<<1, 1, 0, (cudaStream_t)s>>>((float*)p)"
    parent = on_cuda(tmp_path, two, launch)
    moved = on_cuda(tmp_path, f"// a comment\nstatic int unused() {{ return 1; }}\n{two}", f"unused(); {launch}")
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {Path(__file__).parents[1]}/experimental/h200/config.yaml\nbuild: {{flags: [-O3]}}\n")
    plain = on_cuda(tmp_path, two, launch, load_target(config=config))
    for same in (moved, plain):
        assert same.key != parent.key
        evidence = inspect(same, "cuda", parent)
        assert [kernel["parent"] for kernel in evidence["kernels"]] == ["identical", "identical"]
        assert evidence["removed_kernels"] == []
    edited = two.replace("+= 1", "+= 2").replace("void k(", "void fresh(")
    evidence = inspect(on_cuda(tmp_path, edited, launch.replace("k<<<", "fresh<<<")), "cuda", parent)
    states = {kernel["name"].split("::")[-1].split("(")[0]: kernel["parent"] for kernel in evidence["kernels"]}
    assert states == {"fresh": "new", "other": "changed"}
    (removed,) = evidence["removed_kernels"]
    assert "::k(float*, int) [sm_90]" in removed
    assert inspect(parent, "cuda")["host_code"] is None


@needs_nvcc
def test_a_disassembler_that_leaves_instructions_out_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = on_cuda(tmp_path, PLAIN)
    (kernel,) = inspect(built, "cuda")["kernels"]
    symbol = device_code(Elf(built.object.read_bytes(), "kernel.o")).kernels[0].symbol
    for missing, expected in ((0, True), (1, False)):
        counts = dict.fromkeys(census.CLASSES, 0) | {"nop": 0, "total": kernel["code_bytes"] // 16 - missing}
        monkeypatch.setattr(census, "count", lambda images, counts=counts: ({("sm_90", symbol): counts}, "nvdisasm"))
        evidence = inspect(built, "cuda")
        assert (evidence["kernels"][0]["census"] is not None) is expected
        assert evidence["census"].startswith("nvdisasm" if expected else "unavailable: nvdisasm does not show all")


TENSOR_MAP = """
#include <cuda.h>
__global__ void k(const __grid_constant__ CUtensorMap map, float* x) { x[0] = ((const char*)&map)[threadIdx.x]; }
"""


@needs_nvcc
def test_tensor_maps_need_no_way_to_the_driver(tmp_path: Path) -> None:
    body = """
  CUtensorMap map;
  cuuint64_t size[2] = {64, 64}, stride[1] = {128};
  cuuint32_t box[2] = {64, 64}, step[2] = {1, 1};
  if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)p, size, stride, box, step,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) return 1;
  k<<<1, 32, 0, (cudaStream_t)s>>>(map, (float*)p)"""
    built = on_cuda(tmp_path, TENSOR_MAP, body)
    evidence = inspect(built, "cuda")
    assert "cuTensorMapEncodeTiled" in evidence["imports"]
    assert refusal(evidence) is None
    library = Elf(built.library.read_bytes(), "kernel.so")
    assert not [name for name in library.undefined(elf.SHT_DYNSYM) if name.startswith("cu")]  # nothing is left open


CUTE = """
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cutlass/arch/barrier.h>
using namespace cute;
template <class Tma, class Shared>
__global__ void load(const __grid_constant__ Tma tma, float* out, Shared layout) {
  __shared__ alignas(128) float tile[64 * 32];
  __shared__ alignas(16) uint64_t full;
  auto all = tma.get_tma_tensor(make_shape(Int<256>{}, Int<32>{}));
  auto mine = local_tile(all, make_shape(Int<64>{}, Int<32>{}), make_coord(blockIdx.x, _0{}));
  Tensor shared = make_tensor(make_smem_ptr(tile), layout);
  auto [from, to] = tma_partition(tma, Int<0>{}, Layout<_1>{}, group_modes<0, 2>(shared), group_modes<0, 2>(mine));
  if (threadIdx.x == 0) {
    cutlass::arch::ClusterTransactionBarrier::init(&full, 1);
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&full, sizeof(tile));
    copy(tma.with(full), from, to);
  }
  __syncthreads();
  cutlass::arch::ClusterTransactionBarrier::wait(&full, 0);
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[threadIdx.x];
}
"""
CUTE_BODY = """
  auto layout = Layout<Shape<_64, _32>, Stride<_32, _1>>{};
  auto global = make_tensor(make_gmem_ptr((float*)p), make_shape(Int<256>{}, Int<32>{}), make_stride(Int<32>{}, _1{}));
  auto tma = make_tma_copy(SM90_TMA_LOAD{}, global, layout, make_shape(Int<64>{}, Int<32>{}), _1{});
  cudaLaunchConfig_t config = {};
  config.gridDim = 4, config.blockDim = 128, config.stream = (cudaStream_t)s;
  return cudaLaunchKernelEx(&config, load<decltype(tma), decltype(layout)>, tma, (float*)p, layout)"""


@needs_nvcc
@pytest.mark.skipif(
    not there(find_cutlass), reason="no CUTLASS headers: set CUTLASS_INCLUDE_DIR, or pip install nvidia-cutlass"
)
def test_a_cutlass_kernel_passes(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"extends: {Path(__file__).parents[1]}/experimental/h200/config.yaml\n"
        "build: {flags: [-O3, --expt-relaxed-constexpr], headers: [cutlass]}\n"
    )
    evidence = inspect(on_cuda(tmp_path, CUTE, CUTE_BODY, load_target(config=config)), "cuda")
    assert refusal(evidence) is None
    assert "cuTensorMapEncodeTiled" in evidence["imports"] and "std" not in "".join(evidence["refused_imports"])
    (kernel,) = evidence["kernels"]
    assert not kernel["census"] or kernel["census"]["tma"] == 1
