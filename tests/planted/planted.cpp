/* Planted faults for the bit fuzzer: the honest library of the CPU target with one rare fault. A test writes
 *     #define HONEST "/path/of/the/honest/library.so"
 *     #define PLANT name_of_the_fault
 * in front of this file and builds it as a candidate. rarity.py measures how often each fires; planted_fires() is the
 * condition alone, which it calls without memory for q, k, v and o where it can.
 *
 *   tail        extend whose first sequence has n keys, n % 128 == 97, and rows % 32 == 9
 *   batch       decode of exactly 37 sequences with heads 12/2
 *   lengths     decode with lengths, capacity % 64 == 40, whose last sequence has half the capacity, or up to 3 keys more
 *   stride      prefill with k rows 88 and v rows 40 elements past a multiple of 256, q rows a multiple of 64 apart
 *   subnormal   decode whose first sequence has n > 1 keys, n % 128 == 1, the last of them the largest score of its row:
 *               the rescale of that tile flushes what is subnormal
 *   workspace   extend, rows % 16 == 5, right after a packed call of 8 i + 3 sequences with 8 times as many keys
 */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "../../common/attn_abi.h"

namespace {

enum Entry { PREFILL, EXTEND, DECODE };
enum Fault { honest, tail, batch, lengths, stride, subnormal, workspace, crash, hang };
constexpr Fault fault = PLANT;

struct Leftover {  // of the last call, in the workspace
  int64_t magic, packed, batch, keys;
};
constexpr int64_t MAGIC = 0x1eaf50f7;

int64_t keys_of(const UnifiedAttnParams& a, int64_t b) { return a.lengths ? a.lengths[b] : a.seqlen_kv; }

float number(uint16_t word) {
  const uint32_t bits = (uint32_t)word << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

uint16_t* output(const UnifiedAttnParams& a, int64_t b, int64_t h) {
  return (uint16_t*)a.o + b * a.o_stride[0] + h * a.o_stride[1];
}

// Whether the last of n keys has the largest score of head h of the first sequence.
bool last_is_largest(const UnifiedAttnParams& a, int64_t h, int64_t n) {
  const uint16_t* q = (const uint16_t*)a.q + h * a.q_stride[1];
  float largest = -3.0e38f, score = 0;
  for (int64_t j = 0; j < n; j++) {
    const uint16_t* k = (const uint16_t*)a.k + h / (a.heads_q / a.heads_kv) * a.k_stride[1] + j * a.k_stride[2];
    score = 0;
    for (int d = 0; d < 128; d++) score += number(q[d]) * number(k[d]);
    if (j < n - 1 && score > largest) largest = score;
  }
  return score > largest;
}

bool fires(Entry entry, const UnifiedAttnParams& a) {
  const int64_t n = keys_of(a, 0);
  switch (fault) {
    case tail:
      return entry == EXTEND && n % 128 == 97 && a.seqlen_q % 32 == 9 && a.seqlen_q <= n;
    case batch:
      return entry == DECODE && a.batch == 37 && a.heads_q == 12 && a.heads_kv == 2;
    case lengths:
      return entry == DECODE && a.lengths && a.seqlen_kv % 64 == 40 && (uint64_t)(a.lengths[a.batch - 1] - a.seqlen_kv / 2) < 4;
    case stride:
      return entry == PREFILL && !a.cu_seqlens && a.k_stride[2] % 256 == 88 && a.v_stride[2] % 256 == 40 &&
             a.q_stride[2] % 64 == 0;
    case subnormal: {
      if (entry != DECODE || n % 128 != 1 || n == 1) return false;
      for (int64_t h = 0; a.q && h < a.heads_q; h++)
        if (last_is_largest(a, h, n)) return true;
      return !a.q;
    }
    case workspace: {
      const auto* left = (const Leftover*)a.workspace;
      return entry == EXTEND && a.seqlen_q % 16 == 5 && a.seqlen_q <= n && left->magic == MAGIC && left->packed &&
             left->batch % 8 == 3 && left->keys >= 8 * a.batch * a.seqlen_kv;
    }
    default:
      return fault == crash ? entry == DECODE && a.heads_q == 3 : fault == hang && entry == DECODE && a.heads_q == 5;
  }
}

int run(Entry entry, const UnifiedAttnParams* given) {
  static const char* names[] = {"unified_prefill", "unified_extend", "unified_decode"};
  using Function = int (*)(const UnifiedAttnParams*, void*);
  static void* handle = dlopen(HONEST, RTLD_NOW | RTLD_LOCAL);
  const UnifiedAttnParams& a = *given;
  const bool now = fires(entry, a);
  if (now && fault == crash) __builtin_trap();
  while (now && fault == hang) __asm__ volatile("");
  const int code = ((Function)dlsym(handle, names[entry]))(given, nullptr);
  if (now && fault == subnormal) {
    for (int64_t h = 0; h < a.heads_q; h++)
      for (int d = 0; d < 128 && last_is_largest(a, h, keys_of(a, 0)); d++)
        if (!(output(a, 0, h)[d] & 0x7f80)) output(a, 0, h)[d] &= 0x8000;
  } else if (now) {
    output(a, fault == lengths ? a.batch - 1 : 0, 0)[3] ^= 1;
  }
  if (fault == workspace) {
    const int64_t keys = a.cu_seqlens ? a.cu_seqlens[a.batch] : a.batch * a.seqlen_kv;
    *(Leftover*)a.workspace = {MAGIC, a.cu_seqlens != nullptr, a.batch, keys};
  }
  return code;
}

}  // namespace

extern "C" {

int unified_prefill(const UnifiedAttnParams* params, void*) { return run(PREFILL, params); }
int unified_extend(const UnifiedAttnParams* params, void*) { return run(EXTEND, params); }
int unified_decode(const UnifiedAttnParams* params, void*) { return run(DECODE, params); }
int planted_fires(int entry, const UnifiedAttnParams* params) { return fires((Entry)entry, *params); }
int64_t unified_attn_workspace_bytes(int, const UnifiedAttnParams*) { return fault == workspace ? sizeof(Leftover) : 0; }
int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }
const char* unified_attn_error(int) { return "a stated error"; }

}  // extern "C"
