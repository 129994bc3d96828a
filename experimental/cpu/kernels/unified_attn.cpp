/* Unified attention for the CPU: causal, grouped-query, head dim 128, bf16 in and out, fp32 inside.
 *
 * Contract cpu-v1. A row is one query of one query head over its n visible keys 0 .. n-1. Its bits depend on its own q, k
 * and v alone, never on the entry point, batch, neighbours, strides, threads or vector width. All arithmetic is IEEE
 * round-to-nearest-even with subnormals (the caller's floating-point mode is set aside), fma(a, b, c) is fused, and
 * nothing else is contracted.
 *
 *   step       | arithmetic                                                                                   | where
 *   -----------+----------------------------------------------------------------------------------------------+-----------
 *   tiles      | 64 keys, anchored at key 0, ascending; state m = -inf, l[16] = 0, O[128] = 0                 | attend
 *   score      | s = fma(q[d], k[d], s), d = 0 .. 127 ascending, from s = +0; q and k widened exactly         | scores
 *   maximum    | m' = the larger of m and the tile's visible scores; a NaN is never the larger                | softmax
 *   rescale    | a = exp2((m - m') * c2); l[j] *= a inside the next fma, O[d] = O[d] * a                      | softmax
 *   weight     | p = exp2((s - m') * c2), subtraction and product rounded apart; c2 = 0x1.0527dcp-3f          | softmax
 *   exp2(x)    | 0 where x < -126, else r = x + 0x1.8p23f, n = r - 0x1.8p23f, f = x - n, Horner by fma over   | exp2
 *              | EXP2 from 1 + f*(...) at degree 5 down, then times 2^n (exact)                               |
 *   row sum    | chain j = key mod 16: fma(l[j], a, p) for the tile's first key of the chain, then + p,       | softmax
 *              | ascending; p is not rounded; a key that is not visible counts as p = +0                      |
 *   O          | O[d] = fma(p, v[d], O[d]) over the visible keys ascending; p is fp32, v widened exactly      | accumulate
 *   end        | l: [j] + [j+8], then [j] + [j+4], + [j+2], + [j+1]; o = O[d] / l, bf16 by nearest even once  | finish
 *   LSE        | double: m * 0x1.6a09e667f3bcdp-4 + ln(l), then rounded to fp32; ln by the steps of `ln`      | finish
 *   no keys    | o = +0, LSE = -inf                                                                           | finish
 *
 * Supported inputs are finite with scores inside fp32's range. Others touch only their own rows: a NaN score, or an
 * infinite maximum, makes the row and its LSE NaN; a NaN or infinity of a visible v makes its own column so; every NaN
 * leaves as 0x7fc0 (LSE 0x7fc00000). Bytes behind a sequence's keys are never used.
 */
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../common/attn_abi.h"
#include "lanes.h"
#include "pool.h"

#ifdef __FAST_MATH__
#error "the contract needs IEEE arithmetic: build without -ffast-math"
#endif
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bf16 pairs are split as little-endian words");

namespace {

constexpr int HEAD_DIM = 128;
constexpr int MAX_GROUP = 16;
constexpr int KEY_TILE = 64;    // contract
constexpr int SUM_CHAINS = 16;  // contract

// Blocking, which may change speed but not bits. ROWS x COLS accumulators, COLS operands and one broadcast fill the
// registers: 32 (AVX-512, arm64) or 16 (AVX2, SSE).
constexpr int ROWS = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLS = 4;
#else
constexpr int COLS = 2;
#endif
constexpr int MAX_ROWS = 192;  // of one work item: enough to make widening a tile cheap, few enough for an L2 cache

// One work item's data, private to a thread. Key tiles are widened to fp32 once and serve all rows of the item.
struct alignas(64) Scratch {
  float kt[HEAD_DIM][KEY_TILE];  // transposed, so that one register holds one d of LANES keys
  float v[KEY_TILE][HEAD_DIM];
  float q[MAX_ROWS][HEAD_DIM];
  float p[MAX_ROWS][KEY_TILE];  // scores, then weights
  float o[MAX_ROWS][HEAD_DIM];
  float l[MAX_ROWS][SUM_CHAINS];
  float m[MAX_ROWS];
  float alpha[MAX_ROWS];
  int64_t visible[MAX_ROWS];  // keys that the row sees, ascending over rows
};

// ---------------------------------------------------------------------------------------------------------- the contract
namespace numerics {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float SCALE_LOG2 = 0x1.0527dcp-3f;    // log2(e) / sqrt(128)
constexpr double SCALE = 0x1.6a09e667f3bcdp-4;  // 1 / sqrt(128)
constexpr double LN2 = 0x1.62e42fefa39efp-1;
constexpr float ROUND_MAGIC = 0x1.8p23f;
constexpr float EXP2[5] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};

inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline vec larger(vec a, vec b) { return a > b ? a : b; }

template <int STEP = LANES / 2>
inline vec largest_lane(vec x) {  // in every lane
  if constexpr (STEP == 0)
    return x;
  else
    return largest_lane<STEP / 2>(larger(shuffle(x, x, swap<STEP>(Lanes{})), x));
}

// 2^x for x <= 0, relative error below 2e-7; 0 below -126, so that no result is subnormal.
inline vec exp2(vec x) {
  const vec magic = splat(ROUND_MAGIC);
  const vec rounded = x + magic;
  const vec f = x - (rounded - magic);
  vec y = splat(EXP2[4]);
  for (int i = 3; i >= 0; i--) y = fma(y, f, splat(EXP2[i]));
  y = fma(y, f, splat(1.0f));
  y = y * (vec)(((uvec)rounded - (uvec)magic + 127) << 23);
  return x < splat(-126.0f) ? vec{} : y;
}

// ln(x) for x >= 1, NaN for NaN: x = 2^e * y with y in (sqrt(1/2), sqrt(2)], ln(y) = 2z * (1 + w/3 + w^2/5 + ... w^8/17).
inline double ln(double x) {
  if (x != x) return x;
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t e = (int64_t)(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffff) | 0x3ff0000000000000;
  double y;
  memcpy(&y, &bits, sizeof y);
  if (y > 0x1.6a09e667f3bcdp0) y = y * 0.5, e = e + 1;
  const double z = (y - 1.0) / (y + 1.0);
  const double w = z * z;
  double sum = 1.0 / 17.0;
  for (int odd = 15; odd >= 1; odd -= 2) sum = sum * w + 1.0 / odd;
  return (double)e * LN2 + (z + z) * sum;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

// Raw scores of R rows with the first `keys` keys of the tile; the rest of p is filled with any values.
template <int R>
OUT_OF_LINE void scores(float* p, const float* q, const float* kt, int keys, Ahead ahead) {
  for (int c0 = 0; c0 < keys; c0 += COLS * LANES) {
    vec acc[R][COLS] = {};
    for (int d = 0; d < HEAD_DIM; d++) {
      if (c0 == 0 && d % 2 == 0) ahead.fetch(d / 2);
      vec k[COLS];
      UNROLL for (int c = 0; c < COLS; c++) k[c] = load<vec>(kt + d * KEY_TILE + c0 + c * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        const vec x = splat(q[r * HEAD_DIM + d]);
        UNROLL for (int c = 0; c < COLS; c++) acc[r][c] = fma(x, k[c], acc[r][c]);
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLS; c++)
        store(p + r * KEY_TILE + c0 + c * LANES, acc[r][c]);
  }
}

// Turns one row's scores of a tile with `keys` >= 1 visible keys into weights, updates m and l, returns alpha.
OUT_OF_LINE float softmax(float* p, float* m, float* l, int keys) {
  constexpr int PARTS = KEY_TILE / LANES, CHAIN_PARTS = SUM_CHAINS / LANES;
  ivec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  vec s[PARTS], top = splat(*m);
  UNROLL for (int j = 0; j < PARTS; j++) {
    s[j] = load<vec>(p + j * LANES);
    if (keys < KEY_TILE) s[j] = lane + j * LANES < keys ? s[j] : splat(-INF);
    top = larger(s[j], top);
  }
  top = largest_lane(top);
  const vec scale = splat(SCALE_LOG2);
  vec alpha = splat(1.0f);  // what exp2(+0) gives
  if (top[0] != *m) alpha = exp2((splat(*m) - top) * scale);
  vec sum[CHAIN_PARTS];
  UNROLL for (int j = 0; j < PARTS; j++) {
    const vec w = exp2((s[j] - top) * scale);
    store(p + j * LANES, w);
    vec& chain = sum[j % CHAIN_PARTS];
    chain = j < CHAIN_PARTS ? fma(load<vec>(l + j * LANES), alpha, w) : chain + w;
  }
  UNROLL for (int j = 0; j < CHAIN_PARTS; j++) store(l + j * LANES, sum[j]);
  *m = top[0];
  return alpha[0];
}

// O = O * alpha + P.V over keys [begin, end) of the tile for R rows; V is bf16 or widened; alpha NULL: all are 1.
template <int R, class T>
OUT_OF_LINE void accumulate(float* o, const float* p, const T* v, int64_t v_stride, const float* alpha, int begin, int end,
                            Ahead ahead) {
  for (int c0 = 0; c0 < HEAD_DIM; c0 += COLS * LANES) {
    vec acc[R][COLS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLS; c++) {
      acc[r][c] = load<vec>(o + r * HEAD_DIM + c0 + c * LANES);
      if (alpha) acc[r][c] = acc[r][c] * splat(alpha[r]);
    }
    for (int key = begin; key < end; key++) {
      if (c0 == 0) ahead.fetch(key);
      vec x[COLS];
      UNROLL for (int c = 0; c < COLS; c++) x[c] = load_float(v + key * v_stride + c0 + c * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        const vec w = splat(p[r * KEY_TILE + key]);
        UNROLL for (int c = 0; c < COLS; c++) acc[r][c] = fma(w, x[c], acc[r][c]);
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < COLS; c++)
        store(o + r * HEAD_DIM + c0 + c * LANES, acc[r][c]);
  }
}

// Writes one row of output and returns its LSE.
inline float finish(uint16_t* out, const float* o, const float* l, float m, bool empty) {
  if (empty) {
    memset(out, 0, HEAD_DIM * sizeof *out);
    return -INF;
  }
  float sum[SUM_CHAINS];
  memcpy(sum, l, sizeof sum);
  for (int step = SUM_CHAINS / 2; step >= 1; step /= 2)
    for (int j = 0; j < step; j++) sum[j] = sum[j] + sum[j + step];
  for (int d = 0; d < HEAD_DIM; d++) out[d] = to_bf16(o[d] / sum[0]);
  const float lse = (float)((double)m * SCALE + ln((double)sum[0]));
  return lse == lse ? lse : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace numerics

// --------------------------------------------------------------------------------------------------------- loading tiles
inline void widen(float* out, const uint16_t* in) {
  for (int d = 0; d < HEAD_DIM; d++) {
    const uint32_t bits = (uint32_t)in[d] << 16;
    memcpy(out + d, &bits, sizeof bits);
  }
}

// kt[d][key] = k[key][d] for `keys` keys; the last one again up to the next multiple of LANES.
// A 32-bit word is a pair (d even, d odd).
OUT_OF_LINE void load_keys(float (*kt)[KEY_TILE], const uint16_t* k, int64_t stride, int keys) {
  for (int key = 0; key < keys; key += LANES) {
    for (int pair = 0; pair < HEAD_DIM / 2; pair += LANES) {
      uvec a[LANES], b[LANES];
      UNROLL for (int i = 0; i < LANES; i++) a[i] = load<uvec>(k + std::min(key + i, keys - 1) * stride + 2 * pair);
      UNROLL for (int round = 1; round < LANES; round *= 2) {  // log2(LANES) perfect shuffles of the rows transpose them
        UNROLL for (int i = 0; i < LANES / 2; i++) {
          b[2 * i] = shuffle(a[i], a[i + LANES / 2], zip<false>(Lanes{}));
          b[2 * i + 1] = shuffle(a[i], a[i + LANES / 2], zip<true>(Lanes{}));
        }
        UNROLL for (int i = 0; i < LANES; i++) a[i] = b[i];
      }
      UNROLL for (int i = 0; i < LANES; i++) {
        store(&kt[2 * (pair + i)][key], a[i] << 16);
        store(&kt[2 * (pair + i) + 1][key], a[i] & 0xffff0000u);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ work items
// Rows of a sequence and a KV head are numbered position * group + head: they share K and V, and see ascending keys.
struct Problem {
  const UnifiedAttnParams* p;
  int64_t group;
  int64_t rows_per_item;
  int64_t chunks;  // items of the longest sequence and one KV head
};

// Calls f with the number of rows, 1 .. ROWS, as a constant.
template <int R = ROWS, class F>
inline void with_rows(int rows, F f) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, f);
  f(std::integral_constant<int, R>{});
}

void attend(const void* context, int64_t item, Scratch& s) {
  const Problem& problem = *(const Problem*)context;
  const UnifiedAttnParams& p = *problem.p;
  const int64_t sequences = p.batch * p.heads_kv;
  const int64_t chunk = problem.chunks - 1 - item / sequences;  // the longest causal rows first: they balance the end
  const int64_t batch = item % sequences / p.heads_kv, head_kv = item % p.heads_kv;
  int64_t start = 0, queries = p.seqlen_q, keys = p.seqlen_kv;
  if (p.cu_seqlens) {
    start = p.cu_seqlens[batch];
    queries = keys = p.cu_seqlens[batch + 1] - start;
  } else if (p.lengths) {
    keys = std::clamp<int64_t>(p.lengths[batch], 0, p.seqlen_kv);
  }
  const int64_t b = p.cu_seqlens ? 0 : batch;
  const auto offset = [&](const int64_t* stride, int64_t head, int64_t row) {
    return b * stride[0] + head * stride[1] + (start + row) * stride[2];
  };
  const int64_t first = chunk * problem.rows_per_item;
  const int rows = (int)std::clamp<int64_t>(queries * problem.group - first, 0, problem.rows_per_item);

  for (int r = 0; r < rows; r++) {
    const int64_t row = (first + r) / problem.group, head = head_kv * problem.group + (first + r) % problem.group;
    widen(s.q[r], (const uint16_t*)p.q + offset(p.q_stride, head, row));
    s.visible[r] = std::clamp<int64_t>(keys - queries + row + 1, 0, keys);
    s.m[r] = -numerics::INF;
    std::fill_n(s.l[r], SUM_CHAINS, 0.0f);
    std::fill_n(s.o[r], HEAD_DIM, 0.0f);
  }
  const uint16_t* k = (const uint16_t*)p.k + offset(p.k_stride, head_kv, 0);
  const uint16_t* v = (const uint16_t*)p.v + offset(p.v_stride, head_kv, 0);
  const int64_t end = rows ? s.visible[rows - 1] : 0;
  int active = 0;  // rows before it see no key of this tile
  for (int64_t tile = 0; tile < end; tile += KEY_TILE) {
    const auto count = [&](int r) { return (int)std::min<int64_t>(s.visible[r] - tile, KEY_TILE); };
    while (s.visible[active] <= tile) active++;
    const bool few = rows - active <= MAX_GROUP;  // memory is the limit: fetch ahead, and widen v on its way
    const uint16_t* tile_k = k + tile * p.k_stride[2];
    const uint16_t* tile_v = v + tile * p.v_stride[2];
    load_keys(s.kt, tile_k, p.k_stride[2], count(rows - 1));
    for (int r = active; r < rows; r += ROWS) {
      const int block = std::min(ROWS, rows - r);
      const Ahead ahead = {few && r == active ? tile_v : nullptr, p.v_stride[2]};
      with_rows(block, [&](auto R) { numerics::scores<R>(s.p[r], s.q[r], s.kt[0], count(r + block - 1), ahead); });
      for (int i = r; i < r + block; i++) s.alpha[i] = numerics::softmax(s.p[i], &s.m[i], s.l[i], count(i));
    }
    const auto add_values = [&](const auto* values, int64_t stride) {
      for (int r = active; r < rows; r += ROWS) {
        const int block = std::min(ROWS, rows - r), shared = count(r);
        const bool same = std::all_of(s.alpha + r, s.alpha + r + block, [](float a) { return a == 1.0f; });
        const float* alpha = same ? nullptr : s.alpha + r;
        const Ahead ahead = {few && r == active ? tile_k + KEY_TILE * p.k_stride[2] : nullptr, p.k_stride[2]};
        with_rows(block, [&](auto R) { numerics::accumulate<R>(s.o[r], s.p[r], values, stride, alpha, 0, shared, ahead); });
        for (int i = r + 1; i < r + block; i++)  // not as p = 0: 0 * v + O could change the sign of a zero
          if (count(i) > shared)
            numerics::accumulate<1>(s.o[i], s.p[i], values, stride, nullptr, shared, count(i), {nullptr, 0});
      }
    };
    if (few) {
      add_values(tile_v, p.v_stride[2]);
    } else {
      for (int key = 0; key < count(rows - 1); key++) widen(s.v[key], tile_v + key * p.v_stride[2]);
      add_values(s.v[0], HEAD_DIM);
    }
  }
  for (int r = 0; r < rows; r++) {
    const int64_t row = (first + r) / problem.group, head = head_kv * problem.group + (first + r) % problem.group;
    uint16_t* out = (uint16_t*)p.o + offset(p.o_stride, head, row);
    const float lse = numerics::finish(out, s.o[r], s.l[r], s.m[r], s.visible[r] == 0);
    if (p.lse) p.lse[b * p.lse_stride[0] + head * p.lse_stride[1] + start + row] = lse;
  }
}

// ----------------------------------------------------------------------------------------------------------- entry points
enum Code {
  OK,
  NULL_POINTER,
  BAD_SIZE,
  BAD_GROUP,
  PAGED,
  BAD_PREFILL,
  BAD_DECODE,
  BAD_PACKING,
  BAD_CU_SEQLENS,
  BAD_THREADS,
  NO_MEMORY,
  CODES
};

constexpr const char* MESSAGES[CODES] = {
    "success",
    "params, q, k, v and o must not be NULL",
    "batch, heads_q, heads_kv, seqlen_q and seqlen_kv must be at least 1",
    "heads_q must be 1 to 16 times heads_kv",
    "page_table must be NULL: paged caches are not supported",
    "prefill needs seqlen_q == seqlen_kv and takes no lengths",
    "decode needs seqlen_q == 1",
    "cu_seqlens is for prefill only",
    "cu_seqlens must start at 0 or above, not descend, and hold no sequence longer than seqlen_q",
    "num_threads must not be negative",
    "out of memory for the threads' scratch space",
};

Code check(int entry, const UnifiedAttnParams* p) {
  if (!p || !p->q || !p->k || !p->v || !p->o) return NULL_POINTER;
  if (p->batch < 1 || p->heads_q < 1 || p->heads_kv < 1 || p->seqlen_q < 1 || p->seqlen_kv < 1) return BAD_SIZE;
  if (p->heads_q % p->heads_kv || p->heads_q / p->heads_kv > MAX_GROUP) return BAD_GROUP;
  if (p->page_table) return PAGED;
  if (p->num_threads < 0) return BAD_THREADS;
  if (entry == UNIFIED_ATTN_PREFILL && (p->seqlen_q != p->seqlen_kv || p->lengths)) return BAD_PREFILL;
  if (entry == UNIFIED_ATTN_DECODE && p->seqlen_q != 1) return BAD_DECODE;
  if (entry != UNIFIED_ATTN_PREFILL && p->cu_seqlens) return BAD_PACKING;
  if (p->cu_seqlens) {
    if (p->cu_seqlens[0] < 0) return BAD_CU_SEQLENS;
    for (int64_t b = 0; b < p->batch; b++) {
      const int64_t rows = (int64_t)p->cu_seqlens[b + 1] - p->cu_seqlens[b];
      if (rows < 0 || rows > p->seqlen_q) return BAD_CU_SEQLENS;
    }
  }
  return OK;
}

// Rows of one item: as many as share a widened tile well, but enough items to give each thread work. Changes no bits.
int64_t rows_per_item(int64_t rows, int64_t sequences, int threads) {
  int64_t size = std::min<int64_t>(rows, MAX_ROWS);
  const auto items = [&] { return (rows + size - 1) / size * sequences; };
  while (size > 4 * ROWS && items() < 4 * threads) size = (size + 1) / 2;
  while (size > 1 && items() < threads) size = (size + 1) / 2;
  return size;
}

int run(int entry, const UnifiedAttnParams* p) {
  if (const Code code = check(entry, p)) return -code;
  const int threads = p->num_threads ? p->num_threads : std::max(1, (int)std::thread::hardware_concurrency());
  Problem problem;
  problem.p = p;
  problem.group = p->heads_q / p->heads_kv;
  const int64_t rows = p->seqlen_q * problem.group;
  problem.rows_per_item = rows_per_item(rows, p->batch * p->heads_kv, threads);
  problem.chunks = (rows + problem.rows_per_item - 1) / problem.rows_per_item;
  try {
    Pool<Scratch>::run(attend, &problem, problem.chunks * p->batch * p->heads_kv, threads);
  } catch (const std::bad_alloc&) {
    return -NO_MEMORY;
  }
  return OK;
}

}  // namespace

extern "C" {

int unified_prefill(const UnifiedAttnParams* params, void*) { return run(UNIFIED_ATTN_PREFILL, params); }

int unified_extend(const UnifiedAttnParams* params, void*) { return run(UNIFIED_ATTN_EXTEND, params); }

int unified_decode(const UnifiedAttnParams* params, void*) { return run(UNIFIED_ATTN_DECODE, params); }

int64_t unified_attn_workspace_bytes(int, const UnifiedAttnParams*) { return 0; }

int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }

const char* unified_attn_error(int code) { return code <= 0 && code > -CODES ? MESSAGES[-code] : "unknown error code"; }

}  // extern "C"
