// A block of each run of a path that is of one class, from its use to the next, whether it is
// cached or not: what a ReuseModel learns from. The blocks of a run come back together, so that
// more of them would say the same again.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "ghosts.h"
#include "reuse_model.h"

namespace pagedkv {

class ReuseTracker {
 public:
  /// Follows up to `num_entries` uses at a time.
  explicit ReuseTracker(size_t num_entries) : ring_(num_entries), places_(num_entries) {}

  size_t size() const { return ring_.size(); }

  /// Time has come to `now`, in milliseconds.
  void advance(uint32_t now, ReuseModel& model) {
    for (size_t bucket = 1; bucket < ages::kNumBuckets; ++bucket) {
      uint64_t& next = cursors_[bucket];
      for (next = std::max(next, oldest()); next < num_uses_; ++next) {
        const Use& use = ring_[next % ring_.size()];
        if (now - use.time < ages::edge(bucket)) break;
        if (use.is_open) model.reached(use.of, bucket);
      }
    }
  }
  /// A block was used, after advance().
  void use(uint64_t fingerprint, uint32_t now, ReuseModel& model) {
    const uint64_t* number = places_.find(fingerprint);
    if (number == nullptr || *number < oldest()) return;
    Use& last = ring_[*number % ring_.size()];
    if (last.is_open) model.came_back(last.of, ages::bucket(now - last.time));
    last.is_open = false;
  }
  /// Follows a block from its use just now.
  void follow(uint64_t fingerprint, ReuseModel::Class of, uint32_t now, ReuseModel& model) {
    model.reached(of, 0);
    places_.add(fingerprint, num_uses_);
    ring_[num_uses_++ % ring_.size()] = {now, of, true};
  }

 private:
  struct Use {
    uint32_t time = 0;
    ReuseModel::Class of = 0;
    bool is_open = false;  // the block was not used since
  };

  uint64_t oldest() const { return num_uses_ < ring_.size() ? 0 : num_uses_ - ring_.size(); }

  std::vector<Use> ring_;
  Ghosts<uint64_t> places_;  // number of the last use
  uint64_t num_uses_ = 0;
  // Uses before it have reached the age of the bucket: each is met once in each bucket.
  std::array<uint64_t, ages::kNumBuckets> cursors_{};
};

}  // namespace pagedkv
