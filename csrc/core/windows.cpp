// Groups whose attention sees a window of the last tokens: they hold pages for that alone.
//
// What has left a sequence's window is given back and stays in the index until it is evicted, from
// either end of a path. Where some group sees all, every node has a page in each such group, leaves
// are evicted first, and a node goes from all groups with its last page in one of them. Where all
// groups have windows, a node may have no page any more: it stays while others follow it, or while
// a sequence has published that far, since both know what precedes them by it.

#include <algorithm>
#include <utility>

#include "plan.h"

namespace pagedkv {

/// The first block that the token at `position`, and all behind it, look back to.
size_t BlockPool::first_seen(size_t g, size_t position) const {
  if (is_full(g)) return 0;
  size_t num_before = config_.windows[g] - size_t{1};
  return position > num_before ? (position - num_before) / block_size() : 0;
}

/// Where a sequence looks back from: its next token, or the start of the block that this one
/// continues, since the tail in front of it may have to be given up.
size_t BlockPool::next_position(const Sequence& sequence) const {
  size_t position = sequence.num_computed;
  return sequence.num_with_kv % block_size() == 0 ? position
                                                  : position / block_size() * block_size();
}

/// The largest number of leading blocks, up to `num_blocks`, behind which every group has the pages
/// that are looked back to. The next token is the one behind them, or that at `last_position`.
template <typename HasPage>
size_t BlockPool::longest_seen(size_t num_blocks, size_t last_position, HasPage&& has_page) const {
  for (size_t g = num_full_; g < groups_.size();) {
    size_t first = first_seen(g, std::min(num_blocks * block_size(), last_position));
    size_t end = num_blocks;
    while (end > first && has_page(g, end - 1)) --end;
    ++g;
    if (end == first) continue;
    num_blocks = end - 1;  // whatever ends behind the gap looks back to it, or beyond
    g = num_full_;
  }
  return num_blocks;
}

/// Shortens what the tree knows of a prompt to what can be used.
void BlockPool::limit(Hit& hit) const {
  auto has_page = [&](size_t g, size_t index) {
    return groups_[g].first_page(hit.path[index]) != kNoBlock;
  };
  size_t size = longest_seen(hit.path.size(), hit.next_position, has_page);
  bool has_run = hit.run.num_tokens > 0 && size == hit.path.size();
  for (const PageGroup& group : groups_)
    has_run = has_run && group.first_page(hit.run.node) != kNoBlock;
  if (!has_run) hit.run = {};
  hit.path.resize(size);
  hit.next_position = std::min(size * block_size(), hit.next_position);
}

/// Gives back the pages that no token looks back to from the next one on, deepest first.
void BlockPool::leave_window(Sequence& sequence) {
  for (size_t g = num_full_; g < groups_.size(); ++g) {
    PageTable& table = sequence.tables[g];
    size_t first = first_seen(g, next_position(sequence));
    for (size_t i = first; i > table.num_dropped; --i)
      unref(g, std::exchange(table[i - 1], kNoBlock));
    table.num_dropped = std::max(table.num_dropped, first);
  }
}

/// A sequence was cut, so that its next token looks further back. Holds those pages again where the
/// index has them all; else goes back to where it has. `tail` is the node of the block that was cut
/// through, if it was published.
void BlockPool::look_back(Sequence& sequence, NodeId tail) {
  auto page_at = [&](size_t g, size_t index) {
    NodeId node = index < sequence.path.size() ? sequence.path[index] : tail;
    return node == kNoNode ? kNoBlock : groups_[g].first_page(node);
  };
  auto has_page = [&](size_t g, size_t index) {
    return index >= sequence.tables[g].num_dropped || page_at(g, index) != kNoBlock;
  };
  size_t held = sequence.tables[0].size();
  size_t size = longest_seen(held, next_position(sequence), has_page);
  if (size < held) {
    for (size_t* length : {&sequence.num_cached, &sequence.num_computed, &sequence.num_with_kv})
      *length = std::min(*length, size * block_size());
    release_blocks(sequence, size);
  }
  for (size_t g = num_full_; g < groups_.size(); ++g) {
    PageTable& table = sequence.tables[g];
    size_t first = first_seen(g, next_position(sequence));
    if (table.num_dropped <= first) continue;
    sequence.table_id = ++num_table_ids_;
    for (; table.num_dropped > first; --table.num_dropped) {
      size_t index = table.num_dropped - 1;
      table[index] = page_at(g, index);
      ref(g, table[index]);
    }
  }
}

bool BlockPool::has_page(NodeId node) const {
  return std::ranges::any_of(
      groups_, [&](const PageGroup& group) { return group.first_page(node) != kNoBlock; });
}

/// Removes a node that nobody needs any more, and those before it that were there for it alone.
/// Only for pools whose groups all have windows.
void BlockPool::forget(NodeId node) {
  while (node != kRoot && !has_page(node) && !tree_.has_children(node) &&
         tree_.num_pins(node) == 0) {
    NodeId parent = tree_.parent(node);
    if (retentions_.is_active()) set_retention(node, {});
    tenants_.count_nodes(tree_.tenant(node), -1);
    tree_.remove(node);
    node = parent;
  }
}

/// Keeps the nodes of a sequence's path, of which it may hold no page.
void BlockPool::pin_path(Sequence& sequence) {
  if (num_full_ > 0) return;  // it holds a page of each
  NodeId last = sequence.path.empty() ? kNoNode : sequence.path.back();
  if (last == sequence.pinned) return;
  if (last != kNoNode) tree_.pin(last);
  NodeId before = std::exchange(sequence.pinned, last);
  if (before == kNoNode) return;
  tree_.unpin(before);
  forget(before);
}

/// Nodes without pages may fill the index. Evicts the oldest pages until what the plans may publish
/// has room; where that is not enough, the rest stays unpublished.
void BlockPool::make_room_in_index(std::span<const Plan> plans) {
  if (num_full_ > 0 || !config_.prefix_caching) return;
  size_t num_wanted = 0;
  for (const Plan& plan : plans) {
    size_t end = plan.end / block_size();
    num_wanted += end - std::min(end, plan.sequence->path.size());
  }
  // In several steps, if need be, so that none of them takes long.
  for (size_t num_left = num_wanted + kBatch;
       num_left > 0 && tree_.capacity() - tree_.size() < num_wanted; --num_left) {
    bool has_evicted = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      BlockId id = groups_[g].victim();
      if (id == kNoBlock) continue;
      evict_page(g, id, EvictionReason::kCapacity);
      has_evicted = true;
    }
    if (!has_evicted) return;
  }
}

}  // namespace pagedkv
