// What was evicted lately, when and why: as many entries as the pool has pages.

#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "pagedkv/clock.h"
#include "pagedkv/types.h"

namespace pagedkv {

enum class EvictionReason : uint8_t {
  kCapacity,  // reserve() or allocate() needed the page
  kRequest,   // evict()
  kQuota,     // its tenant had too many
  kReset,     // reset()
};
inline constexpr size_t kNumEvictionReasons = 4;

class EvictionHistory {
 public:
  struct Entry {
    uint64_t fingerprint = 0;
    uint64_t milliseconds : 56 = 0;
    uint64_t reason : 8 = 0;
  };

  explicit EvictionHistory(size_t num_entries) : entries_(num_entries) {}

  void add(uint64_t fingerprint, Nanoseconds now, EvictionReason reason) {
    entries_[num_added_++ % entries_.size()] = {fingerprint, static_cast<uint64_t>(now / 1'000'000),
                                                static_cast<uint64_t>(reason)};
  }

  /// How many there ever were; the last entries_.size() of them are kept.
  uint64_t num_added() const { return num_added_; }
  bool has(uint64_t index) const {
    return index < num_added_ && index + entries_.size() >= num_added_;
  }
  const Entry& entry(uint64_t index) const { return entries_[index % entries_.size()]; }

 private:
  std::vector<Entry> entries_;
  uint64_t num_added_ = 0;
};

}  // namespace pagedkv
