/* Literal witness of the operators' contract: scalar, one thread, one loop a step, no blocking, no vectors.
 *
 * It shares no code with operators.cpp, whose table states the steps. Slow on purpose.
 */
#include <math.h>
#include <string.h>

#include <vector>

#include "operators_abi.h"

namespace {

float wide(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

uint16_t narrow(float x) {
  if (isnan(x)) return 0x7fc0;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rest = bits & 0xffff, kept = bits >> 16;
  return (uint16_t)(rest > 0x8000 || (rest == 0x8000 && kept % 2 == 1) ? kept + 1 : kept);
}

struct Chains {
  float c[16] = {};

  float sum() {
    for (int step : {8, 4, 2, 1})
      for (int j = 0; j < step; j++) c[j] = c[j] + c[j + step];
    return c[0];
  }
};

float exponential(float x) {
  if (x < -87.0f) return 0.0f;
  if (x > 88.0f) return INFINITY;
  const float shifted = x * 0x1.715476p0f + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));
  float y = 0x1.a01a02p-13f;  // 1/7!
  for (float next : {0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0.5f, 1.0f, 1.0f}) y = fmaf(y, r, next);
  return ldexpf(y, (int)n);
}

double logarithm(double x) {
  int e;
  double y = 2.0 * frexp(x, &e);
  e -= 1;
  if (y > 0x1.6a09e667f3bcdp0) {
    y = y / 2.0;
    e += 1;
  }
  const double z = (y - 1.0) / (y + 1.0), w = z * z;
  double sum = 1.0 / 17.0;
  for (int odd = 15; odd >= 1; odd -= 2) sum = sum * w + 1.0 / odd;
  return e * 0x1.62e42fefa39efp-1 + 2.0 * z * sum;
}

double factorial(int n) { return n <= 1 ? 1.0 : n * factorial(n - 1); }

void angle(float position, float frequency, float* cosine, float* sine) {
  const double t = (double)(position * frequency);
  const double n = floor(t * 0x1.45f306dc9c883p-1 + 0.5);
  const double y = fma(-n, 0x1.1a62633145c07p-54, fma(-n, 0x1.921fb54442d18p0, t));
  double c = 0.0, s = 0.0;
  for (int i = 14; i >= 0; i -= 2) {
    const double sign = i / 2 % 2 ? -1.0 : 1.0;
    c = i == 14 ? sign / factorial(14) : fma(c, y * y, sign / factorial(i));
    s = i == 14 ? sign / factorial(15) : fma(s, y * y, sign / factorial(i + 1));
  }
  s = s * y;
  const int quadrant = (int)(n - 4.0 * floor(n / 4.0));
  *cosine = (float)(quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s);
  *sine = (float)(quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c);
}

}  // namespace

extern "C" {

int operators_abi_version(void) { return OPERATORS_ABI_VERSION; }

int operators_embedding(const uint16_t* table, const int64_t* ids, uint16_t* out, int64_t, int64_t rows, int64_t width,
                        int32_t) {
  for (int64_t i = 0; i < rows * width; i++) out[i] = table[ids[i / width] * width + i % width];
  return OPERATORS_OK;
}

int operators_add(const uint16_t* a, const uint16_t* b, uint16_t* out, int64_t count, int32_t) {
  for (int64_t i = 0; i < count; i++) out[i] = narrow(wide(a[i]) + wide(b[i]));
  return OPERATORS_OK;
}

int operators_rmsnorm(const uint16_t* x, const uint16_t* weight, uint16_t* out, int64_t rows, int64_t width, float epsilon,
                      int32_t) {
  for (int64_t r = 0; r < rows; r++) {
    Chains chains;
    for (int64_t i = 0; i < width; i++) {
      const float v = wide(x[r * width + i]);
      chains.c[i % 16] = fmaf(v, v, chains.c[i % 16]);
    }
    const float mean = chains.sum() / (float)width;
    const float scale = 1.0f / sqrtf(mean + epsilon);
    for (int64_t i = 0; i < width; i++)
      out[r * width + i] = narrow(wide(weight[i]) * wide(narrow(wide(x[r * width + i]) * scale)));
  }
  return OPERATORS_OK;
}

int operators_angles(const int64_t* positions, const float* frequencies, float* cosines, float* sines, int64_t rows, int32_t) {
  for (int64_t i = 0; i < rows * 64; i++) angle((float)positions[i / 64], frequencies[i % 64], cosines + i, sines + i);
  return OPERATORS_OK;
}

int operators_rope(const uint16_t* x, const float* cosines, const float* sines, uint16_t* out, int64_t rows, int64_t heads,
                   int32_t) {
  for (int64_t head = 0; head < rows * heads; head++)
    for (int64_t i = 0; i < 64; i++) {
      const float low = wide(x[head * 128 + i]), high = wide(x[head * 128 + 64 + i]);
      const float c = cosines[head / heads * 64 + i], s = sines[head / heads * 64 + i];
      const float high_s = high * s, low_s = low * s;
      out[head * 128 + i] = narrow(fmaf(low, c, -high_s));
      out[head * 128 + 64 + i] = narrow(fmaf(high, c, low_s));
    }
  return OPERATORS_OK;
}

int operators_linear(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                     int64_t inputs, int64_t outputs, int32_t) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t n = 0; n < outputs; n++) {
      Chains chains;
      for (int64_t k = 0; k < inputs; k++)
        chains.c[k % 16] = fmaf(wide(x[r * inputs + k]), wide(weight[n * inputs + k]), chains.c[k % 16]);
      float y = chains.sum();
      if (bias) y = y + wide(bias[n]);
      out[r * outputs + n] = narrow(y);
    }
  return OPERATORS_OK;
}

int operators_swiglu(const uint16_t* gate, const uint16_t* up, uint16_t* out, int64_t rows, int64_t width, int64_t stride,
                     int32_t) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i++) {
      const float g = wide(gate[r * stride + i]);
      const float silu = g / (1.0f + exponential(-g));
      out[r * width + i] = narrow(silu * wide(up[r * stride + i]));
    }
  return OPERATORS_OK;
}

int operators_route(const uint16_t* logits, int64_t* chosen, float* weights, int64_t rows, int64_t experts, int64_t top,
                    int32_t normalise, int32_t) {
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t* l = logits + r * experts;
    std::vector<bool> taken(experts);
    float max = -INFINITY, total = 0.0f;
    Chains chains;
    for (int64_t e = 0; e < experts; e++) max = fmaxf(max, wide(l[e]));
    for (int64_t e = 0; e < experts; e++) chains.c[e % 16] = chains.c[e % 16] + exponential(wide(l[e]) - max);
    const float sum = chains.sum();
    for (int64_t s = 0; s < top; s++) {
      int64_t best = 0;
      while (taken[best]) best++;
      for (int64_t e = best + 1; e < experts; e++)
        if (!taken[e] && wide(l[e]) > wide(l[best])) best = e;
      taken[best] = true;
      chosen[r * top + s] = best;
      weights[r * top + s] = exponential(wide(l[best]) - max) / sum;
      total = total + weights[r * top + s];
    }
    for (int64_t s = 0; normalise && s < top; s++) weights[r * top + s] = weights[r * top + s] / total;
  }
  return OPERATORS_OK;
}

int operators_combine(const uint16_t* products, const float* weights, uint16_t* out, int64_t rows, int64_t top, int64_t width,
                      int32_t) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i++) {
      float y = 0.0f;
      for (int64_t s = 0; s < top; s++) y = fmaf(weights[r * top + s], wide(products[(r * top + s) * width + i]), y);
      out[r * width + i] = narrow(y);
    }
  return OPERATORS_OK;
}

int operators_cache_write(const uint16_t* x, const int64_t* sequence, const int64_t* position, uint16_t* cache, int64_t rows,
                          int64_t heads, int64_t, int64_t capacity, int32_t) {
  for (int64_t i = 0; i < rows * heads * 128; i++) {
    const int64_t row = i / 128 / heads, head = i / 128 % heads;
    cache[((sequence[row] * heads + head) * capacity + position[row]) * 128 + i % 128] = x[i];
  }
  return OPERATORS_OK;
}

int operators_log_prob(const uint16_t* logits, const int64_t* targets, float* out, int64_t rows, int64_t vocabulary, int32_t) {
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t* l = logits + r * vocabulary;
    float max = -INFINITY;
    Chains chains;
    for (int64_t i = 0; i < vocabulary; i++) max = fmaxf(max, wide(l[i]));
    for (int64_t i = 0; i < vocabulary; i++) chains.c[i % 16] = chains.c[i % 16] + exponential(wide(l[i]) - max);
    const float shifted = wide(l[targets[r]]) - max;
    out[r] = (float)((double)shifted - logarithm((double)chains.sum()));
  }
  return OPERATORS_OK;
}

}  // extern "C"
