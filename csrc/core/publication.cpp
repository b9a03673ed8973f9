// What enters the index and what leaves it, and the events that say so.

#include <algorithm>
#include <utility>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {

/// Whose a block below `parent` is.
TenantId BlockPool::tenant_for(NodeId parent, const BlockExtras* extras) const {
  std::string_view salt = extras == nullptr ? std::string_view() : salt_in(extras->scope);
  if (!salt.empty()) return tenants_.find(salt);
  return parent == kRoot ? kNobody : tree_.tenant(parent);
}

/// Publishes every block whose tokens are all computed: as the first page of a new node, or as one
/// more of a node that somebody else published meanwhile. Ends where the tenant's quota does.
void BlockPool::publish(Sequence& sequence) {
  if (!config_.prefix_caching) return;
  Prompt prompt{sequence.tokens, sequence.extras, sequence.generation};
  size_t end = std::min(sequence.num_computed, sequence.publish_end) / block_size();
  std::vector<NodeId> stored;
  if (end > sequence.path.capacity())
    sequence.path.reserve(std::max(end, 2 * sequence.path.capacity()));
  sequence.quota_end = SIZE_MAX;
  if (sequence.path.size() >= end) return;
  size_t next_extras = first_extras(prompt, sequence.path.size());
  for (size_t index = sequence.path.size(); index < end; ++index) {
    const BlockExtras* extras = extras_of(prompt, index, next_extras);
    if (extras != nullptr && extras->is_torn) break;
    // A fork may have published the page, when a quota had kept it back before.
    if (NodeId node = groups_[0].node(sequence.tables[0][index]); node != kNoNode) {
      sequence.path.push_back(node);
      tree_.leave_hint(sequence.path, index);
      if (retentions_.is_active()) claim_published(sequence, index, false);
      continue;
    }
    NodeId parent = index == 0 ? kRoot : sequence.path.back();
    TenantId tenant = tenant_for(parent, extras);
    if (tenants_.has_quota(tenant) && tenants_.num_pages(tenant) >= tenants_.quota(tenant)) {
      sequence.quota_end = index * block_size();
      break;
    }
    BlockKey key = plain_key_of(prompt, index);
    NodeId node = kNoNode;
    if (tree_.has_children(parent)) {
      if (extras != nullptr) look_up(*extras, key);
      node = tree_.find(parent, key);
    }
    bool is_new = node == kNoNode;
    if (is_new) {
      if (extras != nullptr) {
        key.payload = tree_.extras().intern(extras->payload);
        key.scope = tree_.extras().intern(extras->scope);
        key.first_offset = extras->first_offset;
        std::string_view salt = salt_in(extras->scope);
        if (!salt.empty()) tenant = tenants_.intern(salt);
      }
      bool is_hashed = index < sequence.digests.size();
      node = tree_.insert(parent, key, is_hashed ? &sequence.digests[index] : nullptr);
      tree_.set_tenant(node, tenant);
      if (config_.events) stored.push_back(node);
    }
    tenants_.charge(tenant, 1);
    for (size_t g = 0; g < groups_.size(); ++g)
      groups_[g].attach(sequence.tables[g][index], node, parent, now_ms_,
                        [&](NodeId of) { return facts(of); });
    sequence.path.push_back(node);
    tell_stored(sequence, index);
    tree_.leave_hint(sequence.path, index);
    if (retentions_.is_active()) claim_published(sequence, index, is_new);
  }
  if (stored.empty()) return;
  tree_.digest(stored.back());  // with those of all before it, in one go
  note_stored(stored);
}

void BlockPool::evict_page(size_t g, BlockId id, EvictionReason reason) {
  PageGroup& group = groups_[g];
  if (NodeId next = group.fetch_victims_after(id); next != kNoNode) tree_.fetch(next);
  NodeId node = group.node(id);
  residency_.add(now_ms_ - group.published(id));
  ++num_evicted_by_[static_cast<size_t>(reason)];
  if (g == 0) {
    tenants_.remove(tree_.tenant(node), id);
    tenants_.charge(tree_.tenant(node), -1);
  }
  group.detach(id, tree_.parent(node), [&](NodeId of) { return facts(of); });
  for (const PageGroup& other : groups_)
    if (other.first_page(node) != kNoBlock) return;
  if (tree_.has_children(node))
    throw IntegrityError("evict: expected a leaf, got a node with children");
  note_removed(node);
  if (is_reachable(node) || reason == EvictionReason::kReset)
    history_.add(tree_.fingerprint(node), now_, reason);
  if (retentions_.is_active()) retentions_.set(node, tree_.depth(node), {});
  tree_.remove(node);
  if (reason == EvictionReason::kCapacity) tree_.fetch_unused(node);  // a new block needs it next
}

void BlockPool::bump_generation() {
  auto call = begin();
  ++generation_;
  for (PageGroup& group : groups_) group.retire_evictable();
  note_cleared();
}

bool BlockPool::reset() {
  {
    auto call = begin();
    for (const PageGroup& group : groups_)
      if (group.num_referenced() > 0) return false;
    ++generation_;  // nothing can be hit from here on, and one event says so
    for (PageGroup& group : groups_) group.retire_evictable();
    note_cleared();
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (bool is_done = false; !is_done;) {
      auto call = begin();  // anew for each batch, so that it stops nobody for long
      for (size_t i = 0; i < kBatch && !is_done; ++i) {
        BlockId id = groups_[g].victim();
        is_done = id == kNoBlock || is_reachable(groups_[g].node(id));
        if (!is_done) evict_page(g, id, EvictionReason::kReset);
      }
    }
  }
  return true;
}

// Events tell of the index that a prompt can hit, so blocks of an older generation are no news.

/// `nodes` lie on one path, from the root on; those between them were there before.
void BlockPool::note_stored(std::span<const NodeId> nodes) {
  if (!config_.events || !is_reachable(nodes.front())) return;
  for (size_t i = 0; i < nodes.size(); ++i) {
    NodeId node = nodes[i], parent = tree_.parent(node);
    bool continues = !events_.empty() && events_.back().kind == Event::Kind::kStored &&
                     parent != kRoot && tree_.digest(parent) == events_.back().digests.back();
    if (!continues) {
      events_.push_back({.kind = Event::Kind::kStored, .has_parent = parent != kRoot});
      Event& event = events_.back();
      if (parent != kRoot) event.parent = tree_.digest(parent);
      event.digests.reserve(nodes.size() - i);
      event.tokens.reserve((nodes.size() - i) * block_size());
      event.payloads.reserve(nodes.size() - i);
    }
    Event& event = events_.back();
    event.digests.push_back(tree_.digest(node));
    const Token* tokens = tree_.tokens(node);
    event.tokens.insert(event.tokens.end(), tokens, tokens + block_size());
    event.payloads.emplace_back(tree_.extras().bytes(tree_.key(node).payload));
  }
}

void BlockPool::note_removed(NodeId node) {
  if (!config_.events || !is_reachable(node)) return;
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
