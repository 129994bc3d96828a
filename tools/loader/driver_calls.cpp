// The one function of the CUDA driver that a kernel may call, linked into every CUDA library by the loader.
//
// A Hopper kernel needs tensor-map descriptors, and only the driver makes them. cudaGetDriverEntryPoint would find it, and
// any other function of the driver by the text of its name, so a candidate may not call that one: it calls
// cuTensorMapEncodeTiled as if it were linked with libcuda, and gets this.
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const Encode encode = find();
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle, promotion, fill);
}
