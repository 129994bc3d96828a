/* Negative controls: the honest library with one thing wrong. A test writes
 *     #define HONEST "/path/of/the/honest/library.so"
 *     #define PERTURB name_of_the_fault
 * in front of this file and builds it as a candidate. Each fault must be caught by the check that is there for it.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>
#include <thread>
#include <vector>

#include "../../common/attn_abi.h"

namespace {

enum Entry { PREFILL, EXTEND, DECODE };
enum Fault {
  honest,
  decode_tail,
  partial_tile,
  single_query,
  verify_step,
  swapped_heads,
  ratio_sixteen,
  batch_of_three,
  longest_neighbour,
  bucket_of_eight,
  packed_single,
  packed_shift,
  leak_behind,
  lengths_ignored,
  contiguous_heads,
  misaligned,
  wrapped_offset,
  three_threads,
  workspace_read,
  workspace_left,
  noise,
  frozen_lengths,
  first_key_ignored,
  cached_by_address,
  flushed,
  zero_sign,
  halved,
  coarse,
  base_two,
  lse_of_decode,
  nan_spreads,
  size_256,
  odd_kv_heads,
  every_output,
  writes_before,
  writes_input,
  last_row_unwritten,
  late_change,
  burns,
  crash,
  hang,
  early_exit,
  rubbish,
  error_code,
  slow,
  huge_workspace
};
constexpr Fault fault = PERTURB;
constexpr int64_t TILE = 64;

using Function = int (*)(const UnifiedAttnParams*, void*);

void* library() {
  static void* handle = dlopen(HONEST, RTLD_NOW | RTLD_LOCAL);
  return handle;
}

int64_t keys_of(const UnifiedAttnParams& a, int64_t b) { return a.lengths ? a.lengths[b] : a.seqlen_kv; }

uint16_t* row(const UnifiedAttnParams& a, int64_t b, int64_t h, int64_t i) {
  return (uint16_t*)a.o + b * a.o_stride[0] + h * a.o_stride[1] + i * a.o_stride[2];
}

// Applies f(word) to every output word.
template <class F>
void each_word(const UnifiedAttnParams& a, F f) {
  const int64_t sequences = a.cu_seqlens ? 1 : a.batch, rows = a.cu_seqlens ? a.cu_seqlens[a.batch] : a.seqlen_q;
  for (int64_t b = 0; b < sequences; b++)
    for (int64_t h = 0; h < a.heads_q; h++)
      for (int64_t i = 0; i < rows; i++)
        for (int d = 0; d < 128; d++) row(a, b, h, i)[d] = f(row(a, b, h, i)[d]);
}

template <class F>
void each_lse(const UnifiedAttnParams& a, F f) {
  if (!a.lse) return;
  const int64_t sequences = a.cu_seqlens ? 1 : a.batch, rows = a.cu_seqlens ? a.cu_seqlens[a.batch] : a.seqlen_q;
  for (int64_t b = 0; b < sequences; b++)
    for (int64_t h = 0; h < a.heads_q; h++)
      for (int64_t i = 0; i < rows; i++) {
        float* x = a.lse + b * a.lse_stride[0] + h * a.lse_stride[1] + i;
        *x = f(*x);
      }
}

bool is_nan(uint16_t word) { return (word & 0x7fff) > 0x7f80; }

int run(Entry entry, const UnifiedAttnParams* given) {
  static const char* names[] = {"unified_prefill", "unified_extend", "unified_decode"};
  static int calls = 0;
  static std::map<const void*, std::vector<int32_t>> lengths_at_first;
  static std::map<const void*, std::vector<uint16_t>> outputs;
  static int64_t largest = 0;
  const int number = ++calls;
  const Function function = (Function)dlsym(library(), names[entry]);
  UnifiedAttnParams a = *given;
  const int64_t group = a.heads_q / a.heads_kv;
  if (fault == crash) raise(SIGSEGV);
  if (fault == hang)
    for (;;) sleep(1);
  if (fault == early_exit) _exit(0);
  if (fault == error_code) return -7;
  if (fault == rubbish)
    for (int fd = 3; fd < 64; fd++) (void)!write(fd, "{\"ok\": true\n", 12);
  if (fault == slow) usleep(30000);
  if (fault == burns && number == 1)
    std::thread([] {
      for (volatile int i = 0;; i++) {
      }
    }).detach();
  puts("a candidate may print what it likes");

  if (fault == swapped_heads && entry == DECODE && a.heads_kv == 2) {
    a.k = (const uint16_t*)a.k + a.k_stride[1];
    a.k_stride[1] = -a.k_stride[1];
  }
  if (fault == lengths_ignored) a.lengths = nullptr;
  if (fault == contiguous_heads && !a.cu_seqlens) a.k_stride[1] = a.k_stride[2] == 128 ? a.k_stride[1] : a.seqlen_kv * 128;
  if (fault == wrapped_offset && a.k_stride[0] > 0x7fffffff) a.k_stride[0] &= 0x7fffffff;
  if (fault == wrapped_offset && a.k_stride[2] * a.seqlen_kv > 0x7fffffff) a.k_stride[2] = 128;
  if (fault == packed_shift && a.cu_seqlens) a.k = (const uint16_t*)a.k + a.k_stride[2];
  if (fault == frozen_lengths && a.lengths) {
    auto& kept = lengths_at_first[given];
    if (kept.empty()) kept.assign(a.lengths, a.lengths + a.batch);
    if ((int64_t)kept.size() == a.batch) a.lengths = kept.data();
  }
  if (fault == first_key_ignored && entry != PREFILL && !a.lengths && a.seqlen_kv > a.seqlen_q) {
    a.k = (const uint16_t*)a.k + a.k_stride[2];
    a.v = (const uint16_t*)a.v + a.v_stride[2];
    a.seqlen_kv -= 1;
  }
  const void* key = a.k;
  if (fault == cached_by_address && entry == DECODE && !a.lengths && outputs.count(key) &&
      (int64_t)outputs[key].size() == a.batch * a.heads_q * 128) {
    const uint16_t* from = outputs[key].data();
    for (int64_t b = 0; b < a.batch; b++)
      for (int64_t h = 0; h < a.heads_q; h++, from += 128) memcpy(row(a, b, h, 0), from, 256);
    each_lse(a, [](float) { return 0.0f; });
    return 0;
  }
  if (fault == last_row_unwritten && entry == PREFILL && !a.cu_seqlens && a.seqlen_q > 1) {
    std::vector<uint16_t> kept(row(a, 0, 0, a.seqlen_q - 1), row(a, 0, 0, a.seqlen_q - 1) + 128);
    const int code = function(&a, nullptr);
    memcpy(row(a, 0, 0, a.seqlen_q - 1), kept.data(), 256);
    return code;
  }

  const int code = function(&a, nullptr);
  uint16_t* first = row(a, 0, 0, 0);
  const bool dense = !a.cu_seqlens;
  if (fault == decode_tail && entry == DECODE)
    for (int64_t b = 0; b < a.batch; b++)
      if (keys_of(a, b) > TILE && keys_of(a, b) % TILE == 1) row(a, b, 0, 0)[5] ^= 1;
  if (fault == partial_tile && entry == PREFILL && dense && a.seqlen_q % TILE) row(a, 0, 0, a.seqlen_q - 1)[7] ^= 1;
  if (fault == single_query && entry == EXTEND && a.seqlen_q == 1) *first ^= 1;
  if (fault == verify_step && entry == EXTEND && a.seqlen_q == 5) *first ^= 1;
  if (fault == ratio_sixteen && entry == DECODE && group == 16) *first ^= 1;
  if (fault == batch_of_three && a.batch >= 3 && dense) *first ^= 1;
  if (fault == longest_neighbour && a.lengths) {
    int32_t longest = 0;
    for (int64_t b = 0; b < a.batch; b++) longest = a.lengths[b] > longest ? a.lengths[b] : longest;
    for (int64_t b = 0; b < a.batch; b++)
      if (2 * a.lengths[b] < longest) row(a, b, 0, 0)[0] ^= 1;
  }
  if (fault == bucket_of_eight && dense && a.batch == 8) *first ^= 1;
  if (fault == packed_single && !dense)
    for (int64_t b = 0; b < a.batch; b++)
      if (a.cu_seqlens[b + 1] - a.cu_seqlens[b] == 1) row(a, 0, 0, a.cu_seqlens[b])[0] ^= 1;
  if (fault == leak_behind && a.lengths)
    for (int64_t b = 0; b < a.batch; b++)
      for (int64_t j = keys_of(a, b); j < a.seqlen_kv && j % TILE; j++)
        if (is_nan(((const uint16_t*)a.v)[b * a.v_stride[0] + j * a.v_stride[2]])) row(a, b, 0, 0)[0] = 0x7fc0;
  if (fault == misaligned && (uintptr_t)a.q % 256) *first ^= 1;
  if (fault == three_threads && a.num_threads == 3) *first ^= 1;
  if (fault == workspace_read && *(const uint8_t*)a.workspace == 0x7f) *first ^= 1;
  if (fault == workspace_left) {
    if (*(const int64_t*)a.workspace > a.seqlen_kv && *(const int64_t*)a.workspace < 1000000) *first ^= 1;
    *(int64_t*)a.workspace = a.seqlen_kv;
  }
  if (fault == noise && number % 5 == 0) *first ^= 1;
  if (fault == cached_by_address && entry == DECODE && !a.lengths) {
    auto& kept = outputs[key];
    kept.clear();
    for (int64_t b = 0; b < a.batch; b++)
      for (int64_t h = 0; h < a.heads_q; h++) kept.insert(kept.end(), row(a, b, h, 0), row(a, b, h, 0) + 128);
  }
  if (fault == flushed && entry == DECODE) each_word(a, [](uint16_t w) { return w & 0x7f80 ? w : (uint16_t)(w & 0x8000); });
  if (fault == zero_sign && entry == DECODE) each_word(a, [](uint16_t w) { return w == 0x8000 ? (uint16_t)0 : w; });
  if (fault == halved) each_word(a, [](uint16_t w) { return w & 0x7f00 ? (uint16_t)(w - 0x80) : w; });
  if (fault == coarse) each_word(a, [](uint16_t w) { return (uint16_t)(w & 0xfff8); });
  if (fault == base_two) each_lse(a, [](float x) { return x * 1.442695f; });
  if (fault == lse_of_decode && entry == DECODE) each_lse(a, [](float x) { return x * 1.0000002f; });
  if (fault == nan_spreads && dense && a.batch == 2)
    for (int64_t h = 0; h < a.heads_kv; h++)
      for (int64_t j = 0; j < a.seqlen_kv; j++)
        for (int d = 0; d < 128; d++)
          if (is_nan(((const uint16_t*)a.v)[a.v_stride[0] + h * a.v_stride[1] + j * a.v_stride[2] + d])) *first ^= 1;
  if (fault == size_256 && entry == PREFILL && a.seqlen_q == 256) *row(a, 0, 0, 255) ^= 1;
  if (fault == odd_kv_heads && entry == DECODE && a.heads_kv % 2) first[127] ^= 1;
  if (fault == every_output) each_word(a, [](uint16_t w) { return (uint16_t)(w & 0x7fff ? w ^ 1 : w); });
  if (fault == writes_before && dense && a.o_stride[2] == 128) first[-1] ^= 1;
  if (fault == writes_input) *(uint16_t*)a.k ^= 1;
  if (fault == late_change && number > 40) *first ^= 1;
  largest = a.seqlen_kv > largest ? a.seqlen_kv : largest;
  return code;
}

}  // namespace

extern "C" {

int unified_prefill(const UnifiedAttnParams* params, void*) { return run(PREFILL, params); }
int unified_extend(const UnifiedAttnParams* params, void*) { return run(EXTEND, params); }
int unified_decode(const UnifiedAttnParams* params, void*) { return run(DECODE, params); }

int64_t unified_attn_workspace_bytes(int entry, const UnifiedAttnParams* params) {
  using Bytes = int64_t (*)(int, const UnifiedAttnParams*);
  const int64_t own = ((Bytes)dlsym(library(), "unified_attn_workspace_bytes"))(entry, params);
  if (fault == huge_workspace) return INT64_C(1) << 50;
  return fault == workspace_read || fault == workspace_left ? (own > 64 ? own : 64) : own;
}
int unified_attn_abi_version(void) { return UNIFIED_ATTN_ABI_VERSION; }
const char* unified_attn_error(int) { return "a stated error"; }

}  // extern "C"
