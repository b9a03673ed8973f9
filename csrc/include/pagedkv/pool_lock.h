// The pool's lock, and how a long call gives it up between its slices.

#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace pagedkv {

/// A mutex that knows whether somebody waits. Whoever takes it again at once after giving it up is
/// mostly faster than a thread that has to wake up first, and would stop it for many slices.
class PoolLock {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    ++num_waiting_;
    mutex_.lock();
    --num_waiting_;
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  /// To be called without it, between two slices: those who wait go first, unless ever more do.
  void let_others_go_first() const {
    using std::chrono::steady_clock;
    if (num_waiting_ == 0) return;
    const auto start = steady_clock::now();
    // On another processor somebody wakes up while this one spins, and on this one after that.
    while (num_waiting_ > 0 && steady_clock::now() - start < kSpins) {
    }
    for (int i = 0; i < kMostYields && num_waiting_ > 0; ++i) std::this_thread::yield();
  }
  /// In the child of a fork, which has none of the other threads. Only for whoever holds it.
  void forget_waiting() { num_waiting_ = 0; }

 private:
  static constexpr std::chrono::microseconds kSpins{50};
  static constexpr int kMostYields = 100;

  std::mutex mutex_;
  std::atomic<int> num_waiting_ = 0;
};

}  // namespace pagedkv
