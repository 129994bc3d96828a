/* Threads that share the items of one call, and the floating-point mode in which they work. */
#ifndef CPU_KERNELS_POOL_H
#define CPU_KERNELS_POOL_H
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// IEEE arithmetic: the thread's rounding, flush-to-zero and trap settings are set aside, and come back with its flags.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { fesetenv(&saved_); }

 private:
  fenv_t saved_;
};

// The caller works too, and never waits for a helper that has not woken in time; helpers sleep between calls that do not
// follow closely. Calls from several threads take turns. The pool is never destroyed: its threads end with the process.
// A forked child has none of them, and starts a pool of its own.
template <class Scratch>
class Pool {
 public:
  using Work = void (*)(const void* context, int64_t item, Scratch& scratch);

  // Runs items 0 .. items - 1, in this order, on at most `threads` threads. May throw std::bad_alloc.
  static void run(Work work, const void* context, int64_t items, int threads) {
    [[maybe_unused]] static const int at_fork = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
    Pool* pool = current;
    if (!pool) {
      std::unique_ptr<Pool> fresh(new Pool);
      if (current.compare_exchange_strong(pool, fresh.get())) pool = fresh.release();
    }
    pool->call(work, context, items, (int)std::min<int64_t>(threads, items) - 1);
  }

 private:
  void call(Work work, const void* context, int64_t items, int helpers) {
    const std::lock_guard<std::mutex> one_call(call_);
    while ((int)scratch_.size() <= helpers) scratch_.push_back(std::make_unique<Scratch>());
    try {
      for (; threads_ < helpers; threads_++) std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error&) {
      helpers = threads_;  // no more threads to be had: those that exist do the work
    }
    {
      const std::lock_guard<std::mutex> lock(state_);
      work_ = work, context_ = context, items_ = items, next_ = 0, invited_ = helpers;
    }
    for (int i = 0; i < helpers; i++) wake_.notify_one();
    drain(*scratch_[0]);
    {
      const std::lock_guard<std::mutex> lock(state_);
      invited_ = 0;
    }
    await(done_, [this] { return busy_ == 0; });
  }

  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock = await(wake_, [this] { return invited_ > 0; });
      Scratch& scratch = *scratch_[invited_--];
      busy_++;
      lock.unlock();
      drain(scratch);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  // Returns holding state_ once `ready` holds: first awake for a while, since calls often follow each other, then asleep.
  template <class Ready>
  std::unique_lock<std::mutex> await(std::condition_variable& event, Ready ready) {
    const auto start = std::chrono::steady_clock::now();
    while (!ready() && std::chrono::steady_clock::now() - start < AWAKE) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(state_);
    event.wait(lock, ready);
    return lock;
  }

  void drain(Scratch& scratch) {
    const DefaultFloatMode mode;
    for (int64_t item; (item = next_.fetch_add(1)) < items_;) work_(context_, item, scratch);
  }

  static constexpr std::chrono::microseconds AWAKE{100};
  static inline std::atomic<Pool*> current{nullptr};

  std::mutex call_, state_;
  std::condition_variable wake_, done_;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // [0] is the caller's
  int threads_ = 0;
  std::atomic<int> invited_{0}, busy_{0};  // written under state_
  Work work_ = nullptr;
  const void* context_ = nullptr;
  int64_t items_ = 0;
  std::atomic<int64_t> next_{0};
};

}  // namespace

#endif
