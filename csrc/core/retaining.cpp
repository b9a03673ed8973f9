// Retention of the pool's blocks: who raises it, and how it ends.
//
// A parent is worth at least as much as any child, and among equals it is younger, so that leaves
// go first whatever is retained.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// The facts of a node's evictable pages have changed. What nothing can hit keeps its order: a
/// priority means nothing there.
void BlockPool::push_again(NodeId node) {
  if (!is_reachable(node)) return;
  for (PageGroup& group : groups_) {
    BlockId first = group.first_page(node), id = first;
    if (first == kNoBlock) continue;
    do {
      if (group.refs(id) == 0) group.push_again(id, facts(node));
      id = group.next_page(id);
    } while (id != first);
  }
}

/// Adds a claim to those on a node and on its ancestors.
void BlockPool::raise(NodeId node, const Retention& claim) {
  bool has_pushed = false;
  Priority pushed = 0;
  for (; node != kRoot; node = tree_.parent(node)) {
    Retention before = retentions_.of(node);
    Retention after = combine(before, claim);
    bool changes_ring = after.priority != before.priority;
    bool stands_before_child = has_pushed && after.priority == pushed;
    if (after == before && !stands_before_child) return;
    set_retention(node, after);
    if (!changes_ring && !stands_before_child) continue;
    push_again(node);
    has_pushed = true;
    pushed = after.priority;
  }
}

/// Memory for retentions, when they are wanted for the first time; taken without the lock, since it
/// takes a while.
Retentions BlockPool::retentions_for(bool is_wanted) const {
  Retentions room(tree_.capacity());
  if (is_wanted && !locked([&] { return retentions_.is_active(); })) room.activate();
  return room;
}

size_t BlockPool::retain(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                         const RetentionRange& range) {
  Retentions room = retentions_for(true);
  auto call = begin();
  retentions_.activate(std::move(room));
  Hit hit = find({tokens, extras, generation_});
  size_t end = std::min(range.end, hit.path.size());
  touch_path(hit);
  if (range.begin >= end) return 0;
  raise(hit.path[end - 1], *claim({&range, 1}, range.begin, now_));
  return (end - range.begin) * block_size();
}

/// What a request that was just opened does for the blocks that it hit.
void BlockPool::retain_hit(const Sequence& sequence) {
  if (!retentions_.is_active()) return;
  for (size_t i = sequence.path.size(); i > 0; --i) {
    NodeId node = sequence.path[i - 1];
    note_changed(node);
    retentions_.refresh(node, tree_.depth(node), now_);
    if (std::optional<Retention> wanted = claim(sequence.retention, i - 1, sequence.opened))
      raise(node, *wanted);
  }
}

/// What a request does for a block that it has just published.
void BlockPool::claim_published(const Sequence& sequence, size_t index, bool is_new) {
  NodeId node = sequence.path[index];
  std::optional<Retention> wanted = claim(sequence.retention, index, sequence.opened);
  if (!is_new) {
    if (wanted) raise(node, *wanted);
    return;
  }
  Retention own = wanted.value_or(Retention{});
  set_retention(node, own);
  raise(tree_.parent(node), own);
}

/// Ends what has lasted its time: such a block is like any other that was used just now.
void BlockPool::expire_due() {
  if (!retentions_.is_active()) return;
  // Whatever ends beyond a batch stays as it is for the next call, so that none takes long.
  for (size_t num_left = 2 * kBatch; num_left > 0; --num_left) {
    NodeId node = retentions_.first_due(now_);
    if (node == kNoNode) return;
    bool was_low = retentions_.priority(node) < kDefaultPriority;
    set_retention(node, {});
    push_again(node);
    if (!was_low) continue;
    // Its ancestors may be worth less than it now, or stand before it.
    for (NodeId above = tree_.parent(node);
         above != kRoot && retentions_.priority(above) <= kDefaultPriority;
         above = tree_.parent(above)) {
      set_retention(above, {});
      push_again(above);
    }
  }
}

}  // namespace pagedkv
