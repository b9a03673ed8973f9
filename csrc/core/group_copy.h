// The pages of a group at one moment, and the order in which they go; copied in slices, between
// which other calls go on.

#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// Tells `set` under a lock that something begins, and in the end that it ends.
template <typename F>
class Watch {
 public:
  Watch(PoolLock& lock, F set) : lock_(lock), set_(std::move(set)) { tell(true); }
  ~Watch() { tell(false); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  void tell(bool begins) {
    std::lock_guard call(lock_);
    set_(begins);
  }

  PoolLock& lock_;
  F set_;
};

/// Calls `slice` with how many of `num_ids` it may copy, again and again until it says that nothing
/// is left, which then is true of that moment. Others go first in between. Where these change more
/// than a slice each time, the last one is long.
template <typename F>
void BlockPool::in_slices(size_t num_ids, F&& slice) {
  constexpr size_t kMoreSlices = 64;
  for (size_t num_left = 2 * num_ids / kSlice + kMoreSlices;; num_left -= num_left > 0) {
    {
      auto call = begin();
      if (slice(num_left > 0 ? kSlice : SIZE_MAX)) return;
    }
    mutex_.let_others_go_first();
  }
}

struct BlockPool::GroupCopy {
  GroupCopy(const PageGroup& group, size_t max_nodes)
      : pages(group.num_pages()), policy(group.policy().blank()), max_nodes(max_nodes) {}

  std::vector<PageCopy> pages;             // [num_pages]
  std::unique_ptr<EvictionPolicy> policy;  // until eviction_order() takes it
  size_t max_nodes;
  uint32_t generation = 0;  // and when that was
  Nanoseconds now = 0;
  Milliseconds now_ms = 0;

  /// The first page of each node, or kNoBlock: [max_nodes + 1].
  std::vector<BlockId> pages_of_nodes() const;
  /// The evictable pages, the next one first, if nothing else happened meanwhile.
  std::vector<BlockId> eviction_order();
};

}  // namespace pagedkv
