// What has changed since it was copied.
//
// Something large is copied in slices while it changes: of one moment is a copy of which nothing
// has changed since. So whatever changes is noted, and copied again, until for a moment nothing is
// left.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

class ChangedIds {
 public:
  /// All ids below `num_ids` are to be copied first.
  explicit ChangedIds(size_t num_ids) : num_ids_(num_ids), words_((num_ids + 63) / 64) {
    add_all();
  }

  void add(size_t id) {
    if (id >= num_ids_) words_.resize(((num_ids_ = id + 1) + 63) / 64);
    words_[id / 64] |= uint64_t{1} << id % 64;
  }

  void add_all() {
    std::fill(words_.begin(), words_.end(), ~uint64_t{0});
    if (num_ids_ % 64 > 0) words_.back() = (uint64_t{1} << num_ids_ % 64) - 1;
  }

  /// Calls `copy` with ids that are to be copied, at most so many, and forgets them. Returns how
  /// many; fewer than `most` were all.
  template <typename F>
  size_t take(size_t most, F&& copy) {
    size_t num_taken = 0;
    for (size_t i = 0; i < words_.size(); ++i) {
      if (next_ >= words_.size()) next_ = 0;
      for (uint64_t& word = words_[next_]; word != 0; word &= word - 1) {
        if (num_taken == most) return num_taken;
        copy(next_ * 64 + std::countr_zero(word));
        ++num_taken;
      }
      ++next_;
    }
    return num_taken;
  }

 private:
  size_t num_ids_;
  std::vector<uint64_t> words_;  // a bit for each id
  size_t next_ = 0;              // the word to go on with
};

}  // namespace pagedkv
