// The pages as arrays, for page maps.

#include <limits>
#include <mutex>

#include "group_copy.h"

namespace pagedkv {

PoolSnapshot BlockPool::snapshot(size_t g) {
  std::lock_guard one_at_a_time(copying_);
  std::deque<TenantUsage> tenants;
  GroupCopy copy = copy_group(g, &tenants);
  const size_t num_pages = copy.pages.size();
  PoolSnapshot map;
  map.now_s = static_cast<double>(copy.now) / kSecond;
  map.state.resize(num_pages);
  map.priority.resize(num_pages);
  map.num_refs.resize(num_pages);
  for (std::vector<int32_t>* none : {&map.depth, &map.parent, &map.eviction_rank, &map.tenant})
    none->assign(num_pages, -1);
  map.retained_s.assign(num_pages, 0);
  map.idle_s.assign(num_pages, std::numeric_limits<float>::quiet_NaN());

  // A tenant may have pages of this group alone, which nobody is charged for.
  std::vector<bool> is_named(tenants.size());
  for (const PageCopy& page : copy.pages)
    if (page.node != kNoNode && page.tenant != kNobody) is_named[page.tenant] = true;
  std::vector<int32_t> places(tenants.size(), -1);
  for (TenantId tenant = 1; tenant < tenants.size(); ++tenant) {
    TenantUsage& usage = tenants[tenant];
    if (!usage.is_there() && !is_named[tenant]) continue;
    places[tenant] = static_cast<int32_t>(map.salts.size());
    map.salts.push_back(std::move(usage.salt));
  }
  const std::vector<BlockId> found = copy.pages_of_nodes();
  for (size_t id = 0; id < num_pages; ++id) {
    const PageCopy& page = copy.pages[id];
    map.state[id] = static_cast<uint8_t>(state_of(page.refs, page.node));
    map.num_refs[id] = static_cast<int32_t>(page.refs);
    map.priority[id] = page.priority;
    if (page.node == kNoNode) continue;
    map.depth[id] = static_cast<int32_t>(page.depth);
    if (page.parent != kRoot) map.parent[id] = found[page.parent];
    if (page.tenant != kNobody) map.tenant[id] = places[page.tenant];
    if (page.until != kForever) {
      map.retained_s[id] = static_cast<float>(page.until - copy.now) / kSecond;
    } else if (page.priority != kDefaultPriority) {
      map.retained_s[id] = std::numeric_limits<float>::infinity();
    }
    if (page.refs == 0) map.idle_s[id] = static_cast<float>(copy.now_ms - page.last_use) / 1000;
  }
  const std::vector<BlockId> order = copy.eviction_order();
  for (size_t rank = 0; rank < order.size(); ++rank)
    map.eviction_rank[order[rank]] = static_cast<int32_t>(rank);
  return map;
}

}  // namespace pagedkv
