#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "float_mode.h"

namespace pagedkv::cpu {
namespace {

// Never freed: its threads may still sleep in it when the process ends.
std::atomic<ThreadPool*> the_pool = nullptr;

// How long a thread looks for work, or for the end of it, before it sleeps. A layer of a decoder is
// a handful of calls in a row, each no longer than it takes to wake a thread.
constexpr auto kPatience = std::chrono::microseconds(50);

template <typename Condition>
void wait_awake(Condition is_met) {
  if (is_met()) return;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!is_met() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = the_pool.load();
  if (pool != nullptr) return *pool;
  // The child of a fork has none of the threads, and the locks as they happened to be.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; });
  (void)registered;
  auto* created = new ThreadPool;
  if (the_pool.compare_exchange_strong(pool, created)) return *created;
  delete created;
  return *pool;
}

void ThreadPool::Job::work(std::mutex& lock) {
  const DefaultFloatMode mode;
  try {
    for (int64_t piece; (piece = next.fetch_add(1)) < num_pieces;) call(context, piece);
  } catch (...) {
    next = num_pieces;
    const std::lock_guard guard(lock);
    if (!error) error = std::current_exception();
  }
}

void ThreadPool::run_job(int num_threads, int64_t num_pieces, void (*call)(void*, int64_t),
                         void* context) {
  const int64_t num_helpers = std::min<int64_t>(num_threads, num_pieces) - 1;
  if (num_helpers > 0) {
    ThreadPool& pool = instance();
    if (const std::unique_lock only(pool.callers_, std::try_to_lock); only.owns_lock()) {
      Job job{num_pieces, call, context};
      pool.share(job, static_cast<int>(num_helpers));
      return;
    }
  }
  const DefaultFloatMode mode;
  for (int64_t piece = 0; piece < num_pieces; ++piece) call(context, piece);
}

void ThreadPool::share(Job& job, int num_helpers) {
  {
    const std::lock_guard guard(lock_);
    try {
      for (; num_threads_ < num_helpers; ++num_threads_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads: those there are will do.
    }
    job_ = &job;
    num_wanted_ = num_helpers;
    ++num_jobs_;
  }
  if (num_helpers == 1) {
    wake_.notify_one();
  } else {
    wake_.notify_all();
  }
  job.work(lock_);
  std::unique_lock guard(lock_);
  job_ = nullptr;  // nobody begins any more
  guard.unlock();
  wait_awake([this] { return num_helping_ == 0; });
  guard.lock();
  done_.wait(guard, [this] { return num_helping_ == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

void ThreadPool::help() {
  std::unique_lock guard(lock_);
  while (true) {
    const uint64_t num_seen = num_jobs_;
    if (job_ == nullptr || num_wanted_ == 0) {
      guard.unlock();
      wait_awake([&] { return num_jobs_ != num_seen; });
      guard.lock();
    }
    wake_.wait(guard, [this] { return job_ != nullptr && num_wanted_ > 0; });
    --num_wanted_;
    ++num_helping_;
    Job& job = *job_;
    guard.unlock();
    job.work(lock_);
    guard.lock();
    if (--num_helping_ == 0) done_.notify_one();
  }
}

}  // namespace pagedkv::cpu
