// What enters the index and what leaves it.

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
  size_t first = sequence.path.size(), next_extras = first_extras(prompt, first);
  for (size_t index = sequence.path.size(); index < end; ++index) {
    const BlockExtras* extras = extras_of(prompt, index, next_extras);
    if (extras != nullptr && extras->is_torn) break;
    // A page may be gone out of its window, where something had kept the block back before. Then a
    // fork may have published it, too.
    BlockId first_page = sequence.tables[0][index];
    if (NodeId node = first_page == kNoBlock ? kNoNode : groups_[0].node(first_page);
        node != kNoNode) {
      keep(node);
      if (groups_.size() > 1) attach_others(sequence, index, node);
      sequence.path.push_back(node);
      tree_.leave_hint(sequence.path, index);
      if (retentions_.is_active()) claim_published(sequence, index, false);
      continue;
    }
    NodeId parent = index == 0 ? kRoot : sequence.path.back();
    TenantId tenant = tenant_for(parent, extras);
    if (first_page != kNoBlock && tenants_.has_quota(tenant) &&
        tenants_.num_pages(tenant) >= tenants_.quota(tenant)) {
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
    if (!is_new) keep(node);
    if (is_new) {
      if (num_full_ == 0 && (!holds_block(sequence, index) || tree_.size() == tree_.capacity())) {
        sequence.quota_end = index * block_size();
        break;
      }
      if (extras != nullptr) {
        key.payload = tree_.extras().intern(extras->payload);
        key.scope = extras->is_scope() ? tree_.extras().share(key.payload)
                                       : tree_.extras().intern(extras->scope);
        key.first_offset = extras->first_offset;
        std::string_view salt = salt_in(extras->scope);
        if (!salt.empty()) tenant = tenants_.intern(salt);
      }
      bool is_hashed = index < sequence.digests.size();
      node = tree_.insert(parent, key, is_hashed ? &sequence.digests[index] : nullptr);
      tree_.set_tenant(node, tenant);
      if (num_full_ == 0) tenants_.count_nodes(tenant, 1);
    }
    bool is_first = num_full_ > 0 ? is_new : holds_block(sequence, index) && !has_page(node);
    if (config_.events && is_first) stored.push_back(node);
    if (first_page != kNoBlock) {
      tenants_.charge(tenant, 1);
      groups_[0].attach(first_page, node, parent, now_ms_, [&](NodeId of) { return facts(of); });
    }
    if (groups_.size() > 1) attach_others(sequence, index, node);
    sequence.path.push_back(node);
    tree_.leave_hint(sequence.path, index);
    if (retentions_.is_active()) claim_published(sequence, index, is_new);
  }
  pin_path(sequence);
  tell_stored(sequence, first);
  if (stored.empty()) return;
  note_stored(stored);
}

bool BlockPool::holds_block(const Sequence& sequence, size_t index) const {
  return std::ranges::any_of(sequence.tables,
                             [&](const PageTable& table) { return index >= table.num_dropped; });
}

/// Publishes the pages of a block that the sequence holds of groups but the first, if they are not
/// published yet.
void BlockPool::attach_others(const Sequence& sequence, size_t index, NodeId node) {
  for (size_t g = 1; g < groups_.size(); ++g) {
    BlockId id = sequence.tables[g][index];
    if (id != kNoBlock && groups_[g].node(id) == kNoNode)
      groups_[g].attach(id, node, tree_.parent(node), now_ms_,
                        [&](NodeId of) { return facts(of); });
  }
}

/// Takes an evictable page from its node.
void BlockPool::drop_page(size_t g, BlockId id, EvictionReason reason) {
  PageGroup& group = groups_[g];
  residency_.add(now_ms_ - group.published(id));
  ++num_evicted_by_[static_cast<size_t>(reason)];
  if (g == 0) {
    TenantId tenant = tree_.tenant(group.node(id));
    tenants_.remove(tenant, id);
    tenants_.charge(tenant, -1);
  }
  group.detach(id, tree_.parent(group.node(id)), [&](NodeId of) { return facts(of); });
}

/// What no full group has can't be hit, so it goes from the other groups too. Whoever held a page
/// of theirs would hold one here.
void BlockPool::drop_others(NodeId node, EvictionReason reason) {
  for (size_t g = 0; g < groups_.size(); ++g)
    for (BlockId id; (id = groups_[g].first_page(node)) != kNoBlock;) drop_page(g, id, reason);
}

void BlockPool::evict_page(size_t g, BlockId id, EvictionReason reason) {
  PageGroup& group = groups_[g];
  if (NodeId next = group.fetch_victims_after(id); next != kNoNode) tree_.fetch(next);
  NodeId node = group.node(id);
  drop_page(g, id, reason);
  if (group.first_page(node) != kNoBlock) return;
  if (groups_.size() > 1) {
    if (is_full(g)) drop_others(node, reason);
    if (has_page(node)) return;
  }
  note_removed(node);
  if (is_reachable(node) || reason == EvictionReason::kReset)
    history_.add(tree_.fingerprint(node), now_, reason);
  if (num_full_ == 0) return forget(node);
  if (tree_.has_children(node))
    throw IntegrityError("evict: expected a leaf, got a node with children");
  if (retentions_.is_active()) set_retention(node, {});
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
    for (bool is_done = false; !is_done; mutex_.let_others_go_first()) {
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

}  // namespace pagedkv
