// A vector whose memory begins with a line of the cache, so that a block's 16 tokens are one line.

#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace pagedkv {

template <typename T>
struct LineAllocator {
  using value_type = T;

  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}

  T* allocate(size_t size) { return static_cast<T*>(::operator new(size * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const = default;

 private:
  static constexpr std::align_val_t kLine{64};
};

template <typename T>
using LineVector = std::vector<T, LineAllocator<T>>;

}  // namespace pagedkv
