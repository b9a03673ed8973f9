// What it costs to compute a block again: work in proportion to its tokens, and attention to all
// that is before it.

#pragma once

#include <cstdint>

#include "pagedkv/eviction.h"

namespace pagedkv {

class RecomputeCost {
 public:
  /// Without PolicyConfig::equal_cost_tokens: `by_default`; 0: all cost the same.
  RecomputeCost(const PolicyConfig& config, uint32_t by_default) {
    uint32_t tokens = config.equal_cost_tokens.value_or(by_default);
    if (tokens > 0) per_block_ = double{1} * config.block_size / tokens;
  }
  /// That of a block at a depth, in costs of the first one.
  double at(size_t depth) const { return 1 + static_cast<double>(depth) * per_block_; }

 private:
  double per_block_ = 0;
};

}  // namespace pagedkv
