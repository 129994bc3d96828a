/* The literal witness of contract cpu-v1: one row at a time, one key at a time.
 *
 * The contract is the table at the top of unified_attn.cpp. This file shares no code with it: it is written to be read
 * beside the table, and to be slow. It runs on the calling thread and accepts what the header describes.
 */
#include <cfenv>
#include <cmath>
#include <cstdint>

#include "../../common/attn_abi.h"

namespace {

union Word {
  float value;
  uint32_t bits;
};

// A bf16 number is the upper half of the fp32 number that it stands for.
float bf16_to_float(uint16_t half) {
  Word word;
  word.bits = (uint32_t)half * 65536;
  return word.value;
}

uint16_t float_to_bf16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  Word word;
  word.value = x;
  const uint32_t dropped = word.bits & 0xffff, kept = word.bits >> 16;
  const bool up = dropped > 0x8000 || (dropped == 0x8000 && kept % 2 == 1);
  return (uint16_t)(kept + up);
}

float exp2_of(float x) {
  if (x < -126.0f) return 0.0f;
  if (std::isnan(x)) return x;
  const float n = std::nearbyint(x);
  const float f = x - n;
  float y = 0x1.5bba14p-10f;
  y = std::fma(y, f, 0x1.3cea88p-7f);
  y = std::fma(y, f, 0x1.c6b752p-5f);
  y = std::fma(y, f, 0x1.ebf9bcp-3f);
  y = std::fma(y, f, 0x1.62e42ap-1f);
  y = std::fma(y, f, 1.0f);
  return std::ldexp(y, (int)n);
}

double ln_of(double x) {
  if (std::isnan(x)) return x;
  int e;
  double y = 2.0 * std::frexp(x, &e);
  e = e - 1;
  if (y > 0x1.6a09e667f3bcdp0) {
    y = y * 0.5;
    e = e + 1;
  }
  const double z = (y - 1.0) / (y + 1.0), w = z * z;
  double sum = 1.0 / 17.0;
  sum = sum * w + 1.0 / 15.0;
  sum = sum * w + 1.0 / 13.0;
  sum = sum * w + 1.0 / 11.0;
  sum = sum * w + 1.0 / 9.0;
  sum = sum * w + 1.0 / 7.0;
  sum = sum * w + 1.0 / 5.0;
  sum = sum * w + 1.0 / 3.0;
  sum = sum * w + 1.0;
  return e * 0x1.62e42fefa39efp-1 + (z + z) * sum;
}

// One row: q and out are 128 words, keys lie `k_stride` and `v_stride` words apart.
float row(const uint16_t* q, const uint16_t* k, int64_t k_stride, const uint16_t* v, int64_t v_stride, int64_t visible,
          uint16_t* out) {
  if (visible <= 0) {
    for (int d = 0; d < 128; d++) out[d] = 0;
    return -INFINITY;
  }
  float m = -INFINITY;
  float l[16] = {}, o[128] = {};
  for (int64_t tile = 0; tile < visible; tile += 64) {
    const int n = (int)(visible - tile < 64 ? visible - tile : 64);
    float s[64], p[64];
    float m_new = m;
    for (int key = 0; key < n; key++) {
      s[key] = 0.0f;
      for (int d = 0; d < 128; d++)
        s[key] = std::fma(bf16_to_float(q[d]), bf16_to_float(k[(tile + key) * k_stride + d]), s[key]);
      if (s[key] > m_new) m_new = s[key];
    }
    const float c2 = 0x1.0527dcp-3f;
    const float rescale = exp2_of((m - m_new) * c2);
    for (int key = 0; key < 64; key++) p[key] = key < n ? exp2_of((s[key] - m_new) * c2) : 0.0f;
    for (int key = 0; key < 64; key++) {
      if (key < 16)
        l[key] = std::fma(l[key], rescale, p[key]);
      else
        l[key % 16] = l[key % 16] + p[key];
    }
    for (int d = 0; d < 128; d++) o[d] = o[d] * rescale;
    for (int key = 0; key < n; key++)
      for (int d = 0; d < 128; d++) o[d] = std::fma(p[key], bf16_to_float(v[(tile + key) * v_stride + d]), o[d]);
    m = m_new;
  }
  float half[8], quarter[4];
  for (int j = 0; j < 8; j++) half[j] = l[j] + l[j + 8];
  for (int j = 0; j < 4; j++) quarter[j] = half[j] + half[j + 4];
  const float sum = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  for (int d = 0; d < 128; d++) out[d] = float_to_bf16(o[d] / sum);
  const double lse = m * 0x1.6a09e667f3bcdp-4 + ln_of(sum);
  return std::isnan(lse) ? NAN : (float)lse;
}

int every_row(const UnifiedAttnParams* a) {
  if (!a || !a->q || !a->k || !a->v || !a->o || a->heads_kv < 1 || a->heads_q % a->heads_kv || a->page_table) return -1;
  fenv_t callers_mode;
  fegetenv(&callers_mode);
  fesetenv(FE_DFL_ENV);
  const int64_t group = a->heads_q / a->heads_kv;
  for (int64_t b = 0; b < a->batch; b++)
    for (int64_t h = 0; h < a->heads_q; h++) {
      const int64_t q_at = h * a->q_stride[1], o_at = h * a->o_stride[1];
      const int64_t k_at = h / group * a->k_stride[1], v_at = h / group * a->v_stride[1];
      if (a->cu_seqlens) {
        const int64_t begin = a->cu_seqlens[b], end = a->cu_seqlens[b + 1];
        for (int64_t i = begin; i < end; i++) {
          const float lse =
              row((const uint16_t*)a->q + q_at + i * a->q_stride[2], (const uint16_t*)a->k + k_at + begin * a->k_stride[2],
                  a->k_stride[2], (const uint16_t*)a->v + v_at + begin * a->v_stride[2], a->v_stride[2], i - begin + 1,
                  (uint16_t*)a->o + o_at + i * a->o_stride[2]);
          if (a->lse) a->lse[h * a->lse_stride[1] + i] = lse;
        }
        continue;
      }
      int64_t keys = a->lengths ? a->lengths[b] : a->seqlen_kv;
      if (keys < 0) keys = 0;
      if (keys > a->seqlen_kv) keys = a->seqlen_kv;
      for (int64_t i = 0; i < a->seqlen_q; i++) {
        const float lse = row((const uint16_t*)a->q + b * a->q_stride[0] + q_at + i * a->q_stride[2],
                              (const uint16_t*)a->k + b * a->k_stride[0] + k_at, a->k_stride[2],
                              (const uint16_t*)a->v + b * a->v_stride[0] + v_at, a->v_stride[2], keys - a->seqlen_q + i + 1,
                              (uint16_t*)a->o + b * a->o_stride[0] + o_at + i * a->o_stride[2]);
        if (a->lse) a->lse[b * a->lse_stride[0] + h * a->lse_stride[1] + i] = lse;
      }
    }
  fesetenv(&callers_mode);
  return 0;
}

}  // namespace

extern "C" {

int unified_prefill(const UnifiedAttnParams* params, void*) { return every_row(params); }
int unified_extend(const UnifiedAttnParams* params, void*) { return every_row(params); }
int unified_decode(const UnifiedAttnParams* params, void*) { return every_row(params); }
int64_t unified_attn_workspace_bytes(int, const UnifiedAttnParams*) { return 0; }
int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }
const char* unified_attn_error(int code) {
  return code == 0 ? "success" : "the witness needs q, k, v, o, whole groups of heads and no page table";
}

}  // extern "C"
