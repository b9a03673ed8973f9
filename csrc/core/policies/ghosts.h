// What was evicted lately: fingerprints of blocks with a note on each, so many and no more.

#pragma once

#include <bit>
#include <cstddef>
#include <utility>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

/// A ring of entries, and an open-addressed table of where in the ring a fingerprint is. One that
/// is added again counts as new.
template <typename Note>
class Ghosts {
 public:
  explicit Ghosts(size_t num_entries)
      : ring_(num_entries), table_(std::bit_ceil(2 * num_entries + 2), kNone) {}

  void add(uint64_t fingerprint, const Note& note) {
    if (ring_.empty()) return;
    take(fingerprint);
    Entry& entry = ring_[next_];
    if (entry.is_there) forget(entry.fingerprint);
    entry = {fingerprint, note, true};
    table_[slot_of(fingerprint)] = static_cast<uint32_t>(next_);
    next_ = (next_ + 1) % ring_.size();
  }
  /// The note on a fingerprint, or null; until the next call.
  const Note* find(uint64_t fingerprint) const {
    uint32_t place = table_[slot_of(fingerprint)];
    return place == kNone ? nullptr : &ring_[place].note;
  }
  /// The same, and forgets it.
  const Note* take(uint64_t fingerprint) {
    const Note* note = find(fingerprint);
    if (note != nullptr) forget(fingerprint);
    return note;
  }

 private:
  struct Entry {
    uint64_t fingerprint = 0;
    Note note{};
    bool is_there = false;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  size_t home_of(uint64_t fingerprint) const {
    return fingerprint * 0x9e3779b97f4a7c15ull >> (64 - std::countr_zero(table_.size()));
  }
  /// Where a fingerprint is, or would be put.
  size_t slot_of(uint64_t fingerprint) const {
    size_t slot = home_of(fingerprint), mask = table_.size() - 1;
    while (table_[slot] != kNone && ring_[table_[slot]].fingerprint != fingerprint)
      slot = (slot + 1) & mask;
    return slot;
  }
  /// Whatever stands behind the gap and may stand in it moves up.
  void forget(uint64_t fingerprint) {
    size_t gap = slot_of(fingerprint), mask = table_.size() - 1;
    ring_[table_[gap]].is_there = false;
    table_[gap] = kNone;
    for (size_t slot = (gap + 1) & mask; table_[slot] != kNone; slot = (slot + 1) & mask) {
      size_t home = home_of(ring_[table_[slot]].fingerprint);
      if (((slot - home) & mask) < ((slot - gap) & mask)) continue;
      table_[gap] = std::exchange(table_[slot], kNone);
      gap = slot;
    }
  }

  std::vector<Entry> ring_;
  std::vector<uint32_t> table_;
  size_t next_ = 0;
};

}  // namespace pagedkv
