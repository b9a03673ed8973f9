// Whom published pages belong to, how many each tenant has, and how many it may have.

#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pagedkv/page_rings.h"
#include "pagedkv/types.h"

namespace pagedkv {

inline constexpr size_t kNoQuota = std::numeric_limits<size_t>::max();

/// The salt among the request-wide entries of a block (pagedkv/extras.py); empty when there is
/// none.
std::string_view salt_in(std::string_view scope);

class Tenants {
 public:
  explicit Tenants(size_t num_pages) : num_pages_(num_pages), tenants_(1) {}

  /// The tenant of a salt, or kNobody when it has neither pages nor a quota. Modifies nothing.
  TenantId find(std::string_view salt) const;
  /// The same, made when there is none.
  TenantId intern(std::string_view salt);

  size_t num_pages(TenantId tenant) const { return tenants_[tenant].num_pages; }
  size_t quota(TenantId tenant) const { return tenants_[tenant].quota; }
  bool has_quotas() const { return num_quotas_ > 0; }
  bool has_quota(TenantId tenant) const { return tenants_[tenant].quota != kNoQuota; }
  const std::string& salt(TenantId tenant) const { return tenants_[tenant].salt; }
  /// Every tenant that has pages or a quota, by number.
  std::vector<TenantId> all() const;

  /// `num_pages` more belong to a tenant from now on; negative: fewer. Called for every page.
  void charge(TenantId tenant, int num_pages) {
    if (tenant == kNobody) return;
    size_t& total = tenants_[tenant].num_pages;
    total += num_pages;
    if (total == 0) forget_if_idle(tenant);
  }
  /// The same for nodes, where these outlive their pages: nobody else may get the tenant's number.
  void count_nodes(TenantId tenant, int num_nodes);
  /// From then on the tenant's evictable pages are kept in order; kNoQuota ends that. Pushing those
  /// that there are now, oldest first, is the caller's part.
  void set_quota(TenantId tenant, size_t quota);

  // The evictable pages of tenants with a quota, in the order of their last use.

  void push(TenantId tenant, BlockId id) {
    if (has_quota(tenant)) rings_->push(tenant, id);
  }
  void remove(TenantId tenant, BlockId id) {
    if (has_quota(tenant)) rings_->remove(id);
  }
  BlockId oldest(TenantId tenant) const { return rings_->oldest(tenant); }
  std::vector<BlockId> in_order(TenantId tenant) const { return rings_->in_order(tenant); }

 private:
  struct Tenant {
    std::string salt;
    size_t num_pages = 0, num_nodes = 0;
    size_t quota = kNoQuota;
  };

  void forget_if_idle(TenantId tenant);

  size_t num_pages_;
  std::vector<Tenant> tenants_;  // the first one is nobody
  std::vector<TenantId> unused_;
  size_t num_quotas_ = 0;
  std::unordered_map<std::string, TenantId> ids_;
  std::unique_ptr<PageRings> rings_;  // a ring for each tenant; made for the first quota
};

}  // namespace pagedkv
