// Whom published pages belong to, how many each tenant has, and how many it may have.

#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
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
  explicit Tenants(size_t num_pages) : num_pages_(num_pages), tenants_(1), ids_(kNumTables) {}

  /// The tenant of a salt, or kNobody when it has neither pages nor a quota. Modifies nothing.
  TenantId find(std::string_view salt) const;
  /// The same, made when there is none.
  TenantId intern(std::string_view salt);

  size_t num_pages(TenantId tenant) const { return tenants_[tenant].num_pages; }
  size_t quota(TenantId tenant) const { return tenants_[tenant].quota; }
  /// All numbers of tenants are below it; some may stand for nobody now.
  size_t num_ids() const { return tenants_.size(); }
  bool has_quotas() const { return num_quotas_ > 0; }
  bool has_quota(TenantId tenant) const {
    return has_quotas() && tenants_[tenant].quota != kNoQuota;
  }
  const std::string& salt(TenantId tenant) const { return tenants_[tenant].salt; }
  /// Every tenant that has pages or a quota, by number. For the audit.
  std::vector<TenantId> all() const;
  /// Until it is told nullptr, it adds the tenants of which the above changes.
  void watch(ChangedIds* changed) { changed_ = changed; }

  /// `num_pages` more belong to a tenant from now on; negative: fewer. Called for every page.
  void charge(TenantId tenant, int num_pages) {
    if (tenant == kNobody) return;
    note(tenant);
    size_t& total = tenants_[tenant].num_pages;
    total += num_pages;
    if (total == 0) forget_if_idle(tenant);
  }
  /// The same for nodes, where these outlive their pages: nobody else may get the tenant's number.
  void count_nodes(TenantId tenant, int num_nodes);
  /// Only for a tenant with a list; kNoQuota for any.
  void set_quota(TenantId tenant, size_t quota);

  // Lists of tenants' evictable pages in the order of their last use, for those with a quota. What
  // there is when a list begins is added by and by, before there is a quota; and so it ends.

  bool has_room_for_lists() const { return rings_ != nullptr; }
  bool has_lists() const { return num_lists_ > 0; }
  bool has_list(TenantId tenant) const { return has_lists() && tenants_[tenant].has_list; }
  /// From now on the list takes what is pushed. `room`, for as many pages, is taken over where
  /// there is none.
  void begin_list(TenantId tenant, PageRings&& room);
  /// The page was pushed before the list began, and before all that are in it.
  void add_older(TenantId tenant, BlockId id) {
    if (!rings_->contains(id)) rings_->insert(tenant, id, rings_->oldest(tenant));
  }
  /// Takes nothing any more, and gives up to `most` pages up. Returns whether the list has ended.
  bool end_list(TenantId tenant, size_t most);

  void push(TenantId tenant, BlockId id) {
    if (has_lists() && tenants_[tenant].is_taking) rings_->push(tenant, id);
  }
  void remove(TenantId tenant, BlockId id) {
    if (has_list(tenant) && rings_->contains(id)) rings_->remove(id);
  }
  BlockId oldest(TenantId tenant) const { return rings_->oldest(tenant); }
  std::vector<BlockId> in_order(TenantId tenant) const { return rings_->in_order(tenant); }

 private:
  struct Tenant {
    std::string salt;
    size_t num_pages = 0, num_nodes = 0;
    size_t quota = kNoQuota;
    bool has_list = false, is_taking = false;
  };

  void forget_if_idle(TenantId tenant);
  void note(TenantId tenant) {
    if (changed_ != nullptr) [[unlikely]]
      changed_->add(tenant);
  }
  static size_t table_of(std::string_view salt) {
    return std::hash<std::string_view>()(salt) / 128 % kNumTables;
  }

  size_t num_pages_;
  std::deque<Tenant> tenants_;  // the first one is nobody
  std::vector<TenantId> unused_;
  size_t num_quotas_ = 0, num_lists_ = 0;
  // In many tables, each of which grows for itself: one would take long to, now and then.
  static constexpr size_t kNumTables = 512;
  std::vector<std::unordered_map<std::string, TenantId>> ids_;
  std::unique_ptr<PageRings> rings_;  // a ring for each tenant; made for the first list
  ChangedIds* changed_ = nullptr;     // while somebody copies
};

}  // namespace pagedkv
