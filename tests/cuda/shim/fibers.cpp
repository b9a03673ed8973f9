#include "fibers.h"

#include <cstdint>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
thread_local std::vector<std::unique_ptr<unsigned char[]>> stacks;

#if defined(__SANITIZE_ADDRESS__)
thread_local Fiber* came_from = nullptr;
thread_local Fiber* went_to = nullptr;

void announce_switch(Fiber& from, Fiber& to) {
  came_from = &from;
  went_to = &to;
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
}

// A fiber's first frames are never left, so what they had out of scope is still marked.
void forget_frames(void* bottom, size_t size) { __asan_unpoison_memory_region(bottom, size); }

void finish_switch() {
  __sanitizer_finish_switch_fiber(went_to->fake_stack, &came_from->bottom, &came_from->size);
}
#else
void announce_switch(Fiber&, Fiber&) {}
void finish_switch() {}
void forget_frames(void*, size_t) {}
#endif

unsigned char* stack_of(unsigned number) {
  while (stacks.size() <= number) stacks.emplace_back(new unsigned char[kStackBytes]);
  return stacks[number].get();
}

}  // namespace

#if defined(__x86_64__)

// Keeps what a called function has to keep, and exchanges the stack.
asm(R"(
.text
.globl pagedkv_switch_stack
.hidden pagedkv_switch_stack
.type pagedkv_switch_stack, @function
pagedkv_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pagedkv_switch_stack, .-pagedkv_switch_stack
)");
extern "C" void pagedkv_switch_stack(void** from, void* to);

namespace {
thread_local void (*first_entry)() = nullptr;

void begin() {
  finish_switch();
  first_entry();
}
}  // namespace

void prepare_fiber(Fiber& fiber, unsigned number, void (*entry)()) {
  first_entry = entry;
  unsigned char* bottom = stack_of(number);
  fiber.bottom = bottom;
  fiber.size = kStackBytes;
  forget_frames(bottom, kStackBytes);
  const auto top = reinterpret_cast<uintptr_t>(bottom + kStackBytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top);
  words[-1] = nullptr;  // where `begin` would return to
  words[-2] = reinterpret_cast<void*>(begin);
  for (int i = 3; i <= 8; ++i) words[-i] = nullptr;
  fiber.stack_pointer = words - 8;
}

void switch_fiber(Fiber& from, Fiber& to) {
  announce_switch(from, to);
  pagedkv_switch_stack(&from.stack_pointer, to.stack_pointer);
  finish_switch();
}

#else

namespace {
thread_local void (*first_entry)() = nullptr;

void begin() {
  finish_switch();
  first_entry();
}
}  // namespace

void prepare_fiber(Fiber& fiber, unsigned number, void (*entry)()) {
  first_entry = entry;
  getcontext(&fiber.context);
  fiber.bottom = stack_of(number);
  fiber.size = kStackBytes;
  forget_frames(stack_of(number), kStackBytes);
  fiber.context.uc_stack.ss_sp = stack_of(number);
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, begin, 0);
}

void switch_fiber(Fiber& from, Fiber& to) {
  announce_switch(from, to);
  swapcontext(&from.context, &to.context);
  finish_switch();
}

#endif

}  // namespace emulated
