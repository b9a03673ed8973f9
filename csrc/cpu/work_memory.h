// Memory that a thread keeps from one call to the next.

#pragma once

#include <cstdint>
#include <new>

namespace pagedkv::cpu {

constexpr int64_t round_to_line(int64_t num_bytes) { return (num_bytes + 63) & ~int64_t{63}; }

/// Grows, and begins at a cache line.
class WorkMemory {
 public:
  WorkMemory() = default;
  ~WorkMemory() { ::operator delete(memory_, std::align_val_t{64}); }
  WorkMemory(const WorkMemory&) = delete;
  WorkMemory& operator=(const WorkMemory&) = delete;

  /// What was in it may be lost.
  char* at_least(int64_t num_bytes) {
    if (num_bytes > size_) {
      ::operator delete(memory_, std::align_val_t{64});
      memory_ = nullptr;
      size_ = 0;
      memory_ = static_cast<char*>(::operator new(num_bytes, std::align_val_t{64}));
      size_ = num_bytes;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t size_ = 0;
};

/// The calling thread's own.
inline char* work_memory(int64_t num_bytes) {
  thread_local WorkMemory memory;
  return memory.at_least(num_bytes);
}

}  // namespace pagedkv::cpu
