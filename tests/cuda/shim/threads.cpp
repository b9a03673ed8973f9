#include "threads.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fibers.h"

namespace emulated {
namespace {

constexpr unsigned kWarp = 32;

struct Thread {
  Fiber fiber;
  bool has_ended = false;
};

struct Warp {
  const char* name = nullptr;
  void* brought[kWarp] = {};
  unsigned num_waiting = 0;
};

struct Block {
  Index grid, index;
  const std::function<void()>* body;
  unsigned char* shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;  // threads that can go on
  std::vector<unsigned> at_barrier;
  unsigned current = 0, num_alive = 0;
  bool has_failed = false;
  Fiber main;
};

thread_local Block* block = nullptr;
thread_local uint64_t random_state = 1;

[[noreturn]] void fail_for_good(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s\n", what);
  std::abort();
}

/// Goes on with any thread that can; with the host's own, if there is none.
void switch_to_next() {
  Fiber& from = block->threads[block->current].fiber;
  if (block->ready.empty()) {
    block->has_failed = block->num_alive > 0;
    switch_fiber(from, block->main);
    return;
  }
  const size_t drawn = draw() % block->ready.size();
  const unsigned next = block->ready[drawn];
  block->ready[drawn] = block->ready.back();
  block->ready.pop_back();
  if (next == block->current) return;
  block->current = next;
  switch_fiber(from, block->threads[next].fiber);
}

void release_barrier_if_complete() {
  if (block->at_barrier.empty() || block->at_barrier.size() != block->num_alive) return;
  block->ready.insert(block->ready.end(), block->at_barrier.begin(), block->at_barrier.end());
  block->at_barrier.clear();
}

void run_thread() {
  (*block->body)();
  block->threads[block->current].has_ended = true;
  --block->num_alive;
  release_barrier_if_complete();
  switch_to_next();
  fail_for_good("a thread that had ended went on");
}

bool run_block(Block& run, unsigned num_threads) {
  block = &run;
  run.threads = std::vector<Thread>(num_threads);
  run.warps = std::vector<Warp>((num_threads + kWarp - 1) / kWarp);
  run.num_alive = num_threads;
  for (unsigned i = 0; i < num_threads; ++i) {
    prepare_fiber(run.threads[i].fiber, i, run_thread);
    run.ready.push_back(i);
  }
  const unsigned first = draw() % num_threads;
  run.ready[first] = run.ready.back();
  run.ready.pop_back();
  run.current = first;
  switch_fiber(run.main, run.threads[first].fiber);
  block = nullptr;
  forget_copies();
  return !run.has_failed;
}

}  // namespace

Index thread_index() { return {block->current, 0, 0}; }
Index block_index() { return block->index; }
Index grid_size() { return block->grid; }
unsigned thread_number() { return block->current; }
unsigned char* dynamic_shared() { return block->shared; }

uint32_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 32);
}

void wait_for_block() {
  block->at_barrier.push_back(block->current);
  release_barrier_if_complete();
  switch_to_next();
}

void meet_warp(const char* name, void* brought, void (*work)(void* const* lanes)) {
  const unsigned first = block->current / kWarp * kWarp;
  Warp& warp = block->warps[block->current / kWarp];
  if (warp.num_waiting > 0 && std::strcmp(warp.name, name) != 0) {
    fail_for_good("lanes of a warp met in different operations");
  }
  warp.name = name;
  warp.brought[block->current - first] = brought;
  if (++warp.num_waiting == kWarp) {
    work(warp.brought);
    warp.num_waiting = 0;
    for (unsigned i = first; i < first + kWarp; ++i) block->ready.push_back(i);
  }
  switch_to_next();
}

int run_grid(Index grid, unsigned num_threads, size_t shared_bytes,
             const std::function<void()>& body) {
  if (num_threads % kWarp != 0) fail_for_good("blocks have to be whole warps");
  std::vector<Index> order;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, z});
    }
  }
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  // Aligned as the device's is, and with nothing behind it that a sanitizer would let pass.
  const std::unique_ptr<unsigned char, void (*)(void*)> shared(
      static_cast<unsigned char*>(std::aligned_alloc(16, shared_bytes / 16 * 16 + 16)), std::free);
  bool is_well = true;
  for (const Index& index : order) {
    std::memset(shared.get(), 0xff, shared_bytes);
    Block run{};
    run.grid = grid;
    run.index = index;
    run.body = &body;
    run.shared = shared.get();
    is_well = run_block(run, num_threads) && is_well;
  }
  return is_well ? 0 : 719;
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) void emulated_seed(uint64_t seed) {
  emulated::random_state = seed * 0x9e3779b97f4a7c15u + 1;
}
