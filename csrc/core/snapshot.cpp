// The pages as arrays, for page maps.

#include <limits>
#include <memory>

#include "pagedkv/block_pool.h"

namespace pagedkv {

PoolSnapshot BlockPool::snapshot(size_t g) {
  // The lock is held for as little as can be: memory is taken, and touched, before, and the order
  // of eviction is read afterwards, from a copy.
  const PageGroup& group = groups_[g];
  const size_t num_pages = group.num_pages();
  PoolSnapshot map;
  map.state.resize(num_pages);
  map.priority.assign(num_pages, kDefaultPriority);
  map.num_refs.resize(num_pages);
  for (std::vector<int32_t>* none : {&map.depth, &map.parent, &map.eviction_rank, &map.tenant})
    none->assign(num_pages, -1);
  map.retained_s.assign(num_pages, 0);
  map.idle_s.assign(num_pages, std::numeric_limits<float>::quiet_NaN());

  std::vector<BlockId> order;
  std::unique_ptr<EvictionPolicy> policy;
  {
    auto call = begin();
    // What goes next is what would go if somebody asked now.
    expire_due();
    fill(map, g);
    if (group.needs_leaves()) {  // what may go depends on what has gone
      order = evictable_in_order(g);
    } else {
      policy = group.policy().clone();
    }
  }
  if (policy) order = policy->in_order();
  for (size_t rank = 0; rank < order.size(); ++rank)
    map.eviction_rank[order[rank]] = static_cast<int32_t>(rank);
  return map;
}

/// Fills in all but the order of eviction.
void BlockPool::fill(PoolSnapshot& map, size_t g) const {
  const PageGroup& group = groups_[g];
  map.now_s = static_cast<double>(now_) / kSecond;
  std::vector<int32_t> places;
  auto place_of = [&](TenantId tenant) {
    if (tenant >= places.size()) places.resize(tenant + 1, -1);
    if (places[tenant] < 0) {
      places[tenant] = static_cast<int32_t>(map.salts.size());
      map.salts.push_back(tenants_.salt(tenant));
    }
    return places[tenant];
  };
  for (TenantId tenant : tenants_.all()) place_of(tenant);  // also those that have a quota alone
  for (BlockId id = 0; id < static_cast<BlockId>(group.num_pages()); ++id) {
    map.state[id] = static_cast<uint8_t>(group.state(id));
    map.num_refs[id] = static_cast<int32_t>(group.refs(id));
    NodeId node = group.node(id);
    if (node == kNoNode) continue;
    map.depth[id] = static_cast<int32_t>(tree_.depth(node));
    if (tree_.parent(node) != kRoot) map.parent[id] = group.first_page(tree_.parent(node));
    if (tree_.tenant(node) != kNobody) map.tenant[id] = place_of(tree_.tenant(node));
    if (retentions_.is_active()) {
      const Retention& retention = retentions_.of(node);
      map.priority[id] = retention.priority;
      if (retention.until != kForever) {
        map.retained_s[id] = static_cast<float>(retention.until - now_) / kSecond;
      } else if (retention.priority != kDefaultPriority) {
        map.retained_s[id] = std::numeric_limits<float>::infinity();
      }
    }
    if (group.refs(id) == 0)
      map.idle_s[id] = static_cast<float>(now_ms_ - group.last_use(id)) / 1000;
  }
}

}  // namespace pagedkv
