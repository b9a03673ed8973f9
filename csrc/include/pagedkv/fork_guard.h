// A fork of the process in the middle of a call: the child has none of the other threads, and what
// they had locked would stay so, half changed.

#pragma once

#include <mutex>

#include "pagedkv/pool_lock.h"

namespace pagedkv {

/// While it lives, a fork first waits until it has both locks. So the child has a whole copy of
/// what they guard, with nobody in it.
class ForkGuard {
 public:
  /// Whoever takes both takes `first` before `second`.
  ForkGuard(std::mutex& first, PoolLock& second);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

 private:
  struct All;

  std::mutex& first_;
  PoolLock& second_;
};

}  // namespace pagedkv
