// What the threads of one parallel region share: a barrier, and the errors of each.
#pragma once

#include <sched.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "simd.h"

namespace {

// Waiting threads spin for a little while, then yield.  A thread that failed abandons the barrier, and `wait` throws in
// all others, which would wait for it for ever.
struct Barrier {
  const int threads;
  std::atomic<int> arrived{0}, round{0};
  std::atomic<bool> is_abandoned{false};

  explicit Barrier(int count) : threads(count) {}

  void wait() {
    if (threads == 1) return;
    const int mine = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(mine + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == mine; ++spins) {
      if (is_abandoned.load(std::memory_order_relaxed)) throw std::runtime_error("another thread has failed");
      if (spins > 2000) sched_yield();
#if defined(__AVX2__)
      _mm_pause();
#endif
    }
  }

  void abandon() { is_abandoned.store(true, std::memory_order_relaxed); }
};

// The first exception of several threads, thrown again when all have ended: none may leave a parallel region.
class ThreadErrors {
 public:
  // `on_error` is called once the exception is kept, so that those it causes in other threads come after it.
  template <class Work, class OnError>
  void run(Work work, OnError on_error) noexcept {
    try {
      work();
    } catch (...) {
      keep(std::current_exception());
      on_error();
    }
  }

  void rethrow() const {
    if (first) std::rethrow_exception(first);
  }

 private:
  std::mutex lock;
  std::exception_ptr first;

  void keep(const std::exception_ptr& error) {
    const std::lock_guard<std::mutex> guard(lock);
    if (!first) first = error;
  }
};

}  // namespace
