// Runs the threads of a block as fibers on one thread of the host, in random order: a fiber runs
// until it waits for others, and whoever can go on next is drawn. What a barrier should have
// ordered comes in any order without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulated {

struct Index {
  unsigned x, y, z;
};

Index thread_index();
Index block_index();
Index grid_size();
unsigned thread_number();

/// Waits for all threads of the block that have not ended.
void wait_for_block();

/// Waits for all lanes of the warp, which have to come with the same `name`; the last one runs
/// `work` over what each brought.
void meet_warp(const char* name, void* brought, void (*work)(void* const* lanes));

/// Copies that a block began and nobody waited for end with it.
void forget_copies();

/// The block's shared memory: exactly as large as was asked for, and full of 0xFF at first.
unsigned char* dynamic_shared();

/// Runs `body` in every thread of every block. Returns 0, or cudaErrorLaunchFailure when some
/// threads wait for others that never come.
int run_grid(Index grid, unsigned num_threads, size_t shared_bytes,
             const std::function<void()>& body);

/// The next random number of this run; equal seeds give equal runs.
uint32_t draw();

}  // namespace emulated
