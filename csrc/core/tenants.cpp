#include "pagedkv/tenants.h"

#include "little_endian.h"

namespace pagedkv {
namespace {

constexpr uint8_t kSaltTag = 1;

}  // namespace

std::string_view salt_in(std::string_view scope) {
  // Entries are tag u8 | u32le(length) | payload, in ascending order of tags, so a salt comes
  // first.
  if (scope.size() < 5 || static_cast<uint8_t>(scope[0]) != kSaltTag) return {};
  uint32_t length = load_le<uint32_t>(reinterpret_cast<const uint8_t*>(scope.data()) + 1);
  return scope.substr(5, length);
}

TenantId Tenants::find(std::string_view salt) const {
  const auto& ids = ids_[table_of(salt)];
  auto found = ids.find(std::string(salt));
  return found == ids.end() ? kNobody : found->second;
}

TenantId Tenants::intern(std::string_view salt) {
  auto [place, is_new] = ids_[table_of(salt)].try_emplace(std::string(salt), kNobody);
  if (!is_new) return place->second;
  if (unused_.empty()) {
    unused_.push_back(static_cast<TenantId>(tenants_.size()));
    tenants_.emplace_back();
    if (rings_) rings_->add_ring();
  }
  place->second = unused_.back();
  unused_.pop_back();
  tenants_[place->second].salt = salt;
  note(place->second);
  return place->second;
}

std::vector<TenantId> Tenants::all() const {
  std::vector<TenantId> all;
  for (TenantId id = 1; id < tenants_.size(); ++id)
    if (tenants_[id].num_pages > 0 || has_quota(id)) all.push_back(id);
  return all;
}

void Tenants::count_nodes(TenantId tenant, int num_nodes) {
  if (tenant == kNobody) return;
  tenants_[tenant].num_nodes += num_nodes;
  if (num_nodes < 0) forget_if_idle(tenant);
}

void Tenants::set_quota(TenantId tenant, size_t quota) {
  num_quotas_ += (quota != kNoQuota) - has_quota(tenant);
  tenants_[tenant].quota = quota;
  note(tenant);
  forget_if_idle(tenant);
}

void Tenants::begin_list(TenantId tenant, PageRings&& room) {
  if (!rings_) rings_ = std::make_unique<PageRings>(std::move(room));
  while (rings_->num_rings() < tenants_.size()) rings_->add_ring();
  num_lists_ += !has_list(tenant);
  tenants_[tenant].has_list = tenants_[tenant].is_taking = true;
}

bool Tenants::end_list(TenantId tenant, size_t most) {
  tenants_[tenant].is_taking = false;
  for (; most > 0 && !rings_->is_empty(tenant); --most) rings_->remove(rings_->oldest(tenant));
  if (!rings_->is_empty(tenant)) return false;
  --num_lists_;
  tenants_[tenant].has_list = false;
  forget_if_idle(tenant);
  return true;
}

void Tenants::forget_if_idle(TenantId id) {
  Tenant& tenant = tenants_[id];
  if (tenant.num_pages > 0 || tenant.num_nodes > 0 || has_quota(id) || tenant.has_list) return;
  ids_[table_of(tenant.salt)].erase(tenant.salt);
  tenant.salt.clear();
  note(id);
  unused_.push_back(id);
}

}  // namespace pagedkv
