#include "pagedkv/fork_guard.h"

#include <pthread.h>

#include <unordered_set>

namespace pagedkv {

/// All guards of the process, which is what forks.
struct ForkGuard::All {
  std::mutex mutex;
  std::unordered_set<ForkGuard*> guards;

  static All& get() {
    static All* const all = make();  // kept for good: a fork may come late
    return *all;
  }

 private:
  static All* make() {
    pthread_atfork([] { get().lock(); }, [] { get().unlock(); },
                   [] {
                     for (ForkGuard* guard : get().guards) guard->second_.forget_waiting();
                     get().unlock();
                   });
    return new All;
  }
  void lock() {
    mutex.lock();
    for (ForkGuard* guard : guards) {
      guard->first_.lock();
      guard->second_.lock();
    }
  }
  void unlock() {
    for (ForkGuard* guard : guards) {
      guard->second_.unlock();
      guard->first_.unlock();
    }
    mutex.unlock();
  }
};

ForkGuard::ForkGuard(std::mutex& first, PoolLock& second) : first_(first), second_(second) {
  std::lock_guard lock(All::get().mutex);
  All::get().guards.insert(this);
}

ForkGuard::~ForkGuard() {
  std::lock_guard lock(All::get().mutex);
  All::get().guards.erase(this);
}

}  // namespace pagedkv
