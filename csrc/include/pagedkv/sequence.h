// One request, and one step's plan over several of them. Plain state; the verbs are BlockPool's.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "pagedkv/eviction.h"
#include "pagedkv/extras.h"
#include "pagedkv/retention.h"
#include "pagedkv/sha256.h"
#include "pagedkv/types.h"

namespace pagedkv {

class BlockPool;

/// The pages that a sequence holds of one group, by block.
struct PageTable : std::vector<BlockId> {
  size_t num_dropped = 0;  // leading blocks that no later token looks back to: kNoBlock

  std::span<const BlockId> held() const { return std::span(*this).subspan(num_dropped); }
};

/// One request's tokens and pages.
///
/// With P = block_size, its blocks fall into half-open intervals:
///
///   [0, path.size())                published; the page is shared and read only
///   [path.size(), num_with_kv / P)  own pages, full, not published
///   num_with_kv / P                 the tail, where P doesn't divide num_with_kv
///   from there to table.size()      own pages, reserved
///
/// The tail may be borrowed from a published page or a fork. Then the first write into it goes to a
/// copy, which reserve() plans.
///
/// A group with a window holds the pages from BlockPool::first_seen() of the next token on, or of
/// the start of a partly filled block; between two calls neither more nor less.
struct Sequence {
  // What every decode step looks at comes first and shares a few cache lines.
  BlockPool* pool = nullptr;
  bool is_preempted = false;  // holds no pages and matches again at the next reserve
  bool is_closed = false;
  bool is_in_step = false;
  bool is_last_turn = false;   // what it alone has used goes first, once it is closed
  uint64_t last_planning = 0;  // which call of reserve() met it last
  size_t num_computed = 0;     // tokens that need no further computation
  size_t num_with_kv = 0;      // tokens with K/V: num_computed, or one more after a full hit
  std::vector<Token> tokens;
  std::vector<PageTable> tables;  // [num_groups][num_blocks]
  uint64_t table_id = 0;          // another one whenever more changes than the end grows
                                  // and pages are dropped

  std::vector<BlockExtras> extras;  // ascending block_index
  std::vector<NodeId> path;         // the nodes of the published blocks
  NodeId pinned = kNoNode;          // where all groups have windows: the last one of them

  size_t num_cached = 0;          // tokens found at open or at the last re-match
  size_t num_counted = 0;         // of these, what the pool's counter may still have to take back
  size_t num_prompt = 0;          // tokens at open
  size_t num_hit = 0;             // of these, what the pool's counter counted as found
  size_t num_hit_with_kv = 0;     // num_hit, or one more after a full hit
  size_t num_publishable = 0;     // tokens of the prompt that may be published
  size_t quota_end = SIZE_MAX;    // where a quota ended the latest publication
  size_t publish_end = SIZE_MAX;  // no block that holds this position or a later one is published
  uint32_t generation = 0;        // of the index, when the sequence last matched

  uint64_t number = 0;                    // of the prompts opened up to this one
  std::vector<RequestNote> notes;         // [num_groups]: the policies'
  std::vector<RetentionRange> retention;  // what it claims for its blocks
  Nanoseconds opened = 0;

  std::vector<Digest> digests;  // of the first whole blocks; as many as somebody asked for
};

/// References on pages while something outside the pool reads or writes them.
struct Fence {
  BlockPool* pool = nullptr;
  std::vector<std::vector<BlockId>> pages;  // [num_groups], of each sequence the deepest first
  bool is_released = false;
};

/// The copy of a borrowed tail: one page in each group.
struct TailCopy {
  std::vector<BlockId> sources, destinations;  // [num_groups]
  size_t num_tokens;                           // how many of the block's tokens hold K/V
};

struct StepRow {
  std::shared_ptr<Sequence> sequence;
  size_t start, end;         // the step computes the tokens [start, end)
  size_t num_blocks_before;  // pages held before the step took more
  bool was_preempted;
  std::unique_ptr<TailCopy> copy;
};

struct Step {
  enum class State { kReserved, kPrepared, kCommitted, kAbandoned };

  BlockPool* pool = nullptr;
  std::vector<StepRow> rows;
  State state = State::kReserved;

  bool is_open() const { return state == State::kReserved || state == State::kPrepared; }
  size_t num_tokens() const;
  size_t max_blocks() const;  // columns that the block table needs
};

}  // namespace pagedkv
