// Which page goes next.
//
// A policy keeps the evictable pages of one group in an order of its choice. It is told of a page
// when the page becomes evictable, is used again or changes its priority, and when it is evictable
// no longer; it never learns of tokens or sequences.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

/// What a policy is told of a page.
struct PageFacts {
  bool is_reachable;  // false: no prompt can hit it any more
  Priority priority;  // 0 to 100
  uint32_t depth;     // the index of its block in its prompt
};

/// The pool pushes a path deepest first, and whatever it pushes again it pushes with all ancestors
/// of the same priority behind it. A policy that keeps this order among pages of one priority, and
/// evicts lower priorities first, never has to name a block before its descendants; any other one
/// must see to that itself.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  /// The page is evictable from now on.
  virtual void push(BlockId id, const PageFacts& facts) = 0;
  /// It is not any more: somebody references it, or it is evicted.
  virtual void remove(BlockId id) = 0;
  /// Nothing can hit any of the pages any more.
  virtual void retire_all() = 0;

  // The same for pages of blocks that follow each other in a prompt: by default one by one.

  /// Pushes them from the last to the first. `facts` are those of the first; the others differ from
  /// it in depth alone, by one each.
  virtual void push_path(std::span<const BlockId> ids, PageFacts facts) {
    facts.depth += static_cast<uint32_t>(ids.size());
    for (size_t i = ids.size(); i > 0; --i) {
      --facts.depth;
      push(ids[i - 1], facts);
    }
  }
  /// Removes them, in any order.
  virtual void remove_path(std::span<const BlockId> ids) {
    for (BlockId id : ids) remove(id);
  }

  /// The pages will be pushed or removed soon: a policy may fetch what that reads.
  virtual void fetch(std::span<const BlockId>) const {}
  /// A guess which page is the victim after `victim`, so that it can be fetched, or kNoBlock.
  virtual BlockId victim_after(BlockId /*victim*/) const { return kNoBlock; }

  /// The page to evict next, or kNoBlock when there is none.
  virtual BlockId victim() const = 0;
  /// All pages, the next victim first. For the audit and for page maps; may be slow.
  virtual std::vector<BlockId> in_order() const = 0;
};

/// Unreachable pages first, then the lowest priority, then what was pushed longest ago. All in
/// constant time.
std::unique_ptr<EvictionPolicy> make_lru_policy(size_t num_pages);

using MakePolicy = std::unique_ptr<EvictionPolicy> (*)(size_t num_pages);

}  // namespace pagedkv
