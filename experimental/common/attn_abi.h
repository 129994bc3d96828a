/* The one interface between a kernel library and everything else: plain C, no torch, host or device pointers.
 *
 * A kernel library is a shared object that exports the six functions below. tools/loader/interface.py checks tensors,
 * fills UnifiedAttnParams and calls them through ctypes; nothing else may call a kernel. A change here is a new
 * UNIFIED_ATTN_ABI_VERSION.
 */
#ifndef UNIFIED_ATTN_ABI_H
#define UNIFIED_ATTN_ABI_H
#include <stdint.h>

#define UNIFIED_ATTN_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/* All sizes are counts of elements, all strides are in elements. The innermost stride (head dim) is always 1. Addresses of
 * q, k, v and o are multiples of 16 bytes, their strides of 8 elements. o and lse overlap neither an input nor themselves.
 * heads_q is a multiple of heads_kv, at most 16 times. lengths: extend and decode only; cu_seqlens: prefill only. */
typedef struct UnifiedAttnParams {
  const void* q;             /* bf16 [batch, heads_q, seqlen_q, 128]; packed: [total, heads_q, 128] */
  const void* k;             /* bf16 [batch, heads_kv, seqlen_kv, 128]; packed: [total, heads_kv, 128] */
  const void* v;             /* like k */
  void* o;                   /* bf16, like q */
  float* lse;                /* fp32 [batch, heads_q, seqlen_q] natural log; packed: [heads_q, total]; NULL: not wanted */
  const int32_t* lengths;    /* [batch] valid keys of each sequence (clamped to [0, seqlen_kv]); NULL: all seqlen_kv */
  const int32_t* cu_seqlens; /* [batch + 1] row offsets of packed sequences; NULL: not packed */
  const int32_t* page_table; /* reserved for a paged cache; must be NULL */
  void* workspace;           /* unified_attn_workspace_bytes() bytes, any content; NULL when that is 0 */
  int64_t batch, heads_q, heads_kv;
  int64_t seqlen_q;          /* queries of each sequence; packed: the longest sequence */
  int64_t seqlen_kv;         /* keys, or the cache's capacity where lengths is given; packed: the longest sequence */
  int64_t q_stride[3];       /* batch (packed: ignored), head, row */
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t o_stride[3];
  int64_t lse_stride[2];     /* batch (packed: ignored), head; rows are contiguous */
  int32_t num_sms;           /* multiprocessors a CUDA launch may plan for; 0: ask the device */
  int32_t num_threads;       /* threads a CPU call may use; 0: one per core */
} UnifiedAttnParams;

/* Each returns 0, a positive cudaError_t, or a negative code; unified_attn_error() turns either into a sentence.
 * stream is a cudaStream_t (NULL on the CPU). The call only enqueues work; it never synchronizes or allocates.
 *   prefill: query i of a sequence sees its keys 0..i (seqlen_q == seqlen_kv, or packed).
 *   extend:  query i of seqlen_q sees keys 0..(n - seqlen_q + i), n = the sequence's keys; a row that sees none is 0, LSE -inf
 *            (V finite).
 *   decode:  seqlen_q == 1; the query sees all n keys. */
int unified_prefill(const UnifiedAttnParams* params, void* stream);
int unified_extend(const UnifiedAttnParams* params, void* stream);
int unified_decode(const UnifiedAttnParams* params, void* stream);

#define UNIFIED_ATTN_PREFILL 0
#define UNIFIED_ATTN_EXTEND 1
#define UNIFIED_ATTN_DECODE 2
int64_t unified_attn_workspace_bytes(int entry, const UnifiedAttnParams* params);
const char* unified_attn_error(int code);
int unified_attn_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
