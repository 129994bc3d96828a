// What Hopper adds to tiles: barriers in shared memory that count bytes, the tensor memory accelerator (TMA), and operands of
// warp-group products (WGMMA) in shared memory. Swizzle 128 B throughout: rows of 64 bf16, the eight 16-byte chunks of a row
// permuted by the row's number modulo 8.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "fa3_numerics.cuh"

namespace {

// ------------------------------------------------------------------------------------------------------------ barriers
// Debug builds. BARRIER_DELAYS: who waited or is about to arrive or to load is held up at random, for up to two microseconds.
// EVERY_LANE_ARRIVES: for racecheck, which does not see that one lane arrives for its warp.
__device__ __forceinline__ void perhaps_delay() {
#ifdef BARRIER_DELAYS
  const uint32_t x =
      (static_cast<uint32_t>(clock64()) ^ threadIdx.x / 32 * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu) * 0xc2b2ae35u;
  if (x >> 30 == 0) __nanosleep(x >> 19 & 2047);
#endif
}
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

// A barrier completes a phase when all its arrivals are made and all expected bytes have come. Waits name the phase's parity.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  perhaps_delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  perhaps_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra end_%=;\n"
      "bra wait_%=;\nend_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
  perhaps_delay();
}
// One lane arrives for its warp, WARP_ARRIVALS of the barrier's.
__device__ __forceinline__ void warp_arrive(uint32_t barrier, bool leader) {
  if (WARP_ARRIVALS > 1 || leader) barrier_arrive(barrier);
}
// Threads of a CTA that meet at one of its 16 named barriers.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// A ring of one or two stages: a full and an empty barrier each. Producer and consumers keep their own places in it.
template <int STAGES>
struct Ring {
  static_assert(STAGES == 1 || STAGES == 2);
  uint32_t base, stage = 0, parity = 0;
  __device__ explicit Ring(uint32_t address) : base(address) {}
  __device__ uint32_t full() const { return base + 8 * stage; }
  __device__ uint32_t empty() const { return base + 8 * (STAGES + stage); }
  __device__ void init(int readers) const {  // warps
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(base + 8 * i, 1);
      barrier_init(base + 8 * (STAGES + i), readers * WARP_ARRIVALS);
    }
  }
  __device__ void advance() {
    if constexpr (STAGES == 2) stage ^= 1;
    parity ^= stage ^ 1;
  }
  __device__ Ring next() const {
    Ring ring = *this;
    ring.advance();
    return ring;
  }
  __device__ void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
  __device__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ bool is_full() const { return barrier_test(full(), parity); }
};

// ----------------------------------------------------------------------------------------------------------------- TMA
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int column, int row, int head, int batch,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Plain stores to shared memory become visible to TMA and WGMMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --------------------------------------------------------------------------------------------------------------- WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Accumulators of a product are read only behind its wait: the compiler does not know that the wait writes them.
template <int N>
__device__ __forceinline__ void written_here(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
// Descriptors of operands in shared memory, swizzle 128 B; addresses in units of 16 bytes.
constexpr uint64_t BY_ROWS = uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16;  // k along a row: 8 rows are 1 KiB
constexpr uint64_t BY_COLUMNS =
    uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1024} << 16;  // k down the rows; 64 columns are 16 KiB
__device__ __forceinline__ uint64_t descriptor(uint64_t kind, uint32_t address) { return kind | (address & 0x3ffff) >> 4; }

}  // namespace
