// Two caches of a sample of the blocks, one evicted by LRU and one by what a ReuseModel knows:
// which of the two would hit more. A pool begins with LRU.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "../mix.h"
#include "reuse_model.h"

namespace pagedkv {

class Shadows {
 public:
  /// A quarter of the pool, within limits, in sets: each evicts within itself.
  explicit Shadows(size_t num_pages) {
    size_t num_blocks = std::min(num_pages, std::clamp(num_pages / 4, kLeastBlocks, kMostBlocks));
    num_ways_ = std::min(num_blocks, kMostWays);
    num_sets_ = num_blocks / num_ways_;
    lru_.resize(num_sets_ * num_ways_);
    learned_.resize(num_sets_ * num_ways_);
    every_ = num_pages / lru_.size();
  }

  /// A block is used that is worth `cost` times a hit at the beginning of a prompt.
  void use(uint64_t fingerprint, ReuseModel::Class of, float cost, uint32_t now,
           const ReuseModel& model) {
    uint64_t sample = mix(fingerprint ^ kMix3, kMix1) / 65'536;
    if (sample % every_ != 0) return;
    ++num_uses_;
    auto all_alike = [](const Block&) { return 0.f; };
    auto learnt = [&](const Block& b) { return model.worth(b.of, now - b.time) * b.cost; };
    size_t set = sample / every_ % num_sets_ * num_ways_;
    Block block{fingerprint, num_uses_, now, cost, of, true};
    float difference = hit(&learned_[set], block, learnt);
    difference -= hit(&lru_[set], block, all_alike);
    difference_ += difference * cost;
    ++num_new_uses_;
  }
  /// What a request uses is over. Its blocks hit together, so they count as one observation.
  void settle() {
    if (num_new_uses_ == 0) return;
    float kept = std::exp(-static_cast<float>(std::exchange(num_new_uses_, 0)) / kMemory);
    float difference = std::exchange(difference_, 0.f);
    lead_ = lead_ * kept + difference;
    variance_ = variance_ * kept + difference * difference;
    float deviation = std::sqrt(variance_);
    if (lead_ > kDeviationsToLearned * deviation + kLeastHits) prefers_lru_ = false;
    if (lead_ < -kDeviationsToLru * deviation - kLeastHits) prefers_lru_ = true;
  }
  /// Whether the learned one has not been seen to hit more, or LRU has, of late.
  bool prefer_lru() const { return prefers_lru_; }
  void copy_preference(const Shadows& from) { prefers_lru_ = from.prefers_lru_; }

 private:
  static constexpr size_t kLeastBlocks = 128, kMostBlocks = 4'096, kMostWays = 256;
  static constexpr float kMemory = 16'384;  // uses
  // Of what the lead would be by chance alone: to go over, and to go back.
  static constexpr float kDeviationsToLearned = 1, kDeviationsToLru = 0.3f;
  static constexpr float kLeastHits = 2;

  struct Block {
    uint64_t fingerprint = 0, number = 0;
    uint32_t time = 0;
    float cost = 1;
    ReuseModel::Class of = 0;
    bool is_there = false;
  };

  /// Puts a block into a set, for the one of least worth, or of those for the longest unused.
  template <typename Worth>
  float hit(Block* set, const Block& block, Worth&& worth) const {
    Block* end = set + num_ways_;
    for (Block* other = set; other != end; ++other) {
      bool was_there = other->is_there;
      if (was_there && other->fingerprint != block.fingerprint) continue;
      *other = block;  // behind the first gap there is nothing
      return was_there;
    }
    Block* least = set;
    float least_worth = worth(*set);
    for (Block* other = set + 1; other != end; ++other) {
      float own = worth(*other);
      if (own > least_worth || (own == least_worth && other->number > least->number)) continue;
      least = other;
      least_worth = own;
    }
    *least = block;
    return 0;
  }

  size_t num_ways_, num_sets_;
  uint64_t every_;  // blocks that one in the sample stands for
  std::vector<Block> lru_, learned_;
  uint64_t num_uses_ = 0;
  int num_new_uses_ = 0;
  float difference_ = 0;  // of hits, of the request that is not settled
  float lead_ = 0;        // hits of the learned one beyond those of LRU, lately
  float variance_ = 0;    // of it, if either were as likely to hit
  bool prefers_lru_ = true;
};

}  // namespace pagedkv
