// Counts by powers of two.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace pagedkv {

/// Bucket 0 counts zeros, bucket k values in [2^(k - 1), 2^k).
struct Histogram {
  std::array<uint64_t, 33> counts{};

  void add(uint32_t value, size_t num_times = 1) { counts[std::bit_width(value)] += num_times; }
};

}  // namespace pagedkv
