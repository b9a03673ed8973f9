// One row of a step before it is reserved.

#pragma once

#include <unordered_map>
#include <vector>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// What reserve() will do for one sequence; made before anything changes.
struct BlockPool::Plan {
  // Written out, since otherwise all of a plan is zeroed first, a part of the decode step.
  Plan(Sequence& sequence, size_t start, size_t num_blocks)
      : sequence(&sequence), start(start), num_blocks(num_blocks) {}

  Sequence* sequence;
  Hit hit;                     // of a preempted sequence
  size_t start, end = 0;       // tokens to compute
  size_t num_blocks;           // pages held when the step begins
  size_t num_new_blocks = 0;   // pages to take at the end of the table
  size_t num_tail_tokens = 0;  // K/V that the copy of a borrowed tail must bring along; 0: no copy
  bool drops_tail = false;     // gives the borrowed tail up and computes its tokens again

  size_t num_needed() const { return num_new_blocks + (num_tail_tokens > 0 ? 1 : 0); }
};

/// What a group has for all plans of a call.
struct BlockPool::Room {
  struct Source {
    std::vector<Plan*> borrowers;
    size_t num_left = 0;     // of them, those that have not given it up
    bool is_needed = false;  // by somebody else
  };

  size_t num_available = 0;                     // pages that are free or can be evicted
  std::unordered_map<BlockId, Source> sources;  // of borrowed tails
};

}  // namespace pagedkv
