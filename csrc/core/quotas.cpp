// Who has how many blocks, and what happens above a quota.

#include <algorithm>
#include <unordered_map>

#include "plan.h"

namespace pagedkv {

void BlockPool::set_quota(std::string_view salt, size_t quota) {
  auto call = begin();
  TenantId tenant = quota == kNoQuota ? tenants_.find(salt) : tenants_.intern(salt);
  if (tenant == kNobody) return;
  bool had_quota = tenants_.has_quota(tenant);
  tenants_.set_quota(tenant, quota);
  if (had_quota || quota == kNoQuota || tenants_.num_pages(tenant) == 0) return;
  // What is there already goes in the order of eviction, in which leaves come first.
  const PageGroup& group = groups_[0];
  for (BlockId id : evictable_in_order(0))
    if (tree_.tenant(group.node(id)) == tenant) tenants_.push(tenant, id);
}

TenantUsage BlockPool::tenant_usage(std::string_view salt) const {
  std::lock_guard lock(mutex_);
  TenantId tenant = tenants_.find(salt);
  return {std::string(salt), tenants_.num_pages(tenant), tenants_.quota(tenant)};
}

std::vector<TenantUsage> BlockPool::tenants() const {
  std::lock_guard lock(mutex_);
  std::vector<TenantUsage> all;
  for (TenantId tenant : tenants_.all())
    all.push_back({tenants_.salt(tenant), tenants_.num_pages(tenant), tenants_.quota(tenant)});
  return all;
}

/// Whether a page of group 0 may go: nothing follows its block, or the block has another page.
bool BlockPool::can_spare(BlockId id) const {
  const PageGroup& group = groups_[0];
  return !is_full(0) || !tree_.has_children(group.node(id)) || group.next_page(id) != id;
}

/// Makes room for what the plans may publish, by evicting the same tenant's oldest pages.
void BlockPool::make_room_in_quotas(std::span<const Plan> plans) {
  if (!tenants_.has_quotas() || !config_.prefix_caching) return;
  std::unordered_map<TenantId, size_t> num_wanted;
  for (const Plan& plan : plans) {
    const Sequence& sequence = *plan.sequence;
    size_t begin = sequence.path.size();
    size_t end = std::min(plan.end, sequence.publish_end) / block_size();
    TenantId tenant = kNobody;
    for (const BlockExtras& extras : sequence.extras) {
      if (extras.is_torn) end = std::min<size_t>(end, extras.block_index);
      std::string_view salt = salt_in(extras.scope);
      if (salt.empty()) continue;
      tenant = tenants_.find(salt);
      begin = std::max<size_t>(begin, extras.block_index);
    }
    if (tenants_.has_quota(tenant)) num_wanted[tenant] += end - std::min(begin, end);
  }
  for (auto [tenant, num_pages] : num_wanted) {
    // A quota that was lowered by much is met in several steps, so that none of them takes long.
    for (size_t num_left = num_pages + kBatch; num_left > 0; --num_left) {
      if (tenants_.num_pages(tenant) + num_pages <= tenants_.quota(tenant)) break;
      BlockId id = tenants_.oldest(tenant);
      if (id == kNoBlock) break;
      if (can_spare(id)) {
        evict_page(0, id, EvictionReason::kQuota);
      } else {  // an order other than LRU took the block's younger page: what follows goes first
        tenants_.remove(tenant, id);
        tenants_.push(tenant, id);
      }
    }
  }
}

}  // namespace pagedkv
