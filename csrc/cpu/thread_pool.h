// Threads that share the pieces of one call.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace pagedkv::cpu {

/// One pool serves the process: it is made at the first call that needs it, its threads sleep
/// between calls, and a forked child makes its own.
class ThreadPool {
 public:
  /// Calls `work(i)` for every i in [0, num_pieces), in ascending order of beginning, on at most
  /// `num_threads` threads, of which the caller is one. Rethrows the first exception. While another
  /// thread's call is under way, the caller works alone.
  template <typename Work>
  static void run(int num_threads, int64_t num_pieces, Work&& work) {
    const auto call = [](void* context, int64_t piece) { (*static_cast<Work*>(context))(piece); };
    run_job(num_threads, num_pieces, call, const_cast<void*>(static_cast<const void*>(&work)));
  }

 private:
  struct Job {
    int64_t num_pieces;
    void (*call)(void*, int64_t);
    void* context;
    std::atomic<int64_t> next = 0;
    std::exception_ptr error = nullptr;  // of the first that failed; under the pool's lock
    void work(std::mutex& lock);
  };

  static void run_job(int num_threads, int64_t num_pieces, void (*call)(void*, int64_t),
                      void* context);
  static ThreadPool& instance();
  void share(Job& job, int num_helpers);
  void help();  // what a thread of the pool does

  std::mutex callers_;  // held by the one call that has the threads

  std::mutex lock_;  // guards what follows
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int num_threads_ = 0;
  int num_wanted_ = 0;  // helpers that the job still takes
  // Read without the lock by those who wait; written under it.
  std::atomic<int> num_helping_ = 0;
  std::atomic<uint64_t> num_jobs_ = 0;
};

}  // namespace pagedkv::cpu
