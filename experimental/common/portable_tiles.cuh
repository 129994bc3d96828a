// Tiles of the portable kernel: shared-memory layout, asynchronous copies, MMA operands, and the addresses of a sequence.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attn_abi.h"
#include "fa3_numerics.cuh"

namespace {

using bf16 = __nv_bfloat16;
using numerics::BLOCK_N;
using numerics::MINUS_INFINITY;

constexpr int HEAD_DIM = 128;
constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
constexpr int QUERY_SLICES = HEAD_DIM / MMA_K;
constexpr int KEY_SLICES = BLOCK_N / MMA_K;
constexpr int NUM_WARPS = 8;
constexpr int NUM_THREADS = NUM_WARPS * 32;
constexpr int MAX_GROUP = MMA_M;                    // query heads that share a KV head: the M of one MMA
constexpr int CHUNK = 8;                         // bf16 elements of a 16-byte copy
constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * 2;

// A tile in shared memory: rows of ROW_CHUNKS 16-byte chunks, a row's chunks permuted so that eight rows of one column
// lie in eight different bank groups.
template <unsigned ROW_CHUNKS>
__device__ __forceinline__ unsigned tile_offset(unsigned row, unsigned chunk) {
  constexpr unsigned SPAN = ROW_CHUNKS < 8 ? ROW_CHUNKS : 8;
  constexpr unsigned ROWS_PER_BANK_CYCLE = 8 / SPAN;
  return (row * ROW_CHUNKS + (chunk ^ (row / ROWS_PER_BANK_CYCLE % SPAN))) * 16;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory; zeros where the source row does not exist (source is then not read).
__device__ __forceinline__ void copy_async(uint32_t destination, const void* source, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// BLOCK_N rows of COLUMNS dims from `source` into a tile; rows at or past `rows_left` become zero and are not read.
template <int COLUMNS>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16* source, int64_t row_stride, int64_t rows_left) {
  constexpr unsigned ROW_CHUNKS = COLUMNS / CHUNK, ROWS_PER_PASS = NUM_THREADS / ROW_CHUNKS;
  static_assert(NUM_THREADS % ROW_CHUNKS == 0 && BLOCK_N % ROWS_PER_PASS == 0, "every thread copies one chunk a pass");
  const unsigned chunk = threadIdx.x % ROW_CHUNKS, row0 = threadIdx.x / ROW_CHUNKS;
  const bf16* from = source + row0 * row_stride + chunk * CHUNK;
  auto copy = [&](auto whole) {
#pragma unroll
    for (unsigned pass = 0; pass < BLOCK_N / ROWS_PER_PASS; ++pass, from += ROWS_PER_PASS * row_stride) {
      const unsigned row = row0 + pass * ROWS_PER_PASS;
      const bool exists = decltype(whole)::value || row < rows_left;
      copy_async(tile + tile_offset<ROW_CHUNKS>(row, chunk), exists ? from : source, exists);
    }
  };
  if (rows_left >= BLOCK_N)
    copy(std::true_type{});
  else
    copy(std::false_type{});
}

// The A operand of 16 query rows: lane / 4 and lane / 4 + 8. Rows that do not exist are zero and are not read.
__device__ __forceinline__ void load_query(uint32_t (&q)[QUERY_SLICES][4], const bf16* row0, const bf16* row1, int lane) {
  const int column = 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < QUERY_SLICES; ++s) {
    q[s][0] = row0 ? *reinterpret_cast<const uint32_t*>(row0 + s * MMA_K + column) : 0u;
    q[s][1] = row1 ? *reinterpret_cast<const uint32_t*>(row1 + s * MMA_K + column) : 0u;
    q[s][2] = row0 ? *reinterpret_cast<const uint32_t*>(row0 + s * MMA_K + column + 8) : 0u;
    q[s][3] = row1 ? *reinterpret_cast<const uint32_t*>(row1 + s * MMA_K + column + 8) : 0u;
  }
}

// Address of a lane's row for load_matrices on K: one x4 load feeds two n8 blocks (16 keys) of one k16 slice of dims.
__device__ __forceinline__ uint32_t key_fragment(uint32_t tile, int key_slice, int dim_slice, int lane) {
  const int row = key_slice * MMA_K + ((lane >> 4) << 3) + (lane & 7);
  return tile + tile_offset<HEAD_DIM / CHUNK>(row, 2 * dim_slice + ((lane >> 3) & 1));
}

// Scores at or past `visible` (a key index relative to the tile) become -inf. s holds a row's two columns of n8 block `block`.
__device__ __forceinline__ void mask_pair(float& s0, float& s1, int block, int lane, int64_t visible) {
  const int column = block * MMA_N + 2 * (lane % 4);
  if (column >= visible) s0 = MINUS_INFINITY;
  if (column + 1 >= visible) s1 = MINUS_INFINITY;
}

// The pointers and sizes of one sequence, with 64-bit offsets throughout.
struct Sequence {
  int64_t queries, keys;       // rows of q; keys that may be read
  int64_t first_row;           // packed: row of the sequence's first token, else 0
  int64_t batch;               // index for strides (0 where packed)
};
__device__ __forceinline__ Sequence sequence_of(const UnifiedAttnParams& p, int64_t b) {
  if (p.cu_seqlens) {
    const int64_t begin = p.cu_seqlens[b], end = p.cu_seqlens[b + 1];
    return {end - begin, end - begin, begin, 0};
  }
  int64_t keys = p.seqlen_kv;
  if (p.lengths) {
    const int64_t given = p.lengths[b];
    keys = given < 0 ? 0 : given < keys ? given : keys;
  }
  return {p.seqlen_q, keys, 0, b};
}
__device__ __forceinline__ int64_t element_offset(const int64_t (&stride)[3], const Sequence& s, int64_t head) {
  return s.batch * stride[0] + head * stride[1] + s.first_row * stride[2];
}

}  // namespace
