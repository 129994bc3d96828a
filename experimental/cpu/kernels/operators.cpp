/* The operators of a transformer between attention calls, for the CPU: bf16 in and out, fp32 inside.
 *
 * Contract cpu-model-v1 (with attention: cpu-v1). A row of an output depends on its own row of the inputs and on the weights
 * alone, never on the number of rows, its place among them, threads or vector width: one function computes a row, in one
 * order. Arithmetic is IEEE round-to-nearest-even with subnormals (the caller's floating-point mode is set aside),
 * fma(a, b, c) is fused, and nothing else is contracted. bf16 is widened exactly and rounded to nearest even.
 *
 *   step      | arithmetic                                                                                     | where
 *   ----------+------------------------------------------------------------------------------------------------+----------
 *   embedding | the table's row, its bits                                                                      | gather
 *   add       | bf16(a + b), once                                                                              | add
 *   chains    | 16 of them, element i in chain i mod 16, ascending, from +0; elements past the end are +0      | dot, ...
 *   tree      | [j] + [j+8], then + [j+4], + [j+2], + [j+1]                                                    | tree
 *   linear    | chains of fma(x[k], w[n][k], c), tree, then + bias in fp32 where there is one, bf16 once       | dot
 *   rmsnorm   | chains of fma(x, x, c), tree; r = 1 / sqrt(sum / width + epsilon), each step rounded;          | rmsnorm
 *             | y = bf16(w * bf16(x * r)); QK norm: the same over 128 elements                                 |
 *   angles    | t = fp32(position) * frequency in fp32; n = floor(t * 2/pi + 1/2), y = fma(-n, PI2_LO,         | angles
 *             | fma(-n, PI2_HI, t)) in fp64; Horner by fma over COS or SIN in y^2; the quadrant n mod 4;       |
 *             | fp32 once                                                                                      |
 *   rope      | NeoX halves: y[i] = bf16(fma(x[i], c, -(x[i+64] * s))), y[i+64] = bf16(fma(x[i+64], c,         | rope
 *             | x[i] * s)), i < 64; the inner product is rounded                                               |
 *   exp(x)    | 0 below -87, inf above 88; n = nearest integer of x * log2(e), r = fma(n, -LN2_LO,             | exp
 *             | fma(n, -LN2_HI, x)), Horner by fma over EXP from degree 7 down, times 2^n (exact)              |
 *   swiglu    | bf16((g / (1 + exp(-g))) * u)                                                                  | swiglu
 *   route     | p = exp(l - max) summed in chains and tree, w = p / sum; experts by descending logit, the      | route
 *             | lower index first among equals; normalised: w / (sum of the chosen, in that order); fp32       |
 *   combine   | c = fma(weight[s], product[s], c) over the slots in the order chosen, from +0; bf16 once       | combine
 *   log_prob  | m = max; chains of + exp(l - m), tree; fp64((l[t] - m) in fp32) - ln(sum) in fp64, fp32 once;  | log_prob
 *             | ln by the steps of `ln`                                                                        |
 *
 * Supported inputs are finite. What others give is some value of the same row, never of another.
 */
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "operators_abi.h"
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "lanes.h"
#include "pool.h"

#ifdef __FAST_MATH__
#error "the contract needs IEEE arithmetic: build without -ffast-math"
#endif

namespace {

constexpr int HEAD_DIM = 128;
constexpr int HALF = HEAD_DIM / 2;
constexpr int CHAINS = 16;             // contract
constexpr int PARTS = CHAINS / LANES;  // registers that hold one set of chains

// Blocking, which may change speed but not bits: ROWS x COLS x PARTS accumulators and their operands fill the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 6, COLS = 4;
#else
constexpr int ROWS = 3, COLS = 2;
#endif
constexpr int64_t ROW_BLOCK = 12;  // rows that a work item of a linear layer widens once
constexpr int64_t COL_BLOCK = 32;  // and the columns that it computes of them
constexpr int64_t SMALL = 1 << 15; // multiplications of a call below which one thread does it all

// ---------------------------------------------------------------------------------------------------------- the contract
namespace numerics {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 0x1.715476p0f;
constexpr float LN2_HI = 0x1.62e4p-1f, LN2_LO = 0x1.7f7d1cp-20f;
constexpr float ROUND_MAGIC = 0x1.8p23f;
constexpr float EXP[6] = {0x1.a01a02p-13f, 0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0.5f};
constexpr double LN2 = 0x1.62e42fefa39efp-1;
constexpr double TWO_OVER_PI = 0x1.45f306dc9c883p-1, PI2_HI = 0x1.921fb54442d18p0, PI2_LO = 0x1.1a62633145c07p-54;
constexpr double COS[8] = {-0x1.93974a8c07c9dp-37,
                           0x1.1eed8eff8d898p-29,
                           -0x1.27e4fb7789f5cp-22,
                           0x1.a01a01a01a01ap-16,
                           -0x1.6c16c16c16c17p-10,
                           0x1.5555555555555p-5,
                           -0.5,
                           1.0};
constexpr double SIN[8] = {-0x1.ae7f3e733b81fp-41, 0x1.6124613a86d09p-33, -0x1.ae64567f544e4p-26, 0x1.71de3a556c734p-19,
                           -0x1.a01a01a01a01ap-13, 0x1.1111111111111p-7,  -0x1.5555555555555p-3,  1.0};

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

inline half_vec to_bf16(vec x) {
  const uvec bits = (uvec)x;
  const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : rounded * 0 + 0x7fc0, half_vec);
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

template <int STEP = LANES / 2>
inline vec add_lanes(vec x) {
  if constexpr (STEP == 0)
    return x;
  else
    return add_lanes<STEP / 2>(x + shuffle(x, x, swap<STEP>(Lanes{})));
}

// Sum of the chains, in lane 0.
inline float tree(const vec* chains) {
  vec sum[PARTS];
  UNROLL for (int i = 0; i < PARTS; i++) sum[i] = chains[i];
  UNROLL for (int step = PARTS / 2; step >= 1; step /= 2) UNROLL for (int i = 0; i < step; i++) sum[i] = sum[i] + sum[i + step];
  return add_lanes(sum[0])[0];
}

inline vec exp(vec x) {
  const vec magic = splat(ROUND_MAGIC);
  const vec rounded = x * splat(LOG2E) + magic;
  const vec n = rounded - magic;
  const vec r = fma(n, splat(-LN2_LO), fma(n, splat(-LN2_HI), x));
  vec y = splat(EXP[0]);
  for (int i = 1; i < 6; i++) y = fma(y, r, splat(EXP[i]));
  y = fma(y, r, splat(1.0f));
  y = fma(y, r, splat(1.0f));
  y = y * (vec)(((uvec)rounded - (uvec)magic + 127) << 23);
  y = x < splat(-87.0f) ? vec{} : y;
  return x > splat(88.0f) ? splat(INF) : y;
}

// ln(x) for x >= 1: x = 2^e * y with y in (sqrt(1/2), sqrt(2)], ln(y) = 2z * (1 + w/3 + w^2/5 + ... w^8/17).
inline double ln(double x) {
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

inline void add(const uint16_t* a, const uint16_t* b, uint16_t* out) { store(out, to_bf16(load_float(a) + load_float(b))); }

inline uint16_t add(uint16_t a, uint16_t b) { return to_bf16(from_bf16(a) + from_bf16(b)); }

// out[r][c] of R rows of x (widened, `inputs` apart) and C rows of weight.
template <int R, int C>
OUT_OF_LINE void dot(const float* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t inputs,
                     int64_t outputs) {
  vec acc[R][C][PARTS] = {};
  for (int64_t k = 0; k < inputs; k += CHAINS) {
    UNROLL for (int part = 0; part < PARTS; part++) {
      vec w[C];
      UNROLL for (int c = 0; c < C; c++) w[c] = load_float(weight + c * inputs + k + part * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        const vec row = load_float(x + r * inputs + k + part * LANES);
        UNROLL for (int c = 0; c < C; c++) acc[r][c][part] = fma(row, w[c], acc[r][c][part]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
    const float sum = tree(acc[r][c]);
    out[r * outputs + c] = to_bf16(bias ? sum + from_bf16(bias[c]) : sum);
  }
}

inline void rmsnorm(const uint16_t* x, const uint16_t* weight, uint16_t* out, int64_t width, float epsilon) {
  vec acc[PARTS] = {};
  for (int64_t i = 0; i < width; i += CHAINS) UNROLL for (int part = 0; part < PARTS; part++) {
      const vec v = load_float(x + i + part * LANES);
      acc[part] = fma(v, v, acc[part]);
    }
  const float scale = 1.0f / __builtin_sqrtf(tree(acc) / (float)width + epsilon);
  uint16_t inner[LANES];
  for (int64_t i = 0; i < width; i += LANES) {
    store(inner, to_bf16(load_float(x + i) * splat(scale)));
    store(out + i, to_bf16(load_float(weight + i) * load_float(inner)));
  }
}

inline void angle(float position, float frequency, float* cosine, float* sine) {
  const float turned = position * frequency;
  const double t = turned;
  const double n = __builtin_floor(t * TWO_OVER_PI + 0.5);
  const double y = __builtin_fma(-n, PI2_LO, __builtin_fma(-n, PI2_HI, t));
  const double square = y * y;
  double c = COS[0], s = SIN[0];
  for (int i = 1; i < 8; i++) c = __builtin_fma(c, square, COS[i]), s = __builtin_fma(s, square, SIN[i]);
  s = s * y;
  const int64_t quadrant = (int64_t)n & 3;
  const double cosines[4] = {c, -s, -c, s}, sines[4] = {s, c, -s, -c};
  *cosine = (float)cosines[quadrant];
  *sine = (float)sines[quadrant];
}

inline void rope(const uint16_t* x, const float* cosines, const float* sines, uint16_t* out) {
  for (int i = 0; i < HALF; i += LANES) {
    const vec low = load_float(x + i), high = load_float(x + HALF + i);
    const vec c = load_float(cosines + i), s = load_float(sines + i);
    store(out + i, to_bf16(fma(low, c, -(high * s))));
    store(out + HALF + i, to_bf16(fma(high, c, low * s)));
  }
}

inline void swiglu(const uint16_t* gate, const uint16_t* up, uint16_t* out) {
  const vec g = load_float(gate);
  store(out, to_bf16(g / (splat(1.0f) + exp(-g)) * load_float(up)));
}

inline void combine(const uint16_t* products, const float* weights, uint16_t* out, int64_t top, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    vec acc = {};
    for (int64_t s = 0; s < top; s++) acc = fma(splat(weights[s]), load_float(products + s * width + i), acc);
    store(out + i, to_bf16(acc));
  }
}

inline float largest(const float* x, int64_t count) {
  float top = -INF;
  for (int64_t i = 0; i < count; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// Turns x[count] into exp(x - top), and returns their sum; x is followed by room up to a multiple of CHAINS.
inline float exponentials(float* x, int64_t count, float top) {
  vec acc[PARTS] = {};
  for (int64_t i = count; i % CHAINS; i++) x[i] = -INF;
  for (int64_t i = 0; i < count; i += CHAINS) UNROLL for (int part = 0; part < PARTS; part++) {
      const vec e = exp(load_float(x + i + part * LANES) - splat(top));
      store(x + i + part * LANES, e);
      acc[part] = acc[part] + e;
    }
  return tree(acc);
}

inline void route(const uint16_t* logits, float* p, int64_t* chosen, float* weights, int64_t experts, int64_t top,
                  bool normalise) {
  for (int64_t e = 0; e < experts; e++) p[e] = from_bf16(logits[e]);
  for (int64_t s = 0; s < top; s++) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; e++) {
      if (std::find(chosen, chosen + s, e) != chosen + s) continue;
      if (best < 0 || p[e] > p[best]) best = e;
    }
    chosen[s] = best;
  }
  const float sum = exponentials(p, experts, p[chosen[0]]);
  float total = 0.0f;
  for (int64_t s = 0; s < top; s++) {
    weights[s] = p[chosen[s]] / sum;
    total = total + weights[s];
  }
  if (normalise)
    for (int64_t s = 0; s < top; s++) weights[s] = weights[s] / total;
}

inline float log_prob(const uint16_t* logits, float* p, int64_t target, int64_t vocabulary) {
  for (int64_t i = 0; i < vocabulary; i++) p[i] = from_bf16(logits[i]);
  const float top = largest(p, vocabulary);
  const float shifted = p[target] - top;
  return (float)((double)shifted - ln((double)exponentials(p, vocabulary, top)));
}

}  // namespace numerics

// ------------------------------------------------------------------------------------------------------------ work items
struct Scratch {
  std::vector<float> values;  // widened rows of one item

  float* room(int64_t count) {
    if ((int64_t)values.size() < count) values.resize(count);
    return values.data();
  }
};

// Calls body(item, scratch) for items 0 .. items - 1, on several threads where the call's work pays for them.
template <class Body>
int share(int64_t items, int64_t work, int32_t threads, const Body& body) {
  if (threads < 0) return OPERATORS_BAD_THREADS;
  if (items == 0) return OPERATORS_OK;
  if (threads == 0) threads = std::max(1, (int)std::thread::hardware_concurrency());
  if (work < SMALL) threads = 1;
  const auto run = [](const void* context, int64_t item, Scratch& scratch) { (*(const Body*)context)(item, scratch); };
  try {
    Pool<Scratch>::run(run, &body, items, threads);
  } catch (const std::bad_alloc&) {
    return OPERATORS_NO_MEMORY;
  }
  return OPERATORS_OK;
}

// Calls body(row, scratch) for every row, in items of several rows.
template <class Body>
int share_rows(int64_t rows, int64_t work_of_row, int32_t threads, const Body& body) {
  const int64_t size = std::max<int64_t>(1, SMALL / 4 / std::max<int64_t>(1, work_of_row));
  return share((rows + size - 1) / size, rows * work_of_row, threads, [&](int64_t item, Scratch& scratch) {
    for (int64_t row = item * size; row < std::min(rows, (item + 1) * size); row++) body(row, scratch);
  });
}

bool within(const int64_t* values, int64_t count, int64_t end) {
  return std::all_of(values, values + count, [end](int64_t v) { return v >= 0 && v < end; });
}

template <int LARGEST, class F>
inline void with_count(int count, F f) {
  if constexpr (LARGEST > 1)
    if (count < LARGEST) return with_count<LARGEST - 1>(count, f);
  f(std::integral_constant<int, LARGEST>{});
}

struct Linear {
  const uint16_t *x, *weight, *bias;
  uint16_t* out;
  int64_t rows, inputs, outputs;

  void block(int64_t row0, int64_t col0, Scratch& scratch) const {
    const int64_t count = std::min(ROW_BLOCK, rows - row0), end = std::min(outputs, col0 + COL_BLOCK);
    float* wide = scratch.room(count * inputs);
    for (int64_t i = 0; i < count * inputs; i += LANES) store(wide + i, load_float(x + row0 * inputs + i));
    for (int64_t col = col0; col < end; col += COLS) {
      const int cols = (int)std::min<int64_t>(COLS, end - col);
      for (int64_t r = 0; r < count; r += ROWS) {
        const uint16_t *w = weight + col * inputs, *b = bias ? bias + col : nullptr;
        const float* row = wide + r * inputs;
        uint16_t* to = out + (row0 + r) * outputs + col;
        with_count<ROWS>((int)std::min<int64_t>(ROWS, count - r), [&](auto R) {
          with_count<COLS>(cols, [&](auto C) { numerics::dot<R, C>(row, w, b, to, inputs, outputs); });
        });
      }
    }
  }
};

}  // namespace

// ----------------------------------------------------------------------------------------------------------- entry points
extern "C" {

int operators_abi_version(void) { return OPERATORS_ABI_VERSION; }

int operators_embedding(const uint16_t* table, const int64_t* ids, uint16_t* out, int64_t vocabulary, int64_t rows,
                        int64_t width, int32_t threads) {
  if (!table || !ids || !out || rows < 0 || vocabulary < 1 || width < 1) return OPERATORS_BAD_SIZE;
  if (!within(ids, rows, vocabulary)) return OPERATORS_BAD_INDEX;
  return share_rows(rows, width, threads, [=](int64_t row, Scratch&) {
    std::memcpy(out + row * width, table + ids[row] * width, width * sizeof *out);
  });
}

int operators_add(const uint16_t* a, const uint16_t* b, uint16_t* out, int64_t count, int32_t threads) {
  if (!a || !b || !out || count < 0) return OPERATORS_BAD_SIZE;
  const int64_t size = SMALL / 4;
  return share((count + size - 1) / size, count, threads, [=](int64_t item, Scratch&) {
    int64_t i = item * size;
    const int64_t end = std::min(count, i + size);
    for (; i + LANES <= end; i += LANES) numerics::add(a + i, b + i, out + i);
    for (; i < end; i++) out[i] = numerics::add(a[i], b[i]);
  });
}

int operators_rmsnorm(const uint16_t* x, const uint16_t* weight, uint16_t* out, int64_t rows, int64_t width, float epsilon,
                      int32_t threads) {
  if (!x || !weight || !out || rows < 0 || width < 1 || width % CHAINS) return OPERATORS_BAD_SIZE;
  return share_rows(rows, width, threads, [=](int64_t row, Scratch&) {
    numerics::rmsnorm(x + row * width, weight, out + row * width, width, epsilon);
  });
}

int operators_angles(const int64_t* positions, const float* frequencies, float* cosines, float* sines, int64_t rows,
                     int32_t threads) {
  if (!positions || !frequencies || !cosines || !sines || rows < 0) return OPERATORS_BAD_SIZE;
  if (!within(positions, rows, (1 << 24) + 1)) return OPERATORS_BAD_INDEX;
  return share_rows(rows, HALF * 32, threads, [=](int64_t row, Scratch&) {
    for (int64_t i = 0; i < HALF; i++)
      numerics::angle((float)positions[row], frequencies[i], cosines + row * HALF + i, sines + row * HALF + i);
  });
}

int operators_rope(const uint16_t* x, const float* cosines, const float* sines, uint16_t* out, int64_t rows, int64_t heads,
                   int32_t threads) {
  if (!x || !cosines || !sines || !out || rows < 0 || heads < 1) return OPERATORS_BAD_SIZE;
  return share_rows(rows, heads * HEAD_DIM, threads, [=](int64_t row, Scratch&) {
    for (int64_t i = row * heads; i < (row + 1) * heads; i++)
      numerics::rope(x + i * HEAD_DIM, cosines + row * HALF, sines + row * HALF, out + i * HEAD_DIM);
  });
}

int operators_linear(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                     int64_t inputs, int64_t outputs, int32_t threads) {
  if (!x || !weight || !out || rows < 0 || inputs < 1 || outputs < 1 || inputs % CHAINS) return OPERATORS_BAD_SIZE;
  const Linear problem = {x, weight, bias, out, rows, inputs, outputs};
  const int64_t columns = (outputs + COL_BLOCK - 1) / COL_BLOCK, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  return share(blocks * columns, rows * inputs * outputs, threads, [&](int64_t item, Scratch& scratch) {
    problem.block(item % blocks * ROW_BLOCK, item / blocks * COL_BLOCK, scratch);  // a block of weights serves all rows
  });
}

int operators_swiglu(const uint16_t* gate, const uint16_t* up, uint16_t* out, int64_t rows, int64_t width, int64_t stride,
                     int32_t threads) {
  if (!gate || !up || !out || rows < 0 || width < 1 || width % CHAINS || stride < width) return OPERATORS_BAD_SIZE;
  return share_rows(rows, width * 4, threads, [=](int64_t row, Scratch&) {
    for (int64_t i = 0; i < width; i += LANES)
      numerics::swiglu(gate + row * stride + i, up + row * stride + i, out + row * width + i);
  });
}

int operators_route(const uint16_t* logits, int64_t* chosen, float* weights, int64_t rows, int64_t experts, int64_t top,
                    int32_t normalise, int32_t threads) {
  if (!logits || !chosen || !weights || rows < 0 || experts < 1 || top < 1 || top > experts) return OPERATORS_BAD_SIZE;
  return share_rows(rows, experts * (top + 8), threads, [=](int64_t row, Scratch& scratch) {
    float* p = scratch.room(experts + CHAINS);
    numerics::route(logits + row * experts, p, chosen + row * top, weights + row * top, experts, top, normalise != 0);
  });
}

int operators_combine(const uint16_t* products, const float* weights, uint16_t* out, int64_t rows, int64_t top, int64_t width,
                      int32_t threads) {
  if (!products || !weights || !out || rows < 0 || top < 1 || width < 1 || width % CHAINS) return OPERATORS_BAD_SIZE;
  return share_rows(rows, top * width, threads, [=](int64_t row, Scratch&) {
    numerics::combine(products + row * top * width, weights + row * top, out + row * width, top, width);
  });
}

int operators_cache_write(const uint16_t* x, const int64_t* sequence, const int64_t* position, uint16_t* cache, int64_t rows,
                          int64_t heads, int64_t sequences, int64_t capacity, int32_t threads) {
  if (!x || !sequence || !position || !cache || rows < 0 || heads < 1 || sequences < 1 || capacity < 1)
    return OPERATORS_BAD_SIZE;
  if (!within(sequence, rows, sequences) || !within(position, rows, capacity)) return OPERATORS_BAD_INDEX;
  return share_rows(rows, heads * HEAD_DIM, threads, [=](int64_t row, Scratch&) {
    for (int64_t h = 0; h < heads; h++) {
      uint16_t* to = cache + ((sequence[row] * heads + h) * capacity + position[row]) * HEAD_DIM;
      std::memcpy(to, x + (row * heads + h) * HEAD_DIM, HEAD_DIM * sizeof *to);
    }
  });
}

int operators_log_prob(const uint16_t* logits, const int64_t* targets, float* out, int64_t rows, int64_t vocabulary,
                       int32_t threads) {
  if (!logits || !targets || !out || rows < 0 || vocabulary < 1) return OPERATORS_BAD_SIZE;
  if (!within(targets, rows, vocabulary)) return OPERATORS_BAD_INDEX;
  return share_rows(rows, vocabulary * 8, threads, [=](int64_t row, Scratch& scratch) {
    float* p = scratch.room(vocabulary + CHAINS);
    out[row] = numerics::log_prob(logits + row * vocabulary, p, targets[row], vocabulary);
  });
}

}  // extern "C"
