// The matrix products of the contract as warp-group instructions: the same k16 slices, ascending, in one fp32 accumulator.
// They give the bits of mma_m16n8k16.
#pragma once
#include <cstdint>
#define ACC8(a, o) \
  "+f"(a[o]), "+f"(a[o + 1]), "+f"(a[o + 2]), "+f"(a[o + 3]), "+f"(a[o + 4]), "+f"(a[o + 5]), "+f"(a[o + 6]), "+f"(a[o + 7])
#define ACC64(a) ACC8(a, 0), ACC8(a, 8), ACC8(a, 16), ACC8(a, 24), ACC8(a, 32), ACC8(a, 40), ACC8(a, 48), ACC8(a, 56)
#define LIST64                                                                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"    \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%" \
  "62,%63"
namespace numerics {
// d = a b (ADD false) or d + a b over one k16 slice; d: 64 rows x 128, a and b in shared memory, k along their rows.
template <bool ADD>
__device__ __forceinline__ void wgmma_rows(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LIST64 "}, %64, %65, %66, 1, 1, 0, 0;"
               : ACC64(d)
               : "l"(a), "l"(b), "n"(int(ADD)));
}
// d += a b over one k16 slice; a in registers, b in shared memory with k down its rows.
__device__ __forceinline__ void wgmma_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LIST64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : ACC64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The largest of floats, of which at least one is not negative, by their bits: these are ordered as the floats are. What this
// leaves of maximum() is the flush of a subnormal result, which every use of a maximum does again, and NaN: it may become the
// result, but weight, sum and output of its row are NaN either way.
__device__ __forceinline__ int maximum_above_zero(int a, int b, int c) { return __vimax3_s32(a, b, c); }
__device__ __forceinline__ int maximum_above_zero(int a, int b) { return max(a, b); }
}  // namespace numerics
#undef ACC8
#undef ACC64
#undef LIST64
