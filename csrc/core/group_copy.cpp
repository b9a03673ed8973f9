#include "group_copy.h"

#include <utility>

namespace pagedkv {
PageCopy BlockPool::page_copy(size_t g, BlockId id) const {
  const PageGroup& group = groups_[g];
  NodeId node = group.node(id);
  if (node == kNoNode) return {.refs = group.refs(id)};
  const Retention& retention = retentions_.of(node);
  return {.node = node,
          .parent = tree_.parent(node),
          .refs = group.refs(id),
          .depth = tree_.depth(node),
          .generation = tree_.generation(node),
          .tenant = tree_.tenant(node),
          .is_first = group.first_page(node) == id,
          .last_use = group.last_use(id),
          .priority = retention.priority,
          .eviction_priority = facts(node).priority,
          .until = retention.until};
}

/// Copies a group, and if asked for, by number, its tenants at the same moment. Only for whoever
/// holds `copying_`.
BlockPool::GroupCopy BlockPool::copy_group(size_t g, std::deque<TenantUsage>* tenants) {
  PageGroup& group = groups_[g];
  GroupCopy copy(group, tree_.capacity());
  ChangedIds changed(copy.pages.size()), changed_tenants(0);
  const Watch watch(mutex_, [&](bool begins) {
    group.watch(begins ? &changed : nullptr);
    if (tenants == nullptr) return;
    if (begins) changed_tenants = ChangedIds(tenants_.num_ids());
    tenants_.watch(begins ? &changed_tenants : nullptr);
  });
  in_slices(copy.pages.size(), [&](size_t most) {
    // What goes next is what would go if somebody asked now.
    expire_due();
    size_t num_copied = changed.take(most, [&](size_t id) {
      copy.pages[id] = page_copy(g, static_cast<BlockId>(id));
      copy.policy->copy_page(group.policy(), static_cast<BlockId>(id));
    });
    if (tenants != nullptr)
      num_copied += copy_tenants(changed_tenants, most - num_copied, *tenants);
    if (num_copied == most) return false;
    copy.policy->copy_rest(group.policy());
    copy.generation = generation_;
    copy.now = now_;
    copy.now_ms = now_ms_;
    return true;
  });
  return copy;
}

std::vector<BlockId> BlockPool::GroupCopy::pages_of_nodes() const {
  std::vector<BlockId> found(max_nodes + 1, kNoBlock);
  for (size_t id = 0; id < pages.size(); ++id)
    if (pages[id].is_first) found[pages[id].node] = static_cast<BlockId>(id);
  return found;
}

std::vector<BlockId> BlockPool::GroupCopy::eviction_order() {
  if (!policy->needs_leaves()) return policy->in_order();
  // What may go depends on what has gone.
  std::vector<BlockId> order, found = pages_of_nodes();
  PageGroup group(pages, max_nodes, std::move(policy));
  auto facts = [&](NodeId node) -> PageFacts {
    const PageCopy& page = pages[found[node]];
    return {page.generation == generation, page.eviction_priority, page.depth, now_ms};
  };
  for (BlockId id; (id = group.victim()) != kNoBlock;) {
    order.push_back(id);
    group.detach(id, pages[id].parent, facts);
  }
  return order;
}

/// The same while the lock is held, for the audit.
std::vector<BlockId> BlockPool::evictable_in_order(size_t g) const {
  const PageGroup& group = groups_[g];
  GroupCopy copy(group, tree_.capacity());
  for (size_t i = 0; i < copy.pages.size(); ++i) {
    copy.pages[i] = page_copy(g, static_cast<BlockId>(i));
    copy.policy->copy_page(group.policy(), static_cast<BlockId>(i));
  }
  copy.policy->copy_rest(group.policy());
  copy.generation = generation_;
  copy.now_ms = now_ms_;
  std::vector<BlockId> ids = copy.eviction_order();
  group.check_num_evictable(ids.size());
  return ids;
}

}  // namespace pagedkv
