// Portable unified attention, bf16, causal, GQA, head dim 128: mma.sync.m16n8k16 and cp.async, for GPUs from sm_80 on that
// give a block 163 KiB of shared memory. Its arithmetic is fa3_numerics.cuh; no cleverness beyond tiles and copies, so that
// it can be the witness of faster kernels.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attn_abi.h"
#include "fa3_numerics.cuh"
#include "portable_tiles.cuh"

namespace {

// ----------------------------------------------------------------------------------------- full sequences and extend
constexpr int BLOCK_M = NUM_WARPS * MMA_M;
struct PrefillShared {
  alignas(128) uint8_t sK[2][TILE_BYTES];
  alignas(128) uint8_t sV[2][TILE_BYTES];
};

// Which query block, sequence and head a CTA owns. Within a section of heads, whose K and V stay in L2, the blocks with the
// most keys start first. Packed sequences get the blocks of the longest one; a CTA past its sequence's end returns at once.
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

  const bf16* gQ = static_cast<const bf16*>(p.q) + element_offset(p.q_stride, seq, work.head_q);
  const bf16* gK = static_cast<const bf16*>(p.k) + element_offset(p.k_stride, seq, work.head_kv);
  const bf16* gV = static_cast<const bf16*>(p.v) + element_offset(p.v_stride, seq, work.head_kv);

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
        for (int n = 0; n < BLOCK_N / MMA_N; ++n) mask_pair(s[n][2 * r], s[n][2 * r + 1], n, lane, visible);
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
      for (int i = 0; i < 4; ++i)
        probability[i] = numerics::pack_bf16(s[2 * n + i / 2][2 * (i % 2)], s[2 * n + i / 2][2 * (i % 2) + 1]);
#pragma unroll
      for (int d = 0; d < HEAD_DIM / MMA_K; ++d) {
        uint32_t v[4];
        const int key = n * MMA_K + (lane & 15), chunk = 2 * d + (lane >> 4);
        load_matrices_transposed(v, sV + tile_offset<HEAD_DIM / CHUNK>(key, chunk));
        numerics::mma_m16n8k16(o[2 * d], probability, v[0], v[1]);
        numerics::mma_m16n8k16(o[2 * d + 1], probability, v[2], v[3]);
      }
    }
  }

  bf16* gO = static_cast<bf16*>(p.o) + element_offset(p.o_stride, seq, work.head_q);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = numerics::quad_sum(l[r]), inv = numerics::inverse(sum);
    if (row[r] >= seq.queries) continue;
    uint32_t* out = reinterpret_cast<uint32_t*>(gO + row[r] * p.o_stride[2]) + lane % 4;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / MMA_N; ++d)
      out[d * MMA_N / 2] = numerics::pack_bf16(numerics::multiply(o[d][2 * r], inv), numerics::multiply(o[d][2 * r + 1], inv));
    if (p.lse && lane % 4 == 0)
      p.lse[seq.batch * p.lse_stride[0] + work.head_q * p.lse_stride[1] + seq.first_row + row[r]] =
          numerics::log_sum_exp(m[r], sum);
  }
}

// ------------------------------------------------------------------------------------------------- one-token decode
// A CTA owns one sequence, one KV head and SLICE output dims; the group's query heads are the 16 rows of the MMA. Every
// CTA computes all scores of its rows. Eight tile warps share a tile's keys for the scores and the SLICE dims for P V; a
// sum warp for every eight rows adds their probabilities meanwhile, 32 dependent additions a tile.
template <int SLICE, int ROW_HALVES>
struct DecodeTraits {
  static constexpr int NUM_STAGES = SLICE == 128 ? 2 : 3;  // what 163 KiB of shared memory hold
  static constexpr int THREADS = NUM_THREADS + 32 * ROW_HALVES;
  static constexpr int VALUE_BYTES = BLOCK_N * SLICE * 2;
  static constexpr int VALUE_WARPS = SLICE / MMA_N < NUM_WARPS ? SLICE / MMA_N : NUM_WARPS;
  static constexpr int WARP_DIMS = SLICE / VALUE_WARPS;  // 8 or 16
};
constexpr size_t MAX_SHARED_BYTES = 163 << 10;  // of a block on an A100, the least of the GPUs this kernel runs on
constexpr int CHAIN = BLOCK_N / 4;       // probabilities of a tile that one quad lane is_sum_warp
constexpr int CHAIN_STRIDE = CHAIN + 4;  // floats; keeps 16-byte reads of different chains in different banks
template <int SLICE, int ROW_HALVES>
struct DecodeShared {
  using Traits = DecodeTraits<SLICE, ROW_HALVES>;
  alignas(128) uint8_t sK[Traits::NUM_STAGES][TILE_BYTES];
  alignas(128) uint8_t sV[Traits::NUM_STAGES][Traits::VALUE_BYTES];
  alignas(16) uint4 sP[KEY_SLICES][32];                           // bf16 P as A fragments: slice, lane
  alignas(16) float sChain[ROW_HALVES][8 * 4][CHAIN_STRIDE];      // fp32 p: row and quad lane, ascending columns
  float sMax[NUM_WARPS][MMA_M];
  float sSum[MMA_M];
};

static_assert(sizeof(DecodeShared<128, 2>) <= MAX_SHARED_BYTES && sizeof(DecodeShared<64, 2>) <= MAX_SHARED_BYTES &&
              sizeof(DecodeShared<32, 2>) <= MAX_SHARED_BYTES && sizeof(PrefillShared) <= MAX_SHARED_BYTES);

// Maximum and rescale of one row once the warps' maxima of a tile are in shared memory; returns alpha and sets m and h.
template <typename Shared>
__device__ __forceinline__ float next_maximum(const Shared& shared, int row, float& m, float& h) {
  float m_new = m;
#pragma unroll
  for (int w = 0; w < NUM_WARPS; ++w) m_new = numerics::maximum(m_new, shared.sMax[w][row]);
  const float f = numerics::frame(m_new), alpha = numerics::rescale(m, f);
  h = numerics::scaled(f);
  m = m_new;
  return alpha;
}

// One quad lane's row sum over a tile.
__device__ __forceinline__ float sum_chain(const float* chain, float l, float alpha) {
#pragma unroll
  for (int i = 0; i < CHAIN; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(chain + i);
    l = i == 0 ? numerics::sum_first(l, alpha, x.x) : numerics::sum_next(l, x.x);
    l = numerics::sum_next(numerics::sum_next(numerics::sum_next(l, x.y), x.z), x.w);
  }
  return l;
}

template <int SLICE, int ROW_HALVES>
__global__ void __launch_bounds__(DecodeTraits<SLICE, ROW_HALVES>::THREADS, 1) decode_kernel(const UnifiedAttnParams p) {
  using Traits = DecodeTraits<SLICE, ROW_HALVES>;
  constexpr int STAGES = Traits::NUM_STAGES, WARP_DIMS = Traits::WARP_DIMS, WARP_BLOCKS = WARP_DIMS / MMA_N;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<DecodeShared<SLICE, ROW_HALVES>*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  constexpr int SLICES = HEAD_DIM / SLICE;
  const int64_t kv = blockIdx.x / SLICES, head_kv = kv % p.heads_kv, head_q = head_kv * group;
  const int slice = blockIdx.x % SLICES;
  const Sequence seq = sequence_of(p, kv / p.heads_kv);
  const int64_t tiles = (seq.keys + BLOCK_N - 1) / BLOCK_N;
  const bool is_sum_warp = warp >= NUM_WARPS;
  const int half = is_sum_warp ? warp - NUM_WARPS : 0, sum_row = 8 * half + lane / 4;  // a sum warp's

  const bf16* gQ = static_cast<const bf16*>(p.q) + element_offset(p.q_stride, seq, head_q);
  const bf16* gK = static_cast<const bf16*>(p.k) + element_offset(p.k_stride, seq, head_kv);
  const bf16* gV = static_cast<const bf16*>(p.v) + element_offset(p.v_stride, seq, head_kv) + slice * SLICE;
  const int head[2] = {lane / 4, lane / 4 + 8};  // this lane's rows of an accumulator, as heads of the group

  // Step i handles tile tiles - 1 - i. One group of copies a step, STAGES steps ahead: K of step i + STAGES and V of
  // step i + STAGES - 1, so that K is there one step before V, when its scores are due.
  auto load = [&](int64_t step_k, int stage_k, int64_t step_v, int stage_v) {
    if (step_k < tiles) {
      const int64_t first_key = (tiles - 1 - step_k) * BLOCK_N;
      load_tile<HEAD_DIM>(shared_address(shared.sK[stage_k]), gK + first_key * p.k_stride[2], p.k_stride[2],
                          seq.keys - first_key);
    }
    if (step_v >= 0 && step_v < tiles) {
      const int64_t first_key = (tiles - 1 - step_v) * BLOCK_N;
      load_tile<SLICE>(shared_address(shared.sV[stage_v]), gV + first_key * p.v_stride[2], p.v_stride[2], seq.keys - first_key);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    if (!is_sum_warp) load(i, i, i - 1, i - 1);

  uint32_t q[QUERY_SLICES][4];
  load_query(q, head[0] < group ? gQ + head[0] * p.q_stride[1] : nullptr,
             ROW_HALVES == 2 && head[1] < group ? gQ + head[1] * p.q_stride[1] : nullptr, lane);

  float s[2][4];                  // this warp's 16 keys of a tile: two n8 blocks
  float o[WARP_BLOCKS][4] = {};   // this warp's output dims (the first VALUE_WARPS warps)
  float m[ROW_HALVES];            // of rows head[r]; a sum warp's m[0] is of sum_row
#pragma unroll
  for (int r = 0; r < ROW_HALVES; ++r) m[r] = MINUS_INFINITY;
  float l = 0.f;  // a sum warp's rows
  const bool owns_values = warp < Traits::VALUE_WARPS;

  // Scores of one tile and P V of the tile before it, slice by slice: independent chains of MMAs. Branches sit outside,
  // since a branch between slices would keep the loads of the next from running ahead.
  auto multiply_tiles = [&](auto with_scores, auto with_values, uint32_t sK, uint32_t sV) {
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
            load_matrices_transposed(v[n],
                                     sV + tile_offset<SLICE / CHUNK>((i + n) * MMA_K + (lane & 15), 2 * warp + (lane >> 4)));
        } else {  // one load holds eight dims of both slices
          uint32_t both[4];
          load_matrices_transposed(both, sV + tile_offset<SLICE / CHUNK>(i * MMA_K + lane, warp));
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
    for (int r = 0; r < ROW_HALVES; ++r) {
      if (visible < BLOCK_N) {
#pragma unroll
        for (int n = 0; n < 2; ++n) mask_pair(s[n][2 * r], s[n][2 * r + 1], 2 * warp + n, lane, visible);
      }
      const float top =
          numerics::maximum(numerics::maximum(s[0][2 * r], s[0][2 * r + 1]), numerics::maximum(s[1][2 * r], s[1][2 * r + 1]));
      const float warp_top = numerics::quad_maximum(top);
      if (lane % 4 == 0) shared.sMax[warp][head[r]] = warp_top;
    }
  };
  auto publish_probabilities = [&](float (&alpha)[ROW_HALVES]) {
    uint32_t packed[4] = {};
#pragma unroll
    for (int r = 0; r < ROW_HALVES; ++r) {
      float h;
      alpha[r] = next_maximum(shared, head[r], m[r], h);
      float4 chain;
      chain.x = numerics::probability(s[0][2 * r], h);
      chain.y = numerics::probability(s[0][2 * r + 1], h);
      chain.z = numerics::probability(s[1][2 * r], h);
      chain.w = numerics::probability(s[1][2 * r + 1], h);
      packed[r] = numerics::pack_bf16(chain.x, chain.y);
      packed[2 + r] = numerics::pack_bf16(chain.z, chain.w);
      *reinterpret_cast<float4*>(&shared.sChain[r][lane][4 * warp]) = chain;
    }
    shared.sP[warp][lane] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  };
  constexpr std::true_type with{};
  constexpr std::false_type without{};

  if (tiles > 0) {
    wait_copies<STAGES - 1>();
    __syncthreads();
    if (!is_sum_warp) {
      multiply_tiles(with, without, shared_address(shared.sK[0]), 0);
      publish_maximum(0);
    }
  }
  int stage = 0;
  for (int64_t step = 0; step < tiles; ++step) {
    __syncthreads();  // the tile's maxima are there; K of this step, V and p of the last one have been read
    float alpha[ROW_HALVES];
    if (is_sum_warp) {
      float h;
      alpha[0] = next_maximum(shared, sum_row, m[0], h);
    } else {
      publish_probabilities(alpha);
      const int previous_stage = stage == 0 ? STAGES - 1 : stage - 1;
      load(step + STAGES, stage, step + STAGES - 1, previous_stage);
    }
    wait_copies<STAGES - 1>();
    __syncthreads();  // P of this tile, its V, and the next tile's K are there

    const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
    const uint32_t sK = shared_address(shared.sK[next_stage]), sV = shared_address(shared.sV[stage]);
    const bool more = step + 1 < tiles;
    if (is_sum_warp) {
      l = sum_chain(shared.sChain[half][lane], l, alpha[0]);
    } else {
#pragma unroll
      for (int b = 0; b < WARP_BLOCKS; ++b)
#pragma unroll
        for (int e = 0; e < 2 * ROW_HALVES; ++e) o[b][e] = numerics::multiply(o[b][e], alpha[e / 2]);
      if (more && owns_values) multiply_tiles(with, with, sK, sV);
      if (more && !owns_values) multiply_tiles(with, without, sK, sV);
      if (!more && owns_values) multiply_tiles(without, with, sK, sV);
      if (more) publish_maximum(step + 1);
    }
    stage = next_stage;
  }

  if (is_sum_warp) {
    const float sum = numerics::quad_sum(l);
    if (lane % 4 == 0) {
      shared.sSum[sum_row] = sum;
      if (p.lse && slice == 0 && sum_row < group)
        p.lse[seq.batch * p.lse_stride[0] + (head_q + sum_row) * p.lse_stride[1]] = numerics::log_sum_exp(m[0], sum);
    }
  }
  __syncthreads();  // the row is_sum_warp are there
  if (!owns_values) return;
  bf16* gO =
      static_cast<bf16*>(p.o) + element_offset(p.o_stride, seq, head_q) + slice * SLICE + warp * WARP_DIMS + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < ROW_HALVES; ++r) {
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
// on an H200 at batch 1 two and four take 0.85 to 0.9 of the time of one.
int decode_slices(int64_t kv_heads, int num_sms) {
  int slices = 1;
  while (slices < 4 && kv_heads * slices * 2 <= num_sms) slices *= 2;
  return slices;
}
// KV heads whose K and V may occupy L2 together: about half of the 40 MB and more that these GPUs have.
int64_t prefill_section(int64_t kv_heads, int64_t keys) {
  constexpr int64_t L2_BUDGET_BYTES = 24 << 20, KEY_BYTES = 2 * HEAD_DIM * sizeof(bf16);
  const int64_t fit = L2_BUDGET_BYTES / (keys * KEY_BYTES);
  return fit < 1 ? 1 : fit < kv_heads ? fit : kv_heads;
}

enum Error {
  NULL_POINTER = -1,
  BAD_SIZE = -2,
  BAD_GROUP = -3,
  BAD_QUERY_LENGTH = -4,
  MISALIGNED = -5,
  PAGED = -6,
  PACKED_ENTRY = -7,
  TOO_LARGE = -8,
  SMALL_SHARED_MEMORY = -9
};

bool aligned(const void* pointer, const int64_t (&stride)[3], bool packed) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && (packed || stride[0] % CHUNK == 0) && stride[1] % CHUNK == 0 &&
         stride[2] % CHUNK == 0;
}
int check(const UnifiedAttnParams* p) {
  if (!p || !p->q || !p->k || !p->v || !p->o) return NULL_POINTER;
  if (p->page_table) return PAGED;
  if (p->batch < 1 || p->heads_q < 1 || p->heads_kv < 1 || p->seqlen_q < 1 || p->seqlen_kv < 1) return BAD_SIZE;
  // With these bounds no product of sizes below leaves 64 bits; the grid is checked once more in launch().
  if (p->seqlen_q > INT32_MAX || p->seqlen_kv > INT32_MAX || p->batch > INT32_MAX || p->heads_q > INT32_MAX / p->batch)
    return TOO_LARGE;
  if (p->heads_q % p->heads_kv || p->heads_q / p->heads_kv > MAX_GROUP) return BAD_GROUP;
  const bool packed = p->cu_seqlens;
  if (!aligned(p->q, p->q_stride, packed) || !aligned(p->k, p->k_stride, packed) || !aligned(p->v, p->v_stride, packed) ||
      !aligned(p->o, p->o_stride, packed))
    return MISALIGNED;
  return 0;
}

template <auto KERNEL, typename... Arguments>
int launch(int64_t ctas, int threads, size_t shared_bytes, void* stream, const Arguments&... arguments) {
  if (ctas > INT32_MAX) return TOO_LARGE;
  // Asked for in every call: the setting belongs to the current device and context, and costs less than a launch.
  const cudaError_t error =
      cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is returned here, not by the next call
    return error == cudaErrorInvalidValue ? SMALL_SHARED_MEMORY : static_cast<int>(error);
  }
  KERNEL<<<static_cast<unsigned>(ctas), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

int launch_prefill(const UnifiedAttnParams* p, void* stream) {
  PrefillSchedule schedule;
  schedule.blocks = (p->seqlen_q + BLOCK_M - 1) / BLOCK_M;
  schedule.kv_heads = p->batch * p->heads_kv;
  schedule.section = prefill_section(schedule.kv_heads, p->seqlen_kv);
  return launch<prefill_kernel>(schedule.blocks * p->batch * p->heads_q, NUM_THREADS, sizeof(PrefillShared), stream, *p,
                                schedule);
}
template <int SLICE, int ROW_HALVES>
int launch_decode_rows(const UnifiedAttnParams* p, void* stream) {
  return launch<decode_kernel<SLICE, ROW_HALVES>>(p->batch * p->heads_kv * (HEAD_DIM / SLICE),
                                                  DecodeTraits<SLICE, ROW_HALVES>::THREADS,
                                                  sizeof(DecodeShared<SLICE, ROW_HALVES>), stream, *p);
}
template <int SLICE>
int launch_decode(const UnifiedAttnParams* p, void* stream) {
  return p->heads_q / p->heads_kv <= 8 ? launch_decode_rows<SLICE, 1>(p, stream) : launch_decode_rows<SLICE, 2>(p, stream);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ exports
extern "C" int unified_prefill(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->seqlen_q != p->seqlen_kv || p->lengths) return BAD_QUERY_LENGTH;
  return launch_prefill(p, stream);
}
extern "C" int unified_extend(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->cu_seqlens) return PACKED_ENTRY;
  if (p->seqlen_q > p->seqlen_kv) return BAD_QUERY_LENGTH;
  return launch_prefill(p, stream);
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
    case 1:
      return launch_decode<128>(p, stream);
    case 2:
      return launch_decode<64>(p, stream);
    default:
      return launch_decode<32>(p, stream);
  }
}
extern "C" int64_t unified_attn_workspace_bytes(int, const UnifiedAttnParams*) { return 0; }
extern "C" int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }
extern "C" const char* unified_attn_error(int code) {
  switch (code) {
    case 0:
      return "success";
    case NULL_POINTER:
      return "q, k, v and o must not be null";
    case BAD_SIZE:
      return "batch, heads and lengths must be at least 1";
    case BAD_GROUP:
      return "heads_q must be a multiple of heads_kv, at most 16 times as many";
    case BAD_QUERY_LENGTH:
      return "prefill needs as many queries as keys and no lengths; extend at most as many; decode exactly one";
    case MISALIGNED:
      return "addresses must be multiples of 16 bytes, and strides of 8 elements";
    case PAGED:
      return "a page table is not supported";
    case PACKED_ENTRY:
      return "packed sequences are for prefill only";
    case TOO_LARGE:
      return "a size, or the number of blocks of work, above 2147483647";
    case SMALL_SHARED_MEMORY:
      return "this GPU gives a block less shared memory than the kernel needs (about 160 KiB)";
    default:
      return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown error";
  }
}
