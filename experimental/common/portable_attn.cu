// Portable unified attention for sm_80 and later: mma.sync.m16n8k16 and cp.async, bf16, causal, GQA, head dim 128.
//
// Contract (FlashAttention-3's forward arithmetic on Hopper; every fp32 operation is round-to-nearest and flushes
// subnormal operands and results to zero, as the library's machine code does). One query row is one sequential reduction:
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
// an unaligned offset): m stays -inf, p = 0, alpha = 0, so visiting or skipping it gives the same bits.
// What may vary freely: which CTA does what, how many there are, and in which order independent work is issued.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attn_abi.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_N = 128;  // keys of a tile: contract, not tile policy
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int QUERY_SLICES = HEAD_DIM / MMA_K;
constexpr int KEY_SLICES = BLOCK_N / MMA_K;
constexpr int NUM_WARPS = 8;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int MAX_GROUP = 16;                    // query heads that share a KV head: the M of one MMA
constexpr int CHUNK = 8;                         // bf16 elements of a 16-byte copy
constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// ---------------------------------------------------------------------------------------------------------- numerics
namespace numerics {
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
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
}  // namespace numerics

// ------------------------------------------------------------------------------------------------ loads and addresses
// A tile in shared memory: rows of ROW_CHUNKS 16-byte chunks, a row's chunks permuted so that eight rows of one column
// lie in eight different bank groups.
template <unsigned ROW_CHUNKS>
__device__ __forceinline__ unsigned tile_offset(unsigned row, unsigned chunk) {
  constexpr unsigned SPAN = ROW_CHUNKS < 8 ? ROW_CHUNKS : 8;
  constexpr unsigned ROWS_PER_BANK_CYCLE = 8 / SPAN;
  return (row * ROW_CHUNKS + (chunk ^ (row / ROWS_PER_BANK_CYCLE % SPAN))) * 16;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory; zeros where the source row does not exist (source is then not read).
__device__ __forceinline__ void copy_async(uint32_t destination, const void* source, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// BLOCK_N rows of COLUMNS dims from `source` into a tile; rows at or past `rows_left` become zero and are not read.
template <int COLUMNS>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16* source, int64_t row_stride, int64_t rows_left) {
  constexpr unsigned ROW_CHUNKS = COLUMNS / CHUNK, ROWS_PER_PASS = NUM_THREADS / ROW_CHUNKS;
  static_assert(NUM_THREADS % ROW_CHUNKS == 0 && BLOCK_N % ROWS_PER_PASS == 0, "every thread copies one chunk a pass");
  const unsigned chunk = threadIdx.x % ROW_CHUNKS, row0 = threadIdx.x / ROW_CHUNKS;
  const bf16* from = source + row0 * row_stride + chunk * CHUNK;
#pragma unroll
  for (unsigned pass = 0; pass < BLOCK_N / ROWS_PER_PASS; ++pass, from += ROWS_PER_PASS * row_stride) {
    const unsigned row = row0 + pass * ROWS_PER_PASS;
    const bool exists = row < rows_left;
    copy_async(tile + tile_offset<ROW_CHUNKS>(row, chunk), exists ? from : source, exists);
  }
}

// The A operand of 16 query rows: lane / 4 and lane / 4 + 8. Rows that do not exist are zero and are not read.
__device__ __forceinline__ void load_query(uint32_t (&q)[QUERY_SLICES][4], const bf16* row0, const bf16* row1, int lane) {
  const int column = 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < QUERY_SLICES; ++s) {
    q[s][0] = row0 ? *reinterpret_cast<const uint32_t*>(row0 + s * MMA_K + column) : 0u;
    q[s][1] = row1 ? *reinterpret_cast<const uint32_t*>(row1 + s * MMA_K + column) : 0u;
    q[s][2] = row0 ? *reinterpret_cast<const uint32_t*>(row0 + s * MMA_K + column + 8) : 0u;
    q[s][3] = row1 ? *reinterpret_cast<const uint32_t*>(row1 + s * MMA_K + column + 8) : 0u;
  }
}

// Address of a lane's row for load_matrices on K: one x4 load feeds two n8 blocks (16 keys) of one k16 slice of dims.
__device__ __forceinline__ uint32_t key_fragment(uint32_t tile, int key_slice, int dim_slice, int lane) {
  const int row = key_slice * 16 + ((lane >> 4) << 3) + (lane & 7);
  return tile + tile_offset<HEAD_DIM / CHUNK>(row, 2 * dim_slice + ((lane >> 3) & 1));
}

// Scores at or past `visible` (a key index relative to the tile) become -inf. s holds a row's two columns of n8 block `block`.
__device__ __forceinline__ void mask_row(float& s0, float& s1, int block, int lane, int64_t visible) {
  const int column = block * MMA_N + 2 * (lane % 4);
  if (column >= visible) s0 = MINUS_INFINITY;
  if (column + 1 >= visible) s1 = MINUS_INFINITY;
}

// The pointers and sizes of one sequence, with 64-bit offsets throughout.
struct Sequence {
  int64_t queries, keys;       // rows of q; keys that may be read
  int64_t first_row;           // packed: row of the sequence's first token, else 0
  int64_t batch;               // index for strides (0 where packed)
};
__device__ __forceinline__ Sequence sequence_of(const UnifiedAttnParams& p, int64_t b) {
  if (p.cu_seqlens) {
    const int64_t begin = p.cu_seqlens[b], end = p.cu_seqlens[b + 1];
    return {end - begin, end - begin, begin, 0};
  }
  int64_t keys = p.seqlen_kv;
  if (p.lengths) {
    const int64_t given = p.lengths[b];
    keys = given < 0 ? 0 : given < keys ? given : keys;
  }
  return {p.seqlen_q, keys, 0, b};
}
__device__ __forceinline__ int64_t offset(const int64_t (&stride)[3], const Sequence& s, int64_t head) {
  return s.batch * stride[0] + head * stride[1] + s.first_row * stride[2];
}

// ----------------------------------------------------------------------------------------- full sequences and extend
constexpr int BLOCK_M = NUM_WARPS * MMA_M;
struct PrefillShared {
  alignas(128) uint8_t sK[2][TILE_BYTES];
  alignas(128) uint8_t sV[2][TILE_BYTES];
};

// Which query block, sequence and head a CTA owns. Blocks with the most keys start first; heads are taken in sections
// whose K and V stay in L2 while their blocks run.
struct PrefillSchedule {
  int64_t blocks, kv_heads, section;  // query blocks a sequence; batch * heads_kv; KV heads a section
};
struct PrefillWork {
  int64_t block, batch, head_q, head_kv;
};
__device__ __forceinline__ PrefillWork prefill_work(const UnifiedAttnParams& p, const PrefillSchedule& s, int64_t index) {
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t per_section = s.section * group * s.blocks;
  const int64_t section = index / per_section;
  const int64_t rest = index - section * per_section;
  const int64_t left = s.kv_heads - section * s.section;
  const int64_t heads = (left < s.section ? left : s.section) * group;
  const int64_t head = rest % heads;
  const int64_t kv = section * s.section + head / group;
  const int64_t head_kv = kv % p.heads_kv;
  return {s.blocks - 1 - rest / heads, kv / p.heads_kv, head_kv * group + head % group, head_kv};
}

__global__ void __launch_bounds__(NUM_THREADS, 1) prefill_kernel(const UnifiedAttnParams p, const PrefillSchedule schedule) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  PrefillShared& shared = *reinterpret_cast<PrefillShared*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PrefillWork work = prefill_work(p, schedule, blockIdx.x);
  const Sequence seq = sequence_of(p, work.batch);
  const int64_t block_row = work.block * BLOCK_M;
  if (block_row >= seq.queries) return;

  const bf16* gQ = static_cast<const bf16*>(p.q) + offset(p.q_stride, seq, work.head_q);
  const bf16* gK = static_cast<const bf16*>(p.k) + offset(p.k_stride, seq, work.head_kv);
  const bf16* gV = static_cast<const bf16*>(p.v) + offset(p.v_stride, seq, work.head_kv);

  // Row i of the sequence sees keys 0 .. keys - queries + i.
  const int64_t warp_row = block_row + warp * MMA_M;
  const int64_t row[2] = {warp_row + lane / 4, warp_row + lane / 4 + 8};
  const int64_t seen_before = seq.keys - seq.queries;  // keys that row -1 would see; may be negative
  const int64_t block_end = block_row + BLOCK_M < seq.queries ? block_row + BLOCK_M : seq.queries;
  const int64_t block_visible = seen_before + block_end;
  const int64_t warp_visible_first = seen_before + warp_row + 1, warp_visible_last = seen_before + warp_row + MMA_M;

  uint32_t q[QUERY_SLICES][4];
  load_query(q, row[0] < seq.queries ? gQ + row[0] * p.q_stride[2] : nullptr,
             row[1] < seq.queries ? gQ + row[1] * p.q_stride[2] : nullptr, lane);

  float o[HEAD_DIM / MMA_N][4] = {};
  float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.f, 0.f};

  const int64_t tiles = block_visible <= 0 ? 0 : (block_visible + BLOCK_N - 1) / BLOCK_N;
  auto load = [&](int64_t tile, int stage) {
    const int64_t first_key = tile * BLOCK_N;
    load_tile<HEAD_DIM>(shared_address(shared.sK[stage]), gK + first_key * p.k_stride[2], p.k_stride[2], seq.keys - first_key);
    load_tile<HEAD_DIM>(shared_address(shared.sV[stage]), gV + first_key * p.v_stride[2], p.v_stride[2], seq.keys - first_key);
    commit_copies();
  };
  if (tiles > 0) load(tiles - 1, 0);

  int stage = 0;
  for (int64_t tile = tiles - 1; tile >= 0; --tile, stage ^= 1) {
    wait_copies<0>();
    __syncthreads();  // this tile has arrived for every thread, and every warp has left the stage that is loaded next
    if (tile > 0) load(tile - 1, stage ^ 1);
    const int64_t first_key = tile * BLOCK_N;
    if (first_key >= warp_visible_last) continue;  // fully masked for this warp: changes nothing (see the contract)

    const uint32_t sK = shared_address(shared.sK[stage]), sV = shared_address(shared.sV[stage]);
    float s[BLOCK_N / MMA_N][4] = {};
#pragma unroll
    for (int d = 0; d < QUERY_SLICES; ++d) {
#pragma unroll
      for (int n = 0; n < KEY_SLICES; ++n) {
        uint32_t k[4];
        load_matrices(k, key_fragment(sK, n, d, lane));
        numerics::mma_m16n8k16(s[2 * n], q[d], k[0], k[1]);
        numerics::mma_m16n8k16(s[2 * n + 1], q[d], k[2], k[3]);
      }
    }
    if (first_key + BLOCK_N > warp_visible_first) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t visible = seen_before + row[r] + 1 - first_key;
#pragma unroll
        for (int n = 0; n < BLOCK_N / MMA_N; ++n) mask_row(s[n][2 * r], s[n][2 * r + 1], n, lane, visible);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s[0][2 * r];
#pragma unroll
      for (int n = 0; n < BLOCK_N / MMA_N; ++n) top = numerics::maximum(top, numerics::maximum(s[n][2 * r], s[n][2 * r + 1]));
      const float m_new = numerics::maximum(m[r], numerics::quad_maximum(top));
      const float f = numerics::frame(m_new), h = numerics::scaled(f), alpha = numerics::rescale(m[r], f);
      m[r] = m_new;
#pragma unroll
      for (int n = 0; n < BLOCK_N / MMA_N; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[n][e] = numerics::probability(s[n][e], h);
          l[r] = n == 0 && e == 2 * r ? numerics::sum_first(l[r], alpha, s[n][e]) : numerics::sum_next(l[r], s[n][e]);
        }
      }
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_N; ++d) {
        o[d][2 * r] = numerics::multiply(o[d][2 * r], alpha);
        o[d][2 * r + 1] = numerics::multiply(o[d][2 * r + 1], alpha);
      }
    }
#pragma unroll
    for (int n = 0; n < KEY_SLICES; ++n) {
      uint32_t probability[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) probability[i] = numerics::pack_bf16(s[2 * n + i / 2][2 * (i % 2)], s[2 * n + i / 2][2 * (i % 2) + 1]);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d) {
        uint32_t v[4];
        const int key = n * 16 + (lane & 15), chunk = 2 * d + (lane >> 4);
        load_matrices_transposed(v, sV + tile_offset<HEAD_DIM / CHUNK>(key, chunk));
        numerics::mma_m16n8k16(o[2 * d], probability, v[0], v[1]);
        numerics::mma_m16n8k16(o[2 * d + 1], probability, v[2], v[3]);
      }
    }
  }

  bf16* gO = static_cast<bf16*>(p.o) + offset(p.o_stride, seq, work.head_q);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = numerics::quad_sum(l[r]), inv = numerics::inverse(sum);
    if (row[r] >= seq.queries) continue;
    uint32_t* out = reinterpret_cast<uint32_t*>(gO + row[r] * p.o_stride[2]) + lane % 4;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d)
      out[d * MMA_N / 2] = numerics::pack_bf16(numerics::multiply(o[d][2 * r], inv), numerics::multiply(o[d][2 * r + 1], inv));
    if (p.lse && lane % 4 == 0)
      p.lse[seq.batch * p.lse_stride[0] + work.head_q * p.lse_stride[1] + seq.first_row + row[r]] = numerics::log_sum_exp(m[r], sum);
  }
}

// ------------------------------------------------------------------------------------------------- one-token decode
// A CTA owns one sequence, one KV head and SLICE output dims; the group's query heads are the 16 rows of the MMA. Every
// CTA computes all scores of its rows; the eight warps share a tile's keys for the scores and the SLICE dims for P V.
template <int SLICE>
struct DecodeTraits {
  static constexpr int NUM_STAGES = SLICE == 128 ? 2 : 3;  // what 163 KiB of shared memory hold
  static constexpr int VALUE_BYTES = BLOCK_N * SLICE * 2;
  static constexpr int VALUE_WARPS = SLICE / MMA_N < NUM_WARPS ? SLICE / MMA_N : NUM_WARPS;
  static constexpr int WARP_DIMS = SLICE / VALUE_WARPS;  // 8 or 16
};
constexpr int CHAIN = BLOCK_N / 4;           // probabilities of a tile that one quad lane sums
constexpr int CHAIN_STRIDE = CHAIN + 4;      // floats; keeps 16-byte reads of different chains in different banks
template <int SLICE>
struct DecodeShared {
  alignas(128) uint8_t sK[DecodeTraits<SLICE>::NUM_STAGES][TILE_BYTES];
  alignas(128) uint8_t sV[DecodeTraits<SLICE>::NUM_STAGES][DecodeTraits<SLICE>::VALUE_BYTES];
  alignas(16) uint4 sP[KEY_SLICES][32];                        // bf16 P as A fragments: slice, lane
  alignas(16) float sChain[MAX_GROUP * 4][CHAIN_STRIDE];       // fp32 p: row and quad lane, ascending columns
  float sMax[NUM_WARPS][MMA_M];
  float sSum[MMA_M];
};

template <int SLICE>
__global__ void __launch_bounds__(NUM_THREADS, 1) decode_kernel(const UnifiedAttnParams p) {
  using Traits = DecodeTraits<SLICE>;
  constexpr int STAGES = Traits::NUM_STAGES, WARP_DIMS = Traits::WARP_DIMS, WARP_BLOCKS = WARP_DIMS / MMA_N;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<DecodeShared<SLICE>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  constexpr int SLICES = HEAD_DIM / SLICE;
  const int64_t kv = blockIdx.x / SLICES, head_kv = kv % p.heads_kv, head_q = head_kv * group;
  const int slice = blockIdx.x % SLICES;
  const Sequence seq = sequence_of(p, kv / p.heads_kv);
  const int head[2] = {lane / 4, lane / 4 + 8};  // this lane's rows of an accumulator, as heads of the group

  const bf16* gQ = static_cast<const bf16*>(p.q) + offset(p.q_stride, seq, head_q);
  const bf16* gK = static_cast<const bf16*>(p.k) + offset(p.k_stride, seq, head_kv);
  const bf16* gV = static_cast<const bf16*>(p.v) + offset(p.v_stride, seq, head_kv) + slice * SLICE;
  const int64_t tiles = (seq.keys + BLOCK_N - 1) / BLOCK_N;

  // Step i handles tile tiles - 1 - i. One group of copies a step, STAGES steps ahead: K of step i + STAGES and V of
  // step i + STAGES - 1, so that K is there one step before V, when its scores are due.
  auto load = [&](int64_t step_k, int stage_k, int64_t step_v, int stage_v) {
    if (step_k < tiles) {
      const int64_t first_key = (tiles - 1 - step_k) * BLOCK_N;
      load_tile<HEAD_DIM>(shared_address(shared.sK[stage_k]), gK + first_key * p.k_stride[2], p.k_stride[2], seq.keys - first_key);
    }
    if (step_v >= 0 && step_v < tiles) {
      const int64_t first_key = (tiles - 1 - step_v) * BLOCK_N;
      load_tile<SLICE>(shared_address(shared.sV[stage_v]), gV + first_key * p.v_stride[2], p.v_stride[2], seq.keys - first_key);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i) load(i, i, i - 1, i - 1);

  uint32_t q[QUERY_SLICES][4];
  load_query(q, head[0] < group ? gQ + head[0] * p.q_stride[1] : nullptr,
             head[1] < group ? gQ + head[1] * p.q_stride[1] : nullptr, lane);

  float s[2][4];                       // this warp's 16 keys of a tile: two n8 blocks
  float o[WARP_BLOCKS][4] = {};        // this warp's output dims (the first VALUE_WARPS warps)
  float m[2] = {MINUS_INFINITY, MINUS_INFINITY};
  float l = 0.f;                       // warp 7: rows 0..7, warp 6: rows 8..15; lane = row, quad lane
  const bool owns_values = warp < Traits::VALUE_WARPS;
  const int sum_row = NUM_WARPS - 1 - warp;  // 0: rows lane / 4; 1: rows lane / 4 + 8; others sum nothing

  // Scores of one tile and P V of the tile before it, slice by slice: four independent chains of MMAs. Branches sit
  // outside, since a branch between slices would keep the loads of the next from running ahead.
  auto advance = [&](auto with_scores, auto with_values, uint32_t sK, uint32_t sV) {
    if constexpr (decltype(with_scores)::value) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.f;
    }
    static_assert(KEY_SLICES == QUERY_SLICES, "the two advance together");
#pragma unroll
    for (int i = 0; i < KEY_SLICES; i += 2) {
      if constexpr (decltype(with_scores)::value) {
#pragma unroll
        for (int d = i; d < i + 2; ++d) {
          uint32_t k[4];
          load_matrices(k, key_fragment(sK, warp, d, lane));
          numerics::mma_m16n8k16(s[0], q[d], k[0], k[1]);
          numerics::mma_m16n8k16(s[1], q[d], k[2], k[3]);
        }
      }
      if constexpr (decltype(with_values)::value) {
        uint32_t v[2][4];
        if constexpr (WARP_DIMS == 16) {
#pragma unroll
          for (int n = 0; n < 2; ++n)
            load_matrices_transposed(v[n], sV + tile_offset<SLICE / CHUNK>((i + n) * 16 + (lane & 15), 2 * warp + (lane >> 4)));
        } else {  // one load holds eight dims of both slices
          uint32_t both[4];
          load_matrices_transposed(both, sV + tile_offset<SLICE / CHUNK>(i * 16 + lane, warp));
          v[0][0] = both[0], v[0][1] = both[1], v[1][0] = both[2], v[1][1] = both[3];
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint4 a = shared.sP[i + n][lane];
          const uint32_t probability[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
          for (int b = 0; b < WARP_BLOCKS; ++b) numerics::mma_m16n8k16(o[b], probability, v[n][2 * b], v[n][2 * b + 1]);
        }
      }
    }
  };
  auto publish_maximum = [&](int64_t step) {
    const int64_t visible = seq.keys - (tiles - 1 - step) * BLOCK_N;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (visible < BLOCK_N) {
#pragma unroll
        for (int n = 0; n < 2; ++n) mask_row(s[n][2 * r], s[n][2 * r + 1], 2 * warp + n, lane, visible);
      }
      const float top = numerics::maximum(numerics::maximum(s[0][2 * r], s[0][2 * r + 1]), numerics::maximum(s[1][2 * r], s[1][2 * r + 1]));
      const float warp_top = numerics::quad_maximum(top);
      if (lane % 4 == 0) shared.sMax[warp][head[r]] = warp_top;
    }
  };
  constexpr std::true_type with{};
  constexpr std::false_type without{};

  if (tiles > 0) {
    wait_copies<STAGES - 1>();
    __syncthreads();
    advance(with, without, shared_address(shared.sK[0]), 0);
    publish_maximum(0);
  }
  int stage = 0;
  for (int64_t step = 0; step < tiles; ++step) {
    __syncthreads();  // the tile's maxima are there; K of this step and V of the last one have been read
    float alpha[2];
    uint32_t packed[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m_new = m[r];
#pragma unroll
      for (int w = 0; w < NUM_WARPS; ++w) m_new = numerics::maximum(m_new, shared.sMax[w][head[r]]);
      const float f = numerics::frame(m_new), h = numerics::scaled(f);
      alpha[r] = numerics::rescale(m[r], f);
      m[r] = m_new;
      float4 chain;
      chain.x = numerics::probability(s[0][2 * r], h);
      chain.y = numerics::probability(s[0][2 * r + 1], h);
      chain.z = numerics::probability(s[1][2 * r], h);
      chain.w = numerics::probability(s[1][2 * r + 1], h);
      packed[r] = numerics::pack_bf16(chain.x, chain.y);
      packed[2 + r] = numerics::pack_bf16(chain.z, chain.w);
      if (head[r] < group) *reinterpret_cast<float4*>(&shared.sChain[4 * head[r] + lane % 4][4 * warp]) = chain;
    }
    shared.sP[warp][lane] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    load(step + STAGES, stage, step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    wait_copies<STAGES - 1>();
    __syncthreads();  // P of this tile, its V, and the next tile's K are there

    const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
    const uint32_t sK = shared_address(shared.sK[next_stage]), sV = shared_address(shared.sV[stage]);
#pragma unroll
    for (int b = 0; b < WARP_BLOCKS; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[b][e] = numerics::multiply(o[b][e], alpha[e / 2]);
    if (step + 1 < tiles) {
      if (owns_values) advance(with, with, sK, sV);
      else advance(with, without, sK, sV);
      publish_maximum(step + 1);
    } else if (owns_values) {
      advance(without, with, sK, sV);
    }
    if (sum_row < 2 && lane / 4 + 8 * sum_row < group) {
      const float* chain = shared.sChain[4 * (lane / 4 + 8 * sum_row) + lane % 4];
#pragma unroll
      for (int i = 0; i < CHAIN; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(chain + i);
        l = i == 0 ? numerics::sum_first(l, sum_row == 0 ? alpha[0] : alpha[1], x.x) : numerics::sum_next(l, x.x);
        l = numerics::sum_next(numerics::sum_next(numerics::sum_next(l, x.y), x.z), x.w);
      }
    }
    stage = next_stage;
  }

  if (sum_row < 2) {
    const float sum = numerics::quad_sum(l);
    const int row = lane / 4 + 8 * sum_row;
    if (lane % 4 == 0) shared.sSum[row] = sum;
    if (p.lse && slice == 0 && lane % 4 == 0 && row < group)
      p.lse[seq.batch * p.lse_stride[0] + (head_q + row) * p.lse_stride[1]] = numerics::log_sum_exp(sum_row == 0 ? m[0] : m[1], sum);
  }
  __syncthreads();
  if (!owns_values) return;
  bf16* gO = static_cast<bf16*>(p.o) + offset(p.o_stride, seq, head_q) + slice * SLICE + warp * WARP_DIMS + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (head[r] >= group) continue;
    const float inv = numerics::inverse(shared.sSum[head[r]]);
#pragma unroll
    for (int b = 0; b < WARP_BLOCKS; ++b)
      *reinterpret_cast<uint32_t*>(gO + head[r] * p.o_stride[1] + b * MMA_N) =
          numerics::pack_bf16(numerics::multiply(o[b][2 * r], inv), numerics::multiply(o[b][2 * r + 1], inv));
  }
}

// --------------------------------------------------------------------------------------------- tile policy and launch
// CTAs that share the output dims of one KV head in decode. More of them fill the device, but each reads all of K again:
// on an H200 at batch 1 four gain 11 % over one, eight only 4 % more.
int decode_slices(int64_t kv_heads, int num_sms) {
  int slices = 1;
  while (slices < 4 && kv_heads * slices * 2 <= num_sms) slices *= 2;
  return slices;
}
// KV heads whose K and V (2 * 256 bytes a key) may occupy L2 together.
int64_t prefill_section(int64_t kv_heads, int64_t keys) {
  constexpr int64_t L2_BUDGET_BYTES = 24 << 20;
  const int64_t fit = L2_BUDGET_BYTES / (keys * 4 * HEAD_DIM);
  return fit < 1 ? 1 : fit < kv_heads ? fit : kv_heads;
}

enum Error { NULL_POINTER = -1, BAD_SIZE = -2, BAD_GROUP = -3, BAD_QUERY_LENGTH = -4, MISALIGNED = -5, PAGED = -6, PACKED_ENTRY = -7, TOO_LARGE = -8 };

bool aligned(const void* pointer, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride[0] % CHUNK == 0 && stride[1] % CHUNK == 0 && stride[2] % CHUNK == 0;
}
int check(const UnifiedAttnParams* p) {
  if (!p || !p->q || !p->k || !p->v || !p->o) return NULL_POINTER;
  if (p->page_table) return PAGED;
  if (p->batch < 1 || p->heads_q < 1 || p->heads_kv < 1 || p->seqlen_q < 1 || p->seqlen_kv < 1) return BAD_SIZE;
  if (p->heads_q % p->heads_kv || p->heads_q / p->heads_kv > MAX_GROUP) return BAD_GROUP;
  if (!aligned(p->q, p->q_stride) || !aligned(p->k, p->k_stride) || !aligned(p->v, p->v_stride) || !aligned(p->o, p->o_stride)) return MISALIGNED;
  return 0;
}

// Dynamic shared memory above 48 KiB has to be allowed once per kernel and device.
template <auto KERNEL>
cudaError_t allow_shared_memory(int device, int bytes) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load() & bit) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit);
  return error;
}
template <auto KERNEL, typename... Arguments>
int launch(int64_t ctas, size_t shared_bytes, void* stream, const Arguments&... arguments) {
  if (ctas > INT32_MAX) return TOO_LARGE;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = allow_shared_memory<KERNEL>(device, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return cudaGetLastError(), error;
  KERNEL<<<static_cast<unsigned>(ctas), NUM_THREADS, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

int launch_rows(const UnifiedAttnParams* p, void* stream) {
  PrefillSchedule schedule;
  schedule.blocks = (p->seqlen_q + BLOCK_M - 1) / BLOCK_M;
  schedule.kv_heads = p->batch * p->heads_kv;
  schedule.section = prefill_section(schedule.kv_heads, p->seqlen_kv);
  return launch<prefill_kernel>(schedule.blocks * p->batch * p->heads_q, sizeof(PrefillShared), stream, *p, schedule);
}
template <int SLICE>
int launch_decode(const UnifiedAttnParams* p, void* stream) {
  return launch<decode_kernel<SLICE>>(p->batch * p->heads_kv * (HEAD_DIM / SLICE), sizeof(DecodeShared<SLICE>), stream, *p);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ exports
extern "C" int unified_prefill(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->seqlen_q != p->seqlen_kv || p->lengths) return BAD_QUERY_LENGTH;
  return launch_rows(p, stream);
}
extern "C" int unified_extend(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->cu_seqlens) return PACKED_ENTRY;
  if (p->seqlen_q > p->seqlen_kv) return BAD_QUERY_LENGTH;
  return launch_rows(p, stream);
}
extern "C" int unified_decode(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->cu_seqlens) return PACKED_ENTRY;
  if (p->seqlen_q != 1) return BAD_QUERY_LENGTH;
  int num_sms = p->num_sms, device = 0;
  if (num_sms < 1) {
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
  }
  switch (decode_slices(p->batch * p->heads_kv, num_sms)) {
    case 1: return launch_decode<128>(p, stream);
    case 2: return launch_decode<64>(p, stream);
    default: return launch_decode<32>(p, stream);
  }
}
extern "C" int64_t unified_attn_workspace_bytes(int, const UnifiedAttnParams*) { return 0; }
extern "C" int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }
extern "C" const char* unified_attn_error(int code) {
  switch (code) {
    case 0: return "success";
    case NULL_POINTER: return "q, k, v and o must not be null";
    case BAD_SIZE: return "batch, heads and lengths must be at least 1";
    case BAD_GROUP: return "heads_q must be a multiple of heads_kv, at most 16 times as many";
    case BAD_QUERY_LENGTH: return "prefill needs as many queries as keys and no lengths; extend at most as many; decode exactly one";
    case MISALIGNED: return "addresses must be multiples of 16 bytes, and strides of 8 elements";
    case PAGED: return "a page table is not supported";
    case PACKED_ENTRY: return "packed sequences are for prefill only";
    case TOO_LARGE: return "more than 2147483647 blocks of work in one call";
    default: return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown error";
  }
}
