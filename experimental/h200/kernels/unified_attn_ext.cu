// Unified attention for Hopper, bf16, causal, GQA, head dim 128: TMA and WGMMA for full sequences and extend, clusters with
// one launch for decode. Its arithmetic is fa3_numerics.cuh and wgmma_numerics.cuh, its witness portable_attn.cu.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attn_abi.h"
#include "fa3_numerics.cuh"
#include "hopper_tiles.cuh"
#include "portable_tiles.cuh"
#include "wgmma_numerics.cuh"

// Full sequences and extend: persistent CTAs of one producer warp group and two consumer warp groups of 64 query rows.
namespace {

constexpr int BLOCK_M = 128, WG_ROWS = 64, WG_THREADS = 128;
constexpr int PREFILL_THREADS = 3 * WG_THREADS;
constexpr int STAGES = 2;
constexpr int HALF_COLUMNS = 64;                          // of a swizzled row
constexpr int Q_HALF_BYTES = WG_ROWS * HALF_COLUMNS * 2;  // 8 KiB
constexpr int KV_HALF_BYTES = BLOCK_N * HALF_COLUMNS * 2;
constexpr int KEY_SLICES_N = BLOCK_N / 16;

struct PrefillShared {
  alignas(1024) uint8_t sQ[2][2][Q_HALF_BYTES];  // consumer, half
  alignas(1024) uint8_t sK[STAGES][2][KV_HALF_BYTES];
  alignas(1024) uint8_t sV[STAGES][2][KV_HALF_BYTES];
  alignas(128) uint8_t sO[8][16 * HEAD_DIM * 2];         // a consumer warp's 16 rows
  alignas(8) uint64_t query_ring[2][2], key_ring[2 * STAGES], value_ring[2 * STAGES];
};

// Division of 0 <= n < 2^31 by a number that the host knows: n / d = (n * ceil(2^(31 + b) / d)) >> (31 + b) with
// 2^(b - 1) < d <= 2^b, since the rounding adds less than n 2^-31 / d to n / d (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t by, factor, shift;
  explicit Divisor(int64_t d) : by(static_cast<uint32_t>(d)), factor(0), shift(0) {
    while (int64_t{1} << shift < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * factor >> 31 >> shift);
  }
};

struct PrefillSchedule {
  Divisor group, heads_kv;            // query heads of a KV head; KV heads of a sequence
  Divisor rounds, heads, last_heads;  // rounds of a section; query heads of a section and of the last one
  int32_t blocks, all_rounds, section_kv, last_section;
  bool mapped;  // TMA knows the strides
};
struct Item {
  int32_t block, batch, head_q, head_kv;
};
// What a CTA does in a round. A section's items, those with the longest blocks first, are dealt back and forth, so that who
// gets the longest of one round gets the shortest of the next; every section is dealt from its own start, since one that
// began within a round of the section before would give some CTAs its longest items besides the shortest and others both
// longest ones (up to 12 % more than the mean). Where a section's last round has no item for a CTA, its block is negative.
__device__ __forceinline__ Item item_of(const PrefillSchedule& s, int32_t round) {
  const uint32_t section = s.rounds.quotient(round), place = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x,
                 rest = (round - section * s.rounds.by) * gridDim.x + place;
  const Divisor& heads = static_cast<int32_t>(section) == s.last_section ? s.last_heads : s.heads;
  const uint32_t row = heads.quotient(rest), head = rest - row * heads.by, head_of_kv = s.group.quotient(head);
  const uint32_t kv = section * s.section_kv + head_of_kv, batch = s.heads_kv.quotient(kv),
                 head_kv = kv - batch * s.heads_kv.by;
  const int32_t block = s.blocks - 1 - static_cast<int32_t>(row);
  return {block, static_cast<int32_t>(batch), static_cast<int32_t>(head_kv * s.group.by + head - head_of_kv * s.group.by),
          static_cast<int32_t>(head_kv)};
}

// What an item needs of K and V. Query i of the sequence sees keys 0 .. before + i.
struct Span {
  Sequence seq;
  int64_t first_row, before;
  int tiles;   // all that some row of the block sees
  int masked;  // of these, from the last one down, those that some row of the block sees in part
};
__device__ __forceinline__ Span span_of(const UnifiedAttnParams& p, const Item& item) {
  Span s;
  s.seq = sequence_of(p, item.batch);
  s.first_row = static_cast<int64_t>(item.block) * BLOCK_M;
  s.before = s.seq.keys - s.seq.queries;
  const int64_t end = s.first_row + BLOCK_M < s.seq.queries ? s.first_row + BLOCK_M : s.seq.queries;
  const int64_t visible = s.first_row < s.seq.queries ? s.before + end : 0;
  s.tiles = visible <= 0 ? 0 : static_cast<int>((visible + BLOCK_N - 1) / BLOCK_N);
  const int64_t seen_by_all = s.before + s.first_row + 1;
  const int whole = seen_by_all <= 0 ? 0 : static_cast<int>(seen_by_all / BLOCK_N);
  s.masked = s.tiles > whole ? s.tiles - whole : 0;
  return s;
}

__device__ __forceinline__ void scores(float (&s)[64], uint64_t q, uint64_t k) {
#pragma unroll
  for (int d = 0; d < 8; ++d) {
    const uint64_t a = q + d / 4 * (Q_HALF_BYTES >> 4) + d % 4 * 2, b = k + d / 4 * (KV_HALF_BYTES >> 4) + d % 4 * 2;
    if (d == 0)
      numerics::wgmma_rows<false>(s, a, b);
    else
      numerics::wgmma_rows<true>(s, a, b);
  }
}
__device__ __forceinline__ void weighted_values(float (&o)[64], const uint32_t (&p)[KEY_SLICES_N][4], uint64_t v) {
#pragma unroll
  for (int n = 0; n < KEY_SLICES_N; ++n) numerics::wgmma_columns(o, p[n], v + n * (16 * HALF_COLUMNS * 2 >> 4));
}

// A thread's two rows (lane / 4 and 8 below) of one warp's 16.
struct RowState {
  float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, l[2] = {0.f, 0.f}, alpha[2], h[2];
};
__device__ __forceinline__ void set_maximum(int r, float m, RowState& row) {
  const float f = numerics::frame(m);
  row.h[r] = numerics::scaled(f);
  row.alpha[r] = numerics::rescale(row.m[r], f);
  row.m[r] = m;
}
__device__ __forceinline__ float row_maximum(int r, const float (&s)[64]) {
  float top = numerics::maximum(s[2 * r], s[2 * r + 1]);
#pragma unroll
  for (int n = 1; n < 16; ++n) top = numerics::maximum(top, numerics::maximum(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
  return numerics::quad_maximum(top);
}
// The bits of the largest of `top`, which is not negative, and the row, in half as many instructions.
__device__ __forceinline__ int row_maximum_above_zero(int r, const float (&s)[64], float top) {
  auto bits = [&](int n, int e) { return __float_as_int(s[4 * n + 2 * r + e]); };
  int even = numerics::maximum_above_zero(__float_as_int(top), bits(0, 0), bits(0, 1));
  int odd = numerics::maximum_above_zero(bits(1, 0), bits(1, 1));
#pragma unroll
  for (int n = 2; n < 16; ++n) {
    int& chain = n % 2 ? odd : even;
    chain = numerics::maximum_above_zero(chain, bits(n, 0), bits(n, 1));
  }
  even = numerics::maximum_above_zero(even, odd);
  even = numerics::maximum_above_zero(even, __shfl_xor_sync(~0u, even, 2));
  return numerics::maximum_above_zero(even, __shfl_xor_sync(~0u, even, 1));
}
// `above_zero`: no running maximum of this warp is negative.
__device__ __forceinline__ void row_maxima(const float (&s)[64], RowState& row, bool above_zero) {
  if (above_zero) {
    const int first = row_maximum_above_zero(0, s, row.m[0]), second = row_maximum_above_zero(1, s, row.m[1]);
    set_maximum(0, __int_as_float(first), row);
    set_maximum(1, __int_as_float(second), row);
  } else {
    set_maximum(0, numerics::maximum(row.m[0], row_maximum(0, s)), row);
    set_maximum(1, numerics::maximum(row.m[1], row_maximum(1, s)), row);
  }
}
// x, which the compiler cannot have before the weight p is known: no weight has a sign, NaN neither.
__device__ __forceinline__ float behind(float x, float p) {
  float y;
  asm("lop3.b32 %0, %1, %2, 0x80000000, 0xf8;" : "=f"(y) : "f"(x), "f"(p));  // x | (p & sign)
  return y;
}
// Weights and sums of columns 8n .. 8n + 7 (of a thread two a row).
__device__ __forceinline__ void weigh(int n, float (&s)[64], RowState& row, const float (&h)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s[4 * n + i] = numerics::probability(s[4 * n + i], h[i / 2]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float first = s[4 * n + 2 * r];
    row.l[r] = n == 0 ? numerics::sum_first(row.l[r], row.alpha[r], first) : numerics::sum_next(row.l[r], first);
    row.l[r] = numerics::sum_next(row.l[r], s[4 * n + 2 * r + 1]);
  }
}
__device__ __forceinline__ void round_weights(const float (&s)[64], uint32_t (&p)[KEY_SLICES_N][4]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i / 4][i % 4] = numerics::pack_bf16(s[2 * i], s[2 * i + 1]);
}
__device__ __forceinline__ void rescale_output(int n, float (&o)[64], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) o[4 * n + i] = numerics::multiply(o[4 * n + i], alpha[i / 2]);
}
// visible: keys of the tile that the thread's first row sees; its second sees eight more.
__device__ __forceinline__ void mask_scores(float (&s)[64], int visible, int lane) {
  const int left = visible - 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if (i / 4 * 8 + i % 2 >= left + i / 2 % 2 * 8) s[i] = MINUS_INFINITY;
}

// The rows of one box of a tensor map [batch, heads, rows, 128] to shared memory, in two halves of 64 dims.
template <int ROWS>
struct Box {
  uint8_t (&to)[2][ROWS * HALF_COLUMNS * 2];
  uint32_t barrier;
  // By TMA, from one lane. Rows past the tensor's end become zero.
  __device__ void load(const CUtensorMap& map, int64_t row, int64_t head, int64_t batch) const {
    barrier_arrive_expect(barrier, sizeof(to));
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tma_load(shared_address(to[half]), &map, half * HALF_COLUMNS, static_cast<int>(row), static_cast<int>(head),
               static_cast<int>(batch), barrier);
  }
  // By a warp's own loads: rows past `left` become zero and are not read.
  __device__ void copy(const bf16* from, int64_t stride, int64_t left, int lane) const {
#pragma unroll 1
    for (int i = lane; i < ROWS * (HEAD_DIM / CHUNK); i += 32) {
      const int row = i / (HEAD_DIM / CHUNK), chunk = i % (HEAD_DIM / CHUNK);
      uint4 x = {0, 0, 0, 0};
      if (row < left) x = *reinterpret_cast<const uint4*>(from + row * stride + chunk * CHUNK);
      *reinterpret_cast<uint4*>(to[chunk / 8] + row * (HALF_COLUMNS * 2) + ((chunk % 8) ^ (row % 8)) * 16) = x;
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
};

// Divides a warp's 16 rows by their sums and writes them and their log-sum-exp.
__device__ __forceinline__ void finish(const UnifiedAttnParams& p, const Item& item, const Span& span, int64_t warp_row,
                                       const RowState& row, const float (&o)[64], uint8_t (&staging)[16 * HEAD_DIM * 2],
                                       int lane) {
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = numerics::quad_sum(row.l[r]);
    inverse[r] = numerics::inverse(sum);
    const int64_t i = warp_row + lane / 4 + 8 * r;
    if (p.lse && lane % 4 == 0 && i < span.seq.queries)
      p.lse[span.seq.batch * p.lse_stride[0] + item.head_q * p.lse_stride[1] + span.seq.first_row + i] =
          numerics::log_sum_exp(row.m[r], sum);
  }
  const int staged = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = numerics::pack_bf16(numerics::multiply(o[4 * n + 2 * i], inverse[i % 2]),
                                 numerics::multiply(o[4 * n + 2 * i + 1], inverse[i % 2]));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(staging) + staged * 256 +
                                                                                       ((n + lane / 16) ^ (staged & 7)) * 16),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
  }
  __syncwarp();
  bf16* out = static_cast<bf16*>(p.o) + element_offset(p.o_stride, span.seq, item.head_q);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16, chunk = lane % 16;
    const uint4 x = *reinterpret_cast<const uint4*>(staging + r * 256 + (chunk ^ (r & 7)) * 16);
    if (warp_row + r < span.seq.queries) reinterpret_cast<uint4*>(out + (warp_row + r) * p.o_stride[2])[chunk] = x;
  }
  __syncwarp();
}

__global__ void __launch_bounds__(PREFILL_THREADS, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                   const __grid_constant__ CUtensorMap map_v, const UnifiedAttnParams p, const PrefillSchedule schedule) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  PrefillShared& shared = *reinterpret_cast<PrefillShared*>(shared_bytes);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / WG_THREADS, 0), lane = threadIdx.x % 32;
  Ring<STAGES> keys(shared_address(shared.key_ring)), values(shared_address(shared.value_ring));
  if (threadIdx.x == 0) {
    keys.init(8);
    values.init(8);
    for (int w = 0; w < 2; ++w) Ring<1>(shared_address(shared.query_ring[w])).init(4);
    barrier_fence_init();
  }
  __syncthreads();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x >= 32) return;
    Ring<1> queries[2] = {Ring<1>(shared_address(shared.query_ring[0])), Ring<1>(shared_address(shared.query_ring[1]))};
    for (int32_t round = 0; round < schedule.all_rounds; ++round) {
      const Item item = item_of(schedule, round);
      if (item.block < 0) continue;
      const Span span = span_of(p, item);
      if (span.tiles == 0) continue;
      const Sequence& seq = span.seq;
      // A box that a sequence fills in part is copied by hand where memory behind the sequence may not be read, or holds
      // anything: 0 x NaN in P V.
      auto fetch = [&](auto box, const CUtensorMap& map, const void* base, const int64_t (&stride)[3], int64_t head,
                       int64_t row, int64_t left, bool filled) {
        __syncwarp();  // no lane still waits for the phase that this load lets end
        if (schedule.mapped && (filled || left >= static_cast<int64_t>(sizeof(box.to) / (HEAD_DIM * 2)))) {
          if (lane == 0) box.load(map, seq.first_row + row, head, seq.batch);
        } else {
          box.copy(static_cast<const bf16*>(base) + element_offset(stride, seq, head) + row * stride[2], stride[2], left, lane);
        }
      };
      auto load_keys = [&](int number) {
        keys.wait_empty();
        const int64_t row = static_cast<int64_t>(number) * BLOCK_N;
        fetch(Box<BLOCK_N>{shared.sK[keys.stage], keys.full()}, map_k, p.k, p.k_stride, item.head_kv, row, seq.keys - row,
              !p.cu_seqlens);
        keys.advance();
      };
      auto load_values = [&](int number) {
        values.wait_empty();
        const int64_t row = static_cast<int64_t>(number) * BLOCK_N;
        fetch(Box<BLOCK_N>{shared.sV[values.stage], values.full()}, map_v, p.v, p.v_stride, item.head_kv, row, seq.keys - row,
              !p.cu_seqlens && !p.lengths);
        values.advance();
      };
      load_keys(span.tiles - 1);
      for (int w = 0; w < 2; ++w) {
        queries[w].wait_empty();
        const int64_t row = span.first_row + w * WG_ROWS;
        fetch(Box<WG_ROWS>{shared.sQ[w], queries[w].full()}, map_q, p.q, p.q_stride, item.head_q, row, seq.queries - row,
              !p.cu_seqlens);
        queries[w].advance();
      }
      for (int number = span.tiles - 1; number > 0; --number) {
        load_keys(number - 1);
        load_values(number);
      }
      load_values(0);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int consumer = group - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  Ring<1> query(shared_address(shared.query_ring[consumer]));
  const uint64_t q = descriptor(BY_ROWS, shared_address(shared.sQ[consumer])),
                 k0 = descriptor(BY_ROWS, shared_address(shared.sK)), v0 = descriptor(BY_COLUMNS, shared_address(shared.sV));
  auto k = [&] { return k0 + keys.stage * (2 * KV_HALF_BYTES >> 4); };
  auto v = [&] { return v0 + values.stage * (2 * KV_HALF_BYTES >> 4); };
  auto release = [&](auto& ring) {
    warp_arrive(ring.empty(), lane == 0);
    ring.advance();
  };
  uint8_t (&staging)[16 * HEAD_DIM * 2] = shared.sO[consumer * 4 + warp];
  // The consumers take turns at issuing products, so that one multiplies while the other exponentiates.
  const int own_turn = 1 + consumer, other_turn = 2 - consumer;
  if (consumer == 1) named_arrive(1, 2 * WG_THREADS);

  for (int32_t round = 0; round < schedule.all_rounds; ++round) {
    const Item item = item_of(schedule, round);
    if (item.block < 0) continue;
    const Span span = span_of(p, item);
    const int64_t warp_row = span.first_row + consumer * WG_ROWS + warp * 16;
    const int64_t seen = span.before + warp_row + lane / 4 + 1;  // keys that the thread's first row sees
    float o[64] = {};
    RowState row;
    uint32_t weights[KEY_SLICES_N][4];
    if (span.tiles > 0) {
      query.wait_full();
      {
        float s[64];
        keys.wait_full();
        wgmma_fence();
        scores(s, q, k());
        wgmma_commit();
        wgmma_wait<0>();
        written_here(s);
        release(keys);
        const int tile = span.tiles - 1;
        if (span.masked > 0) mask_scores(s, static_cast<int>(seen - static_cast<int64_t>(tile) * BLOCK_N), lane);
        row_maxima(s, row, false);
#pragma unroll
        for (int n = 0; n < 16; ++n) weigh(n, s, row, row.h);
        round_weights(s, weights);
      }
      // Scores of a tile, then P V of the tile before it, and its maxima as that ends. Whether the next step's operands have
      // come is asked early, for an answer takes a while.
      bool above_zero = false;
      uint32_t keys_came = 0, values_came = 0;
      auto step = [&](auto masked, int tile) {
        float s[64];
        if (!keys_came) keys.wait_full();
        named_sync(own_turn, 2 * WG_THREADS);
        wgmma_fence();
        scores(s, q, k());
        wgmma_commit();
        if (!values_came) values.wait_full();
        wgmma_fence();
        weighted_values(o, weights, v());
        wgmma_commit();
        named_arrive(other_turn, 2 * WG_THREADS);
        wgmma_wait<1>();
        written_here(s);
        release(keys);
        if (decltype(masked)::value) mask_scores(s, static_cast<int>(seen - static_cast<int64_t>(tile) * BLOCK_N), lane);
        row_maxima(s, row, above_zero);
        keys_came = keys.is_full();
        values_came = values.next().is_full();
        above_zero = __all_sync(~0u, (__float_as_int(row.m[0]) | __float_as_int(row.m[1])) >= 0);
        wgmma_wait<0>();
        written_here(o);
        release(values);
        // In four parts, each behind a weight of the part before: that spreads the exponentials, of which ptxas would put as
        // many as it can at once, and costs four instructions a part.
        float h[2] = {row.h[0], row.h[1]}, alpha[2] = {row.alpha[0], row.alpha[1]};
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          if (n > 0 && n % 4 == 0)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              h[r] = behind(h[r], s[4 * (n - 3) + 2 * r]);
              alpha[r] = behind(alpha[r], s[4 * (n - 3) + 2 * r]);
            }
          weigh(n, s, row, h);
          rescale_output(n, o, alpha);
        }
        round_weights(s, weights);
      };
      int tile = span.tiles - 2;
      const int whole = span.tiles - span.masked;
#pragma unroll 1
      for (; tile >= whole && tile >= 0; --tile) step(std::true_type{}, tile);
#pragma unroll 1
      for (; tile >= 0; --tile) step(std::false_type{}, tile);
      release(query);
      values.wait_full();
      wgmma_fence();
      weighted_values(o, weights, v());
      wgmma_commit();
      wgmma_wait<0>();
      written_here(o);
      release(values);
    }
    finish(p, item, span, warp_row, row, o, staging, lane);
  }
}

// -------------------------------------------------------------------------------------------------- one-token decode
// A cluster of G CTAs shares one sequence and KV head; its query heads are the columns of the products. Step i of the chain
// is tile `tiles - 1 - i`. In a round of G steps each CTA scores one tile for all: it pushes the tile's maxima to every
// CTA, each CTA derives the running maxima and rescales of the whole round for itself, and bf16 P of the tile goes to every
// CTA while its fp32 p go to the CTA that sums that head's row. Every CTA adds P V of all tiles for its 128 / G output dims:
// the only sequential part. Messages are st.async stores that complete transactions of the receiver's barriers.
//
// A slot holds what a round exchanges. Only who has freed its own slot of a round pushes maxima into the others', and nobody
// sends P before it has the maxima of all: so maxima also say that a slot is free, and are sent by CTAs without a tile too.
template <int G, int HEADS>
struct DecodeTraits {
  static constexpr int DIMS = HEAD_DIM / G;                       // output dims of a CTA
  static constexpr int BOX_DIMS = DIMS < 64 ? DIMS : 64;          // of a swizzled row
  static constexpr int BOXES = DIMS / BOX_DIMS;
  static constexpr int BOX_BYTES = BLOCK_N * BOX_DIMS * 2;
  static constexpr int VALUE_BYTES = BOXES * BOX_BYTES;           // of a tile
  static constexpr int HALVES = HEADS > 8 ? 2 : 1;                // n8 blocks of heads
  static constexpr int COPIES = HEADS < 8 ? 8 / HEADS : 1;        // lanes that hold the same head's scores
  static constexpr int FRAGMENT_LANES = (HEADS < 8 ? HEADS : 8) * 4;
  static constexpr int SUM_HEADS = HEADS > G ? HEADS / G : 1;     // rows that a CTA sums
  static constexpr int SUM_RANKS = HEADS / SUM_HEADS;
  static constexpr int SETS = 2, SET_WARPS = 4;                   // score warps: a set takes every other round
  static constexpr int VALUE_WARPS = DIMS / 16;
  static constexpr int SUM_WARPS = SUM_HEADS * 4 > 32 ? 2 : 1;
  static constexpr int VALUE_FIRST = SETS * SET_WARPS, MAXIMUM = VALUE_FIRST + VALUE_WARPS, SUM_FIRST = MAXIMUM + 1,
                       LOAD_KEYS = SUM_FIRST + SUM_WARPS, LOAD_VALUES = LOAD_KEYS + 1, WARPS = LOAD_VALUES + 1;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int SLOTS = 2 * SETS;  // fewer do not do: score warps read the running maximum of the round before
  static constexpr int CHAIN = BLOCK_N / 4, CHAIN_STRIDE = CHAIN + 4;  // floats; 16-byte reads of chains in different banks
  struct Slot {
    uint32_t weights[G][HALVES][KEY_SLICES_N / 2][FRAGMENT_LANES][4];  // bf16 P of two k16 slices as B fragments
    float chains[G][SUM_HEADS * 4][CHAIN_STRIDE];  // fp32 p of a row's quad lane, ascending columns
    float tops[G][SET_WARPS][HEADS];  // maxima of 32 keys
    float maximum[G][HEADS], alpha[G][HEADS];  // running maximum and rescale of each tile
  };
  static constexpr size_t LIMIT = 227 << 10, KEY_BYTES = 2 * KV_HALF_BYTES, FIXED = SLOTS * sizeof(Slot) + 4096;
  static constexpr int KEY_STAGES = G <= 4 && FIXED + 3 * (KEY_BYTES + G * VALUE_BYTES) <= LIMIT ? 3 : 2;
  static constexpr int VALUE_STAGES =
      static_cast<int>((LIMIT - FIXED - KEY_STAGES * KEY_BYTES) / (G * VALUE_BYTES));  // of a round's tiles each
  struct Shared {
    alignas(1024) uint8_t sK[KEY_STAGES][2][KV_HALF_BYTES];
    alignas(1024) uint8_t sV[VALUE_STAGES][G][BOXES][BOX_BYTES];
    alignas(16) Slot slots[SLOTS];
    alignas(16) float sums[HEADS];
    alignas(8) uint64_t keys_full[KEY_STAGES], keys_empty[KEY_STAGES], values_full[VALUE_STAGES], values_empty[VALUE_STAGES];
    uint64_t tops_full[SLOTS], ready[SLOTS], weights_full[SLOTS], chains_full[SLOTS], empty[SLOTS], sums_full;
  };
  static_assert(VALUE_STAGES >= 2 && sizeof(Shared) <= LIMIT);
};

// Chunk `chunk` of a row in a box whose rows are swizzled over WIDTH bytes.
template <int WIDTH>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int SPAN = WIDTH / 16;  // 8, 4 or 2 chunks
  return row * WIDTH + ((chunk ^ (row / (8 / SPAN) % SPAN)) * 16);
}
__device__ __forceinline__ uint32_t peer_address(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Always true, and not before x has been computed (no arithmetic makes this NaN). What x was made from may be overwritten
// then. An arrival alone does not wait for loads from shared memory that were asked for before it: beside another CTA that
// fills the load pipe they can come after the next tile that TMA, or a peer, has been allowed to write.
__device__ __forceinline__ bool is_known(float x) { return __float_as_uint(x) != 0x7fc0ffeeu; }
// Messages between the CTAs of a cluster: stores that complete transactions of the receiver's barrier. A CTA by itself
// stores and arrives, a lane of each sending warp.
template <int G>
struct Messages {
  static __device__ constexpr int arrivals(int sending_warps) { return G == 1 ? sending_warps * WARP_ARRIVALS : 1; }
  // Of a barrier that a warp announces with arrive_expect.
  static __device__ constexpr int announced(int sending_warps) { return (G == 1 ? sending_warps + 1 : 1) * WARP_ARRIVALS; }
  static __device__ __forceinline__ void expect(uint32_t barrier, int bytes) {
    if constexpr (G > 1) barrier_arrive_expect(barrier, bytes);
  }
  // The same by a warp whose own stores the barrier announces too.
  static __device__ __forceinline__ void arrive_expect(uint32_t barrier, int bytes, bool leader) {
    if (G > 1 && leader)
      barrier_arrive_expect(barrier, bytes);
    else
      warp_arrive(barrier, leader);
  }
  static __device__ __forceinline__ void send(uint32_t to, int peer, uint4 x, uint32_t barrier) {
    if constexpr (G == 1)
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
    else
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                       peer_address(to, peer)),
                   "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(peer_address(barrier, peer))
                   : "memory");
  }
  static __device__ __forceinline__ void send(uint32_t to, int peer, float x, uint32_t barrier) {
    if constexpr (G == 1)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
    else
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(peer_address(to, peer)),
                   "f"(x), "r"(peer_address(barrier, peer))
                   : "memory");
  }
  static __device__ __forceinline__ void sent(uint32_t barrier, int lane) {
    if constexpr (G == 1) {
      __syncwarp();
      warp_arrive(barrier, lane == 0);
    }
  }
};

struct DecodeSchedule {
  Divisor heads_kv;
  int32_t group;
  int32_t overlap_tiles;  // the next kernel may start when a CTA has so many tiles left, or at once with fewer
  bool mapped;  // TMA knows the strides
};

template <int G, int HEADS>
__global__ void __launch_bounds__(DecodeTraits<G, HEADS>::THREADS, 1)
    decode_kernel(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                  const UnifiedAttnParams p, const DecodeSchedule schedule) {
  using T = DecodeTraits<G, HEADS>;
  using M = Messages<G>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(shared_bytes);
  auto at = [](const auto& x) { return shared_address(&x); };
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int rank = static_cast<int>(blockIdx.x) % G;
  // All that needs no global memory comes before the wait for the kernel before.
  if (lane == 0 && warp < 5) {
    auto init = [&](auto& barriers, int arrivals) {
#pragma unroll
      for (auto& barrier : barriers) barrier_init(at(barrier), arrivals);
    };
    if (warp == 0) {
      init(shared.keys_full, 1);
      init(shared.keys_empty, T::SET_WARPS * WARP_ARRIVALS);
      if (schedule.mapped) tma_prefetch(&map_k);
    } else if (warp == 1) {
      init(shared.values_full, 1);
      init(shared.values_empty, T::VALUE_WARPS * WARP_ARRIVALS);
      if (schedule.mapped) tma_prefetch(&map_v);
    } else if (warp == 2) {
      init(shared.tops_full, M::arrivals(T::SET_WARPS));
      init(shared.ready, WARP_ARRIVALS);
    } else if (warp == 3) {
      init(shared.weights_full, M::announced(T::SET_WARPS));
      init(shared.chains_full, M::announced(T::SET_WARPS));
    } else {
      init(shared.empty, (T::VALUE_WARPS + (rank < T::SUM_RANKS ? T::SUM_WARPS : 0)) * WARP_ARRIVALS);
      barrier_init(at(shared.sums_full), M::arrivals(T::SUM_WARPS));
    }
    barrier_fence_init();
  }
  __syncwarp();
  if constexpr (G > 1) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    __syncthreads();
  }
  const int group = schedule.group;
  const uint32_t kv = blockIdx.x / G, batch = schedule.heads_kv.quotient(kv);
  const int64_t head_kv = kv - batch * schedule.heads_kv.by, head_q = head_kv * group;
  Sequence seq = {1, p.seqlen_kv, 0, batch};
  bf16* const out = static_cast<bf16*>(p.o) + element_offset(p.o_stride, seq, head_q) + rank * T::DIMS;
  float* const lse = p.lse ? p.lse + seq.batch * p.lse_stride[0] + head_q * p.lse_stride[1] : nullptr;
  // What the kernel before wrote may be read only behind wait_before(), and what it reads be written. Who loads calls it; what
  // the others do follows from those loads.
  auto wait_before = [] { asm volatile("griddepcontrol.wait;" ::: "memory"); };
  if (p.lengths) {
    wait_before();
    const int64_t given = p.lengths[batch];
    seq.keys = given < 0 ? 0 : given < seq.keys ? given : seq.keys;
  }
  const int tiles = static_cast<int>((seq.keys + BLOCK_N - 1) / BLOCK_N), rounds = (tiles + G - 1) / G;
  if (tiles == 0) {
    wait_before();
    for (int i = threadIdx.x; i < group * T::DIMS; i += T::THREADS)
      out[i / T::DIMS * p.o_stride[1] + i % T::DIMS] = __ushort_as_bfloat16(0);
    if (lse && rank == 0 && static_cast<int>(threadIdx.x) < group) lse[threadIdx.x * p.lse_stride[1]] = MINUS_INFINITY;
    return;
  }
  auto let_next_start = [] { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); };
  const int overlap_round = (tiles - schedule.overlap_tiles + G - 1) / G;  // none or less: as soon as loads are on their way
  auto slot_of = [](int round) { return round % T::SLOTS; };
  auto slot_parity = [](int round) { return static_cast<uint32_t>(round / T::SLOTS & 1); };

  if (warp >= T::LOAD_KEYS) {
    // ------------------------------------------------------------------ loads
    // A whole warp waits and one lane asks TMA; rows that TMA cannot know the end of are copied by all.
    const int head = static_cast<int>(head_kv);
    auto first_key = [&](int step) { return (tiles - 1 - step) * BLOCK_N; };
    auto copy = [&](uint8_t* to, auto width, int boxes, const void* from, const int64_t (&stride)[3], int64_t first) {
      constexpr int WIDTH = decltype(width)::value, CHUNKS = WIDTH / 16;
      const bf16* const base = static_cast<const bf16*>(from) + element_offset(stride, seq, head) + first * stride[2];
      const int64_t left = seq.keys - first;
      for (int i = lane; i < BLOCK_N * CHUNKS * boxes; i += 32) {
        const int box = i / (BLOCK_N * CHUNKS), r = i / CHUNKS % BLOCK_N, chunk = i % CHUNKS;
        uint4 x = {0, 0, 0, 0};
        if (r < left) x = *reinterpret_cast<const uint4*>(base + r * stride[2] + (box * CHUNKS + chunk) * CHUNK);
        *reinterpret_cast<uint4*>(to + box * BLOCK_N * WIDTH + swizzled<WIDTH>(r, chunk)) = x;
      }
      fence_async_proxy();
      __syncwarp();
    };
    if (warp == T::LOAD_KEYS) {
#pragma unroll 1
      for (int round = 0, step = rank; step < tiles; ++round, step += G) {
        const int stage = round % T::KEY_STAGES;
        const uint32_t barrier = at(shared.keys_full[stage]);
        if (round >= T::KEY_STAGES) barrier_wait(at(shared.keys_empty[stage]), (round / T::KEY_STAGES & 1) ^ 1);
        if (round == 0) wait_before();
        __syncwarp();  // no lane still waits for the phase that this load lets end
        if (!schedule.mapped) {
          copy(shared.sK[stage][0], std::integral_constant<int, HALF_COLUMNS * 2>{}, 2, p.k, p.k_stride, first_key(step));
          if (lane == 0) barrier_arrive(barrier);
        } else if (lane == 0) {
          barrier_arrive_expect(barrier, sizeof(shared.sK[stage]));
          for (int half = 0; half < 2; ++half)
            tma_load(at(shared.sK[stage][half]), &map_k, half * HALF_COLUMNS, first_key(step), head, batch, barrier);
        }
      }
    } else {
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
        const int stage = round % T::VALUE_STAGES, here = tiles - round * G < G ? tiles - round * G : G;
        const uint32_t barrier = at(shared.values_full[stage]);
        if (round >= T::VALUE_STAGES) barrier_wait(at(shared.values_empty[stage]), (round / T::VALUE_STAGES & 1) ^ 1);
        // Only the last tile of a sequence, which comes first, is copied by hand where TMA may be used.
        const int by_hand = !schedule.mapped ? here : p.lengths && seq.keys - first_key(round * G) < BLOCK_N ? 1 : 0;
        if (round == 0) wait_before();
        __syncwarp();  // as above
        for (int t = 0; t < by_hand; ++t)
          copy(shared.sV[stage][t][0], std::integral_constant<int, T::BOX_DIMS * 2>{}, T::BOXES,
               static_cast<const bf16*>(p.v) + rank * T::DIMS, p.v_stride, first_key(round * G + t));
        if (lane == 0) {
          barrier_arrive_expect(barrier, (here - by_hand) * T::VALUE_BYTES);
          for (int t = by_hand; t < here; ++t)
            for (int box = 0; box < T::BOXES; ++box)
              tma_load(at(shared.sV[stage][t][box]), &map_v, rank * T::DIMS + box * T::BOX_DIMS, first_key(round * G + t), head,
                       batch, barrier);
        }
        if (round == 0 && overlap_round <= 0) let_next_start();
      }
    }
  } else if (warp < T::VALUE_FIRST) {
    // ------------------------------------------------------------------ scores of one tile a round, 32 keys a warp
    const int set = warp / T::SET_WARPS, part = warp % T::SET_WARPS;
    const int head = lane / 4 % (HEADS < 8 ? HEADS : 8), copy = lane / T::FRAGMENT_LANES;
    const bf16* gQ = static_cast<const bf16*>(p.q) + element_offset(p.q_stride, seq, head_q);
    uint32_t q[QUERY_SLICES][4];
    wait_before();
    load_query(q, head < group ? gQ + head * p.q_stride[1] : nullptr,
               T::HALVES == 2 && head + 8 < group ? gQ + (head + 8) * p.q_stride[1] : nullptr, lane);
    const int key_row = part * 32 + (lane >> 4) * 8 + (lane & 7);
#pragma unroll 1
    for (int round = set; round < rounds; round += T::SETS) {
      const int step = round * G + rank, stage = round % T::KEY_STAGES;
      const bool mine = step < tiles;
      auto& slot = shared.slots[slot_of(round)];
      // Peers' next maxima may come into the slot of this set's last round from now on.
      if (G > 1 && round >= T::SETS) barrier_wait(at(shared.ready[slot_of(round - T::SETS)]), slot_parity(round - T::SETS));
      float s[4][4], top[T::HALVES];
#pragma unroll
      for (int r = 0; r < T::HALVES; ++r) top[r] = MINUS_INFINITY;
      if (mine) {
        barrier_wait(at(shared.keys_full[stage]), round / T::KEY_STAGES & 1);
        const uint32_t keys = at(shared.sK[stage]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[j][e] = 0.f;
#pragma unroll
        for (int d = 0; d < QUERY_SLICES; ++d) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            uint32_t k[4];
            load_matrices(
                k, keys + d / 4 * KV_HALF_BYTES + swizzled<HALF_COLUMNS * 2>(key_row + 16 * j, d % 4 * 2 + (lane >> 3 & 1)));
            numerics::mma_m16n8k16(s[2 * j], q[d], k[0], k[1]);
            numerics::mma_m16n8k16(s[2 * j + 1], q[d], k[2], k[3]);
          }
        }
        const int64_t visible = seq.keys - static_cast<int64_t>(tiles - 1 - step) * BLOCK_N;
#pragma unroll
        for (int r = 0; r < T::HALVES; ++r) {
          if (visible < BLOCK_N) {
#pragma unroll
            for (int j = 0; j < 4; ++j) mask_pair(s[j][2 * r], s[j][2 * r + 1], part * 4 + j, lane, visible);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) top[r] = numerics::maximum(top[r], numerics::maximum(s[j][2 * r], s[j][2 * r + 1]));
          top[r] = numerics::quad_maximum(top[r]);
        }
        warp_arrive(at(shared.keys_empty[stage]), lane == 0);
      }
      if (round >= T::SLOTS) barrier_wait(at(shared.empty[slot_of(round)]), slot_parity(round) ^ 1);
      const uint32_t tops_full = at(shared.tops_full[slot_of(round)]), weights_full = at(shared.weights_full[slot_of(round)]),
                     chains_full = at(shared.chains_full[slot_of(round)]);
#pragma unroll
      for (int first = 0; first < HEADS; first += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(__shfl_sync(~0u, top[first / 8], (first % 8 + i) * 4));
        if (lane < G) M::send(at(slot.tops[rank][part][first]), lane, uint4{x[0], x[1], x[2], x[3]}, tops_full);
      }
      M::sent(tops_full, lane);
      if (!mine) continue;
      const auto& before = shared.slots[slot_of(round - 1 + T::SLOTS)];
      if (round > 0) barrier_wait(at(shared.ready[slot_of(round - 1)]), slot_parity(round - 1));
      barrier_wait(tops_full, slot_parity(round));
#pragma unroll
      for (int r = 0; r < T::HALVES; ++r) {
        // The running maximum from the maxima themselves: what the warp of maxima makes of them comes later.
        float m = MINUS_INFINITY;
#pragma unroll
        for (int t = 0; t < G; ++t)
          if (t <= rank) m = numerics::maximum(m, slot.tops[t][lane % 4][head + 8 * r]);
        m = numerics::quad_maximum(m);
        if (round > 0) m = numerics::maximum(m, before.maximum[G - 1][head + 8 * r]);
        const float h = numerics::scaled(numerics::frame(m));
        uint32_t weights[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[j][2 * r] = numerics::probability(s[j][2 * r], h);
          s[j][2 * r + 1] = numerics::probability(s[j][2 * r + 1], h);
          weights[j] = numerics::pack_bf16(s[j][2 * r], s[j][2 * r + 1]);
        }
        const uint32_t to = at(slot.weights[rank][r][part][lane % T::FRAGMENT_LANES]);
#pragma unroll
        for (int i = 0; i < G; i += T::COPIES)
          if (i + copy < G) M::send(to, i + copy, uint4{weights[0], weights[1], weights[2], weights[3]}, weights_full);
        const int row = head + 8 * r;
        const uint32_t chain = at(slot.chains[rank][row % T::SUM_HEADS * 4 + lane % 4][part * 8]);
#pragma unroll
        for (int j = 0; j < 4; j += 2)
          if (T::COPIES == 1 || copy == j / 2)
            M::send(chain + 8 * j, row / T::SUM_HEADS,
                    uint4{__float_as_uint(s[j][2 * r]), __float_as_uint(s[j][2 * r + 1]), __float_as_uint(s[j + 1][2 * r]),
                          __float_as_uint(s[j + 1][2 * r + 1])},
                    chains_full);
      }
      M::sent(weights_full, lane);
      M::sent(chains_full, lane);
    }
  } else if (warp < T::MAXIMUM) {
    // ------------------------------------------------------------------ O^T += V^T P^T: 16 dims a warp, all tiles in order
    const int own = warp - T::VALUE_FIRST;
    const int row = (lane >> 4) * 8 + (lane & 7), chunk = 2 * own + (lane >> 3 & 1);
    const uint32_t value_base =
        at(shared.sV) + chunk / (T::BOX_DIMS / 8) * T::BOX_BYTES + swizzled<T::BOX_DIMS * 2>(row, chunk % (T::BOX_DIMS / 8));
    const int column = 2 * (lane % 4) % (HEADS < 8 ? HEADS : 8);  // of this lane's accumulators
    float o[T::HALVES][4] = {};
    if (own == 0 && lane == 0) M::expect(at(shared.sums_full), HEADS * sizeof(float));
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const auto& slot = shared.slots[slot_of(round)];
      const int stage = round % T::VALUE_STAGES;
      auto load_values = [&](uint32_t (&v)[KEY_SLICES_N][4], int t) {
#pragma unroll
        for (int n = 0; n < KEY_SLICES_N; ++n)
          load_matrices_transposed(v[n], value_base + (stage * G + t) * T::VALUE_BYTES + n * 16 * T::BOX_DIMS * 2);
      };
      auto add_tile = [&](const uint32_t (&v)[KEY_SLICES_N][4], int t) {
        uint32_t w[T::HALVES][KEY_SLICES_N / 2][4];
#pragma unroll
        for (int r = 0; r < T::HALVES; ++r) {
#pragma unroll
          for (int n = 0; n < KEY_SLICES_N / 2; ++n) {
            const uint4 x = *reinterpret_cast<const uint4*>(slot.weights[t][r][n][lane % T::FRAGMENT_LANES]);
            w[r][n][0] = x.x, w[r][n][1] = x.y, w[r][n][2] = x.z, w[r][n][3] = x.w;
          }
          const float2 alpha = *reinterpret_cast<const float2*>(&slot.alpha[t][column + 8 * r]);
          o[r][0] = numerics::multiply(o[r][0], alpha.x), o[r][1] = numerics::multiply(o[r][1], alpha.y);
          o[r][2] = numerics::multiply(o[r][2], alpha.x), o[r][3] = numerics::multiply(o[r][3], alpha.y);
        }
#pragma unroll
        for (int n = 0; n < KEY_SLICES_N; ++n)
#pragma unroll
          for (int r = 0; r < T::HALVES; ++r)
            numerics::mma_m16n8k16(o[r], v[n], w[r][n / 2][n % 2 * 2], w[r][n / 2][n % 2 * 2 + 1]);
      };
      uint32_t v[KEY_SLICES_N][4];
      barrier_wait(at(shared.values_full[stage]), round / T::VALUE_STAGES & 1);
      load_values(v, 0);
      if (own == 0 && round > 0 && round == overlap_round) let_next_start();
      barrier_wait(at(shared.weights_full[slot_of(round)]), slot_parity(round));
      add_tile(v, 0);
      if ((round + 1) * G <= tiles) {
#pragma unroll
        for (int t = 1; t < G; ++t) {
          load_values(v, t);
          add_tile(v, t);
        }
      } else {
#pragma unroll 1
        for (int t = 1; round * G + t < tiles; ++t) {
          load_values(v, t);
          add_tile(v, t);
        }
      }
      if (is_known(o[0][0]) && is_known(o[T::HALVES - 1][0])) {
        warp_arrive(at(shared.values_empty[stage]), lane == 0);
        warp_arrive(at(shared.empty[slot_of(round)]), lane == 0);
      }
    }
    barrier_wait(at(shared.sums_full), 0);
    const int dim = 16 * own + lane / 4;
    if (HEADS >= 8 || lane % 4 < HEADS / 2) {
#pragma unroll
      for (int r = 0; r < T::HALVES; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = column + 8 * r + e % 2;
          if (head < group)
            out[head * p.o_stride[1] + dim + e / 2 * 8] = __ushort_as_bfloat16(static_cast<unsigned short>(
                numerics::pack_bf16(numerics::multiply(o[r][e], numerics::inverse(shared.sums[head])), 0.f)));
        }
    }
  } else if (warp == T::MAXIMUM) {
    // ------------------------------------------------------------------ running maxima and rescales, once in every CTA
    constexpr int PARTS = 32 / HEADS, TURNS = (G + PARTS - 1) / PARTS;
    const int head = lane % HEADS, part = lane / HEADS;
    float m = MINUS_INFINITY;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      auto& slot = shared.slots[slot_of(round)];
      const uint32_t full = at(shared.tops_full[slot_of(round)]);
      if (lane == 0) M::expect(full, G * T::SET_WARPS * HEADS * sizeof(float));
      barrier_wait(full, slot_parity(round));
      float top[TURNS];
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        const int t = i * PARTS + part;
        top[i] = MINUS_INFINITY;
        if (t < G)
#pragma unroll
          for (int w = 0; w < T::SET_WARPS; ++w) top[i] = numerics::maximum(top[i], slot.tops[t][w][head]);
      }
#pragma unroll
      for (int t = 0; t < G; ++t) {
        const float next = numerics::maximum(m, __shfl_sync(~0u, top[t / PARTS], t % PARTS * HEADS + head));
        if (part == t % PARTS) {
          slot.maximum[t][head] = next;
          slot.alpha[t][head] = numerics::rescale(m, numerics::frame(next));
        }
        m = next;
      }
      __syncwarp();
      const int here = tiles - round * G < G ? tiles - round * G : G;
      warp_arrive(at(shared.ready[slot_of(round)]), lane == 0);
      M::arrive_expect(at(shared.weights_full[slot_of(round)]), here * static_cast<int>(sizeof(slot.weights[0])), lane == 0);
      if (rank < T::SUM_RANKS)
        M::arrive_expect(at(shared.chains_full[slot_of(round)]),
                         here * T::SUM_HEADS * BLOCK_N * static_cast<int>(sizeof(float)), lane == 16);
      __syncwarp();
    }
  } else {
    // ------------------------------------------------------------------ row sums: a lane is a quad lane of a row
    const int chain = (warp - T::SUM_FIRST) * 32 + lane, row = rank * T::SUM_HEADS + chain / 4;
    if (rank < T::SUM_RANKS) {
      const int used = chain < T::SUM_HEADS * 4 ? chain : 0, head = rank * T::SUM_HEADS + used / 4;
      float l = 0.f, m = MINUS_INFINITY;
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
        const auto& slot = shared.slots[slot_of(round)];
        auto add_tile = [&](int t) {
          float4 x[T::CHAIN / 4];
#pragma unroll
          for (int i = 0; i < T::CHAIN / 4; ++i) x[i] = *reinterpret_cast<const float4*>(&slot.chains[t][used][4 * i]);
          const float alpha = slot.alpha[t][head];
          m = slot.maximum[t][head];
#pragma unroll
          for (int i = 0; i < T::CHAIN / 4; ++i) {
            l = i == 0 ? numerics::sum_first(l, alpha, x[i].x) : numerics::sum_next(l, x[i].x);
            l = numerics::sum_next(numerics::sum_next(numerics::sum_next(l, x[i].y), x[i].z), x[i].w);
          }
        };
        barrier_wait(at(shared.chains_full[slot_of(round)]), slot_parity(round));
        if ((round + 1) * G <= tiles) {
#pragma unroll
          for (int t = 0; t < G; ++t) add_tile(t);
        } else {
          for (int t = 0; round * G + t < tiles; ++t) add_tile(t);
        }
        __syncwarp();
        if (is_known(l)) warp_arrive(at(shared.empty[slot_of(round)]), lane == 0);
      }
      const float sum = numerics::quad_sum(l);
      if (chain < T::SUM_HEADS * 4 && lane % 4 == 0) {
#pragma unroll
        for (int peer = 0; peer < G; ++peer) M::send(at(shared.sums[row]), peer, sum, at(shared.sums_full));
      }
      M::sent(at(shared.sums_full), lane);
      if (lse && chain < T::SUM_HEADS * 4 && lane % 4 == 0 && row < group)
        lse[row * p.lse_stride[1]] = numerics::log_sum_exp(m, sum);
    }
  }
}

// --------------------------------------------------------------------------------------------- tile policy and launch
// Of an H200's 132 multiprocessors only 120 can be had in clusters of four or eight.
int64_t sms_in_clusters(int ctas, int num_sms) { return ctas <= 2 ? num_sms : num_sms * 10 / 11; }
// CTAs of a cluster in decode: more of them shorten the chain of products and read K once together. All clusters should run
// at once, on half of the multiprocessors: the next call waits on the others. Eight pay from 32 tiles on.
// With more than eight query heads a KV head the slots of four rounds leave too little shared memory for more than two.
int decode_cluster(int64_t kv_heads, int64_t group, int64_t tiles, int num_sms) {
  auto pays = [&](int ctas) { return tiles >= (ctas == 8 ? 32 : ctas) && kv_heads * ctas <= num_sms / 2; };
  int ctas = 1;
  while (ctas < (group > 8 ? 2 : 8) && pays(2 * ctas)) ctas *= 2;
  return ctas;
}
// KV heads whose K and V may occupy L2 together, about half of the 40 MB and more that these GPUs have; more where these would
// end too soon: a section's last round leaves CTAs without an item, one round of LEAST_ROUNDS at most. items: of a KV head.
int64_t prefill_section(int64_t kv_heads, int64_t items, int64_t keys, int64_t num_sms) {
  constexpr int64_t L2_BUDGET_BYTES = 24 << 20, KEY_BYTES = 2 * HEAD_DIM * sizeof(bf16), LEAST_ROUNDS = 8;
  const int64_t fit = L2_BUDGET_BYTES / (keys * KEY_BYTES), full = (LEAST_ROUNDS * num_sms + items - 1) / items;
  const int64_t section = fit < full ? full : fit;
  return section < kv_heads ? section : kv_heads;
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

int multiprocessors(const UnifiedAttnParams* p, int* num_sms) {
  *num_sms = p->num_sms;
  if (*num_sms > 0) return 0;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
  return error;
}
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
int launch(int64_t ctas, int cluster, int threads, size_t shared_bytes, bool overlap, void* stream,
           const Arguments&... arguments) {
  if (ctas > INT32_MAX) return TOO_LARGE;
  // Asked for in every call: the setting belongs to the current device and context, and costs less than a launch.
  cudaError_t error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  const bool fits = error != cudaErrorInvalidValue;
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (overlap) {  // with the end of the kernel before; a kernel that asks for it waits before it touches global memory
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    error = cudaLaunchKernelEx(&config, KERNEL, arguments...);
  }
  if (error == cudaSuccess) return 0;
  cudaGetLastError();  // it is returned here, not by the next call
  return fits ? static_cast<int>(error) : SMALL_SHARED_MEMORY;
}

// The map of rows of 128 bf16, seen as [batch, heads, rows, 128]; what a box has beyond them is filled with zeros. Packed rows
// are one sequence of `rows`. Strides in elements, multiples of 8. False where no map says such strides (a dimension that
// repeats its elements has none): the kernel copies by hand then.
bool tensor_map(CUtensorMap* map, const void* base, int64_t rows, int64_t heads, int64_t batch, const int64_t (&stride)[3],
                int box_rows, int box_columns, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  constexpr int64_t LIMIT = int64_t{1} << 39;  // elements
  const int64_t size[3] = {rows, heads, batch}, step[3] = {stride[2], stride[1], stride[0]};
  cuuint64_t sizes[4] = {HEAD_DIM}, strides[3];
  for (int i = 0; i < 3; ++i) {
    if (size[i] > 1 && (step[i] <= 0 || step[i] >= LIMIT)) return false;
    sizes[i + 1] = static_cast<cuuint64_t>(size[i]);
    strides[i] =
        static_cast<cuuint64_t>(size[i] > 1 ? step[i] : HEAD_DIM) * sizeof(bf16);  // one element has no stride of its own
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1, 1},
                   steps[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(base), sizes, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int launch_prefill(const UnifiedAttnParams* p, int num_sms, void* stream) {
  // Where packed sequences end is known on the device only: no box of theirs leaves its sequence.
  const int64_t rows_q = p->cu_seqlens ? INT32_MAX : p->seqlen_q, rows_kv = p->cu_seqlens ? INT32_MAX : p->seqlen_kv;
  const int64_t batch = p->cu_seqlens ? 1 : p->batch;
  CUtensorMap map_q{}, map_k{}, map_v{};
  const int64_t blocks = (p->seqlen_q + BLOCK_M - 1) / BLOCK_M, kv_heads = p->batch * p->heads_kv;
  const int64_t group = p->heads_q / p->heads_kv, items = blocks * p->batch * p->heads_q;
  const int64_t ctas = items < num_sms ? items : num_sms;
  const int64_t section = prefill_section(kv_heads, group * blocks, p->seqlen_kv, num_sms), last = (kv_heads - 1) / section;
  const int64_t rounds = (section * group * blocks + ctas - 1) / ctas;
  // No number of an item, nor of a round, is larger.
  if (items > INT32_MAX - 2 * ctas || (last + 1) * rounds > INT32_MAX) return TOO_LARGE;
  PrefillSchedule s{Divisor(group),
                    Divisor(p->heads_kv),
                    Divisor(rounds),
                    Divisor(section * group),
                    Divisor((kv_heads - last * section) * group),
                    static_cast<int32_t>(blocks),
                    static_cast<int32_t>((last + 1) * rounds),
                    static_cast<int32_t>(section),
                    static_cast<int32_t>(last),
                    false};
  s.mapped = tensor_map(&map_q, p->q, rows_q, p->heads_q, batch, p->q_stride, WG_ROWS, HALF_COLUMNS) &&
             tensor_map(&map_k, p->k, rows_kv, p->heads_kv, batch, p->k_stride, BLOCK_N, HALF_COLUMNS) &&
             tensor_map(&map_v, p->v, rows_kv, p->heads_kv, batch, p->v_stride, BLOCK_N, HALF_COLUMNS);
  return launch<prefill_kernel>(ctas, 1, PREFILL_THREADS, sizeof(PrefillShared), false, stream, map_q, map_k, map_v, *p, s);
}

template <int G, int HEADS>
int launch_decode_heads(const UnifiedAttnParams* p, int num_sms, void* stream) {
  using T = DecodeTraits<G, HEADS>;
  CUtensorMap map_k{}, map_v{};
  // Fetching 256 bytes at once halves the misses of a short call and costs 4 % of the bandwidth of a long one.
  constexpr int64_t SHORT_BYTES = 16 << 20, KEY_BYTES = 2 * HEAD_DIM * sizeof(bf16);
  const CUtensorMapL2promotion promotion = p->seqlen_kv <= SHORT_BYTES / KEY_BYTES / (p->batch * p->heads_kv)
                                               ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                               : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const bool mapped =
      tensor_map(&map_k, p->k, p->seqlen_kv, p->heads_kv, p->batch, p->k_stride, BLOCK_N, HALF_COLUMNS, promotion) &&
      tensor_map(&map_v, p->v, p->seqlen_kv, p->heads_kv, p->batch, p->v_stride, BLOCK_N, T::BOX_DIMS, promotion);
  // A waiting kernel holds multiprocessors. Where it fits beside this one, it may come as soon as this one runs, not before:
  // its own successor would come too. Where it does not fit, it would take what is left and put the rest of its clusters
  // wherever this kernel ends first, several in a GPC, which then is short of bandwidth: it may come only near the end.
  constexpr int32_t NEAR_THE_END = 8;
  static_assert(G <= NEAR_THE_END, "a round begins with so many tiles left, or fewer");
  const int64_t ctas = p->batch * p->heads_kv * G;
  const int32_t overlap_tiles = 2 * ctas <= sms_in_clusters(G, num_sms) ? INT32_MAX : NEAR_THE_END;
  const DecodeSchedule schedule{Divisor(p->heads_kv), static_cast<int32_t>(p->heads_q / p->heads_kv), overlap_tiles, mapped};
  return launch<decode_kernel<G, HEADS>>(ctas, G, T::THREADS, sizeof(typename T::Shared), true, stream, map_k, map_v, *p,
                                         schedule);
}
template <int G>
int launch_decode(const UnifiedAttnParams* p, int num_sms, void* stream) {
  const int64_t group = p->heads_q / p->heads_kv;
  if constexpr (G <= 2)
    if (group > 8) return launch_decode_heads<G, 16>(p, num_sms, stream);
  return group <= 4 ? launch_decode_heads<G, 4>(p, num_sms, stream) : launch_decode_heads<G, 8>(p, num_sms, stream);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ exports
extern "C" int unified_prefill(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->seqlen_q != p->seqlen_kv || p->lengths) return BAD_QUERY_LENGTH;
  int num_sms;
  if (const int error = multiprocessors(p, &num_sms)) return error;
  return launch_prefill(p, num_sms, stream);
}
extern "C" int unified_extend(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->cu_seqlens) return PACKED_ENTRY;
  if (p->seqlen_q > p->seqlen_kv) return BAD_QUERY_LENGTH;
  int num_sms;
  if (const int error = multiprocessors(p, &num_sms)) return error;
  return launch_prefill(p, num_sms, stream);
}
extern "C" int unified_decode(const UnifiedAttnParams* p, void* stream) {
  if (const int error = check(p)) return error;
  if (p->cu_seqlens) return PACKED_ENTRY;
  if (p->seqlen_q != 1) return BAD_QUERY_LENGTH;
  int num_sms;
  if (const int error = multiprocessors(p, &num_sms)) return error;
  const int64_t tiles = (p->seqlen_kv + BLOCK_N - 1) / BLOCK_N;
  switch (decode_cluster(p->batch * p->heads_kv, p->heads_q / p->heads_kv, tiles, num_sms)) {
    case 1:
      return launch_decode<1>(p, num_sms, stream);
    case 2:
      return launch_decode<2>(p, num_sms, stream);
    case 4:
      return launch_decode<4>(p, num_sms, stream);
    default:
      return launch_decode<8>(p, num_sms, stream);
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
      return "this GPU gives a block less shared memory than the kernel needs (up to 227 KiB)";
    default:
      return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown error";
  }
}
