// A string of bytes that seldom needs memory of its own.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace pagedkv {

/// Like std::string, with room inside for the extras of a block that has one media item.
class ShortBytes {
 public:
  ShortBytes() = default;
  explicit ShortBytes(std::string_view bytes) { *this += bytes; }
  ShortBytes(const std::string& bytes) : ShortBytes(std::string_view(bytes)) {}
  ShortBytes(const ShortBytes& other) : ShortBytes(std::string_view(other)) {}
  ShortBytes(ShortBytes&& other) noexcept { *this = std::move(other); }
  ShortBytes& operator=(const ShortBytes& other) { return *this = ShortBytes(other); }
  ShortBytes& operator=(ShortBytes&& other) noexcept {
    longer_ = std::move(other.longer_);
    capacity_ = std::exchange(other.capacity_, kRoom);
    size_ = std::exchange(other.size_, 0);
    inside_ = other.inside_;  // all of it: so few bytes of a known number are copied without a call
    return *this;
  }

  operator std::string_view() const { return {data(), size_}; }
  const char* data() const { return longer_ == nullptr ? inside_.data() : longer_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  /// Grows by `num_bytes` and returns where they go.
  char* extend(size_t num_bytes) {
    if (size_ + num_bytes > capacity_) {
      size_t capacity = std::max<size_t>(size_ + num_bytes, 2 * capacity_);
      auto longer = std::make_unique<char[]>(capacity);
      std::memcpy(longer.get(), data(), size_);
      longer_ = std::move(longer);
      capacity_ = capacity;
    }
    char* end = const_cast<char*>(data()) + size_;
    size_ += num_bytes;
    return end;
  }
  ShortBytes& operator+=(std::string_view bytes) {
    if (!bytes.empty()) std::memcpy(extend(bytes.size()), bytes.data(), bytes.size());
    return *this;
  }

 private:
  static constexpr size_t kRoom = 48;

  std::array<char, kRoom> inside_{};  // the first size_ count, unless there is a longer one
  std::unique_ptr<char[]> longer_;
  size_t size_ = 0, capacity_ = kRoom;
};

}  // namespace pagedkv
