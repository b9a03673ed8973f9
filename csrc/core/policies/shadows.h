// Two small caches of a sample of the blocks, one evicted by LRU and one by what a ReuseModel
// knows: which of the two would hit more.

#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "reuse_model.h"

namespace pagedkv {

class Shadows {
 public:
  explicit Shadows(size_t num_blocks) : lru_(num_blocks), learned_(num_blocks) {}

  void use(uint64_t fingerprint, ReuseModel::Class of, uint32_t now, const ReuseModel& model) {
    ++num_uses_;
    auto longest_unused = [](const Block& a, const Block& b) { return a.number < b.number; };
    auto least_worth = [&](const Block& a, const Block& b) {
      float worth_a = model.worth(a.of, now - a.time), worth_b = model.worth(b.of, now - b.time);
      return worth_a != worth_b ? worth_a < worth_b : a.number < b.number;
    };
    Block block{fingerprint, num_uses_, now, of, true};
    float difference = hit(learned_, block, least_worth);
    difference -= hit(lru_, block, longest_unused);
    lead_ = lead_ * (1 - 1 / kMemory) + difference;
    if (lead_ < -kLag * kMemory) prefers_lru_ = true;
    if (lead_ > 0) prefers_lru_ = false;
  }
  /// Whether LRU has hit more of late.
  bool prefer_lru() const { return prefers_lru_; }

 private:
  static constexpr float kMemory = 4'096;  // uses
  static constexpr float kLag = 0.005f;    // of the uses

  struct Block {
    uint64_t fingerprint = 0, number = 0;
    uint32_t time = 0;
    ReuseModel::Class of = 0;
    bool is_there = false;
  };

  template <typename Less>
  static float hit(std::vector<Block>& blocks, const Block& block, Less&& less) {
    for (Block& other : blocks) {
      if (!other.is_there || other.fingerprint != block.fingerprint) continue;
      other = block;
      return 1;
    }
    for (Block& other : blocks) {
      if (other.is_there) continue;
      other = block;
      return 0;
    }
    *std::min_element(blocks.begin(), blocks.end(), less) = block;
    return 0;
  }

  std::vector<Block> lru_, learned_;
  uint64_t num_uses_ = 0;
  float lead_ = 0;  // hits of the learned one beyond those of LRU, lately
  bool prefers_lru_ = false;
};

}  // namespace pagedkv
