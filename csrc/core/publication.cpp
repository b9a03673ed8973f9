// What enters the index and what leaves it, and the events that say so.

#include <algorithm>
#include <utility>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {

/// Publishes every block whose tokens are all computed: as the first page of a new node, or as one
/// more of a node that somebody else published meanwhile.
void BlockPool::publish(Sequence& sequence) {
  if (!config_.prefix_caching) return;
  Prompt prompt{sequence.tokens, sequence.extras, sequence.generation};
  size_t end = std::min(sequence.num_computed, sequence.publish_end) / block_size();
  size_t next_extras = 0;
  sequence.path.reserve(std::max(end, sequence.path.size()));
  for (size_t index = sequence.path.size(); index < end; ++index) {
    const BlockExtras* extras = extras_of(prompt, index, next_extras);
    if (extras != nullptr && extras->is_torn) break;
    NodeId parent = index == 0 ? kRoot : sequence.path.back();
    BlockKey key = key_of(prompt, index, next_extras);
    NodeId node = tree_.find(parent, key);
    if (node == kNoNode) {
      if (extras != nullptr) {
        key.payload = tree_.extras().intern(extras->payload);
        key.scope = tree_.extras().intern(extras->scope);
      }
      node = tree_.insert(parent, key);
      note_stored(node);
    }
    for (size_t g = 0; g < groups_.size(); ++g) groups_[g].attach(sequence.tables[g][index], node);
    sequence.path.push_back(node);
  }
}

void BlockPool::evict_oldest(PageGroup& group) {
  BlockId id = group.oldest_evictable();
  NodeId node = group.node(id);
  group.detach(id);
  for (const PageGroup& other : groups_)
    if (other.first_page(node) != kNoBlock) return;
  if (tree_.has_children(node))
    throw IntegrityError("evict: expected a leaf, got a node with children");
  note_removed(node);
  tree_.remove(node);
}

/// One reference less on a page, in the order of eviction that its node deserves.
void BlockPool::unref(PageGroup& group, BlockId id) {
  NodeId node = group.node(id);
  if (node == kNoNode || tree_.generation(node) == generation_) {
    group.unref(id);
  } else {
    group.unref_unreachable(id);
  }
}

void BlockPool::bump_generation() {
  std::lock_guard lock(mutex_);
  ++generation_;
  for (PageGroup& group : groups_) group.retire_evictable();
  note_cleared();
}

bool BlockPool::reset() {
  std::lock_guard lock(mutex_);
  for (const PageGroup& group : groups_)
    if (group.num_referenced() > 0) return false;
  std::vector<Event> news = std::exchange(events_, {});
  for (PageGroup& group : groups_)
    while (group.num_evictable() > 0) evict_oldest(group);
  events_ = std::move(news);  // one event for all, in place of one for each block
  note_cleared();
  return true;
}

// Events tell of the index that a prompt can hit, so blocks of an older generation are no news.

void BlockPool::note_stored(NodeId node) {
  if (!config_.events || tree_.generation(node) != generation_) return;
  NodeId parent = tree_.parent(node);
  bool continues = !events_.empty() && events_.back().kind == Event::Kind::kStored &&
                   parent != kRoot && tree_.digest(parent) == events_.back().digests.back();
  if (!continues) {
    events_.push_back({.kind = Event::Kind::kStored, .has_parent = parent != kRoot});
    if (parent != kRoot) events_.back().parent = tree_.digest(parent);
  }
  Event& event = events_.back();
  event.digests.push_back(tree_.digest(node));
  event.tokens.insert(event.tokens.end(), tree_.tokens(node), tree_.tokens(node) + block_size());
  event.payloads.emplace_back(tree_.extras().bytes(tree_.key(node).payload));
}

void BlockPool::note_removed(NodeId node) {
  if (!config_.events || tree_.generation(node) != generation_) return;
  if (events_.empty() || events_.back().kind != Event::Kind::kRemoved)
    events_.push_back({.kind = Event::Kind::kRemoved});
  events_.back().digests.push_back(tree_.digest(node));
}

void BlockPool::note_cleared() {
  if (!config_.events) return;
  events_.push_back({.kind = Event::Kind::kCleared});
}

std::vector<Event> BlockPool::take_events() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

}  // namespace pagedkv
