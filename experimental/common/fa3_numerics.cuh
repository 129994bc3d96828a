// FlashAttention-3's forward arithmetic on Hopper, for bf16 and head dim 128: the contract and the one place where its
// exponentials, maxima, sums, rescales, roundings and matrix products are written. Kernels of this contract include it.
//
// Every fp32 multiply, add and fused multiply-add is round-to-nearest; these, the maxima and the approximations (ex2, rcp,
// lg2) flush subnormals to zero, as the library's machine code does; tensor cores keep them. One query row is one
// sequential reduction:
//
//   step           operation                                                    code
//   tiles          128 keys, anchored at key 0, from the row's last down to 0   BLOCK_N, loops of both kernels
//   scores         one fp32 accumulator from 0, k16 slices of dims ascending    mma_m16n8k16
//   mask           unseen keys are -inf; V past the end counts as 0             mask_row, zero fill of load_tile
//   maximum        m' = max(m, tile maximum) of raw scores, m = -inf at first   numerics::maximum
//   frame          f = m', or 0 where m' = -inf;  h = f * C2                    numerics::frame, scaled
//   rescale        alpha = ex2((m - f) * C2)                                    numerics::rescale
//   probability    p = ex2(fma(s, C2, -h))                                      numerics::probability
//   row sum        quad lane c sums columns 8j + 2c, 8j + 2c + 1 ascending,     numerics::sum_first, sum_next
//                  unrounded p: l = fma(l, alpha, p_0), then + p_1, + p_2 ...
//   output         O = O * alpha, then O += P V; P rounded to bf16 (nearest     numerics::multiply, pack_bf16,
//                  even), k16 slices of keys ascending into the accumulator     mma_m16n8k16
//   end            l = (l_0 + l_2) + (l_1 + l_3); out = bf16(O * rcp(l))        numerics::quad_sum, inverse
//   lse            fma(C2 * ln 2, m, lg2(l) * ln 2)                             numerics::log_sum_exp
//   no keys        l = 0: out = 0, lse = -inf                                   numerics::inverse, log_sum_exp
//
// The first visited tile needs no rescale: alpha = 0 acts on zeros. A row's leading tile may be fully masked (extend at
// an unaligned offset): m stays -inf, p = 0, alpha = 0, so with finite V visiting or skipping it gives the same bits.
// What may vary freely: which CTA does what, how many there are, and in which order independent work is issued.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace numerics {

constexpr int BLOCK_N = 128;  // keys of a tile: contract, not tile policy
constexpr float MINUS_INFINITY = -__builtin_huge_valf();
constexpr float C2 = 0x1.0527dcp-3f;   // fp32(fp32(1 / sqrt(128)) * fp32(log2 e))
constexpr float LN2 = 0x1.62e43p-1f;   // fp32(ln 2)

__device__ __forceinline__ float multiply(float a, float b) {
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float add(float a, float b) {
  float y;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float subtract(float a, float b) {
  float y;
  asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float fused(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
__device__ __forceinline__ float maximum(float a, float b) {
  float y;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Maximum of the four lanes that share a row; a maximum has no order.
__device__ __forceinline__ float quad_maximum(float x) {
  x = maximum(x, __shfl_xor_sync(~0u, x, 2));
  return maximum(x, __shfl_xor_sync(~0u, x, 1));
}
__device__ __forceinline__ float frame(float m) { return m == MINUS_INFINITY ? 0.f : m; }
__device__ __forceinline__ float scaled(float f) { return multiply(f, C2); }
__device__ __forceinline__ float rescale(float m_before, float f) { return exp2(multiply(subtract(m_before, f), C2)); }
__device__ __forceinline__ float probability(float s, float h) { return exp2(fused(s, C2, -h)); }
__device__ __forceinline__ float sum_first(float l, float alpha, float p) { return fused(l, alpha, p); }
__device__ __forceinline__ float sum_next(float l, float p) { return add(l, p); }
__device__ __forceinline__ float quad_sum(float l) {
  l = add(l, __shfl_xor_sync(~0u, l, 2));
  return add(l, __shfl_xor_sync(~0u, l, 1));
}
__device__ __forceinline__ bool has_sum(float l) { return l < 0.f || l > 0.f; }
__device__ __forceinline__ float inverse(float l) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(l));
  return has_sum(l) ? y : 0.f;
}
__device__ __forceinline__ float log_sum_exp(float m, float l) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(l));
  return has_sum(l) ? fused(multiply(C2, LN2), m, multiply(y, LN2)) : MINUS_INFINITY;
}
// Two values rounded to bf16, nearest even; `low` takes the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// d += a b over one k16 slice. Row r of a lane's accumulator: d[2r], d[2r + 1] are row lane / 4 + 8r, columns 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
}  // namespace numerics
