/* One vector register and what is done to it beside arithmetic. Its width may change speed, never bits. */
#ifndef CPU_KERNELS_LANES_H
#define CPU_KERNELS_LANES_H
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
using Lanes = std::make_integer_sequence<int, LANES>;

// Accumulators live in registers only where their loops disappear and no other loop shares the function.
#define UNROLL _Pragma("GCC unroll 16")
#define OUT_OF_LINE __attribute__((noinline))

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// LANES values as fp32: as they are, or widened from bf16.
inline vec load_float(const float* p) { return load<vec>(p); }
inline vec load_float(const uint16_t* p) { return (vec)(__builtin_convertvector(load<half_vec>(p), uvec) << 16); }

inline vec splat(float x) { return x - vec{}; }

// Lane i of the result is lane MAP[i] of a followed by b.
template <class V, int... MAP>
inline V shuffle(V a, V b, std::integer_sequence<int, MAP...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, MAP...);
#else
  return __builtin_shuffle(a, b, ivec{MAP...});
#endif
}

// Maps for shuffle: a0 b0 a1 b1 ... from the lower or upper half of a and b; each lane's partner STEP lanes away.
template <bool UPPER, int... I>
constexpr auto zip(std::integer_sequence<int, I...>) {
  return std::integer_sequence<int, (UPPER * LANES / 2 + I / 2 + I % 2 * LANES)...>{};
}
template <int STEP, int... I>
constexpr auto swap(std::integer_sequence<int, I...>) {
  return std::integer_sequence<int, (I ^ STEP)...>{};
}

// 256-byte rows that a later step reads, brought closer while this step computes. NULL: none.
struct Ahead {
  const uint16_t* rows;
  int64_t stride;

  void fetch(int row) const {
    if (!rows) return;
    UNROLL for (int line = 0; line < 4; line++) __builtin_prefetch(rows + row * stride + line * 32);
  }
};

}  // namespace

#endif
