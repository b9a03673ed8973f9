// Stacks that can be switched between. Each number has one stack, which is used again.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  // What AddressSanitizer is told; the host's own stack is learned when it is left.
  const void* bottom = nullptr;
  size_t size = 0;
  void* fake_stack = nullptr;
};

/// Makes a fiber that begins with `entry`, which must never return.
void prepare_fiber(Fiber& fiber, unsigned number, void (*entry)());

void switch_fiber(Fiber& from, Fiber& to);

}  // namespace emulated
