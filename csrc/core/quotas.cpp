// Who has how many blocks, and what happens above a quota.

#include <algorithm>
#include <unordered_map>

#include "group_copy.h"
#include "plan.h"

namespace pagedkv {

void BlockPool::set_quota(std::string_view salt, size_t quota) {
  std::lock_guard one_at_a_time(copying_);
  PageRings room(0, 0);
  const auto [has_room, num_tenants] =
      locked([&] { return std::pair(tenants_.has_room_for_lists(), tenants_.num_ids()); });
  if (quota != kNoQuota && !has_room) room = PageRings(config_.num_blocks[0], num_tenants);
  TenantId tenant;
  {
    auto call = begin();
    tenant = quota == kNoQuota ? tenants_.find(salt) : tenants_.intern(salt);
    if (tenant == kNobody) return;
    if (quota != kNoQuota && !tenants_.has_list(tenant))
      tenants_.begin_list(tenant, std::move(room));
    bool had_quota = tenants_.has_quota(tenant);
    if (had_quota || quota == kNoQuota || tenants_.num_pages(tenant) == 0) {
      if (quota != kNoQuota || had_quota) tenants_.set_quota(tenant, quota);
      if (quota != kNoQuota || !had_quota) return;
    }
  }
  if (quota == kNoQuota) return end_list(tenant);
  try {
    // What is there already goes in the order of eviction, in which leaves come first.
    GroupCopy copy = copy_group(0, nullptr);
    std::vector<BlockId> order = copy.eviction_order();
    std::erase_if(order, [&](BlockId id) { return copy.pages[id].tenant != tenant; });
    for (size_t num_left = order.size();;) {
      {
        auto call = begin();
        for (size_t i = 0; i < kSlice && num_left > 0; ++i) add_to_list(tenant, order[--num_left]);
        if (num_left == 0) return tenants_.set_quota(tenant, quota);
      }
      mutex_.let_others_go_first();
    }
  } catch (...) {
    end_list(tenant);
    throw;
  }
}

/// Adds a page that was evictable when the tenant's list had begun; unless it has been used since,
/// it was pushed before.
void BlockPool::add_to_list(TenantId tenant, BlockId id) {
  const PageGroup& group = groups_[0];
  if (group.state(id) == PageState::kEvictable && tree_.tenant(group.node(id)) == tenant)
    tenants_.add_older(tenant, id);
}

void BlockPool::end_list(TenantId tenant) {
  for (bool is_done = false; !is_done; mutex_.let_others_go_first()) {
    auto call = begin();
    is_done = tenants_.end_list(tenant, kSlice);
  }
}

TenantUsage BlockPool::tenant_usage(std::string_view salt) const {
  std::lock_guard lock(mutex_);
  TenantId tenant = tenants_.find(salt);
  return {std::string(salt), tenants_.num_pages(tenant), tenants_.quota(tenant)};
}

std::vector<TenantUsage> BlockPool::tenants() {
  std::lock_guard one_at_a_time(copying_);
  std::deque<TenantUsage> copies;  // by number
  ChangedIds changed(0);
  {
    const Watch watch(mutex_, [&](bool begins) {
      if (begins) changed = ChangedIds(tenants_.num_ids());
      tenants_.watch(begins ? &changed : nullptr);
    });
    in_slices(locked([&] { return tenants_.num_ids(); }),
              [&](size_t most) { return copy_tenants(changed, most, copies) < most; });
  }
  std::vector<TenantUsage> all;
  for (TenantUsage& usage : copies)
    if (usage.is_there()) all.push_back(std::move(usage));
  return all;
}

size_t BlockPool::copy_tenants(ChangedIds& changed, size_t most,
                               std::deque<TenantUsage>& copies) const {
  return changed.take(most, [&](size_t id) {
    TenantId tenant = static_cast<TenantId>(id);
    if (copies.size() <= id) copies.resize(id + 1);
    copies[id] = {tenants_.salt(tenant), tenants_.num_pages(tenant), tenants_.quota(tenant)};
  });
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
