// The audit: everything that must hold between two calls, checked from scratch.

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds)
    throw IntegrityError("check_integrity: expected " + what + "; please report this bug");
}

}  // namespace

void BlockPool::check_integrity() const {
  std::lock_guard lock(mutex_);
  std::vector<NodeId> nodes = tree_.checked_nodes();

  // 1. Every sequence describes itself truly.
  for (const Sequence* sequence : sequences_) {
    const Sequence& s = *sequence;
    size_t size = s.tables[0].size();
    require(s.num_cached <= s.num_computed && s.num_computed <= s.num_with_kv &&
                s.num_with_kv <= s.tokens.size(),
            "num_cached <= num_computed <= num_with_kv <= num_tokens");
    require(s.num_with_kv <= size * block_size(), "a page for every token with K/V");
    require(s.is_in_step || size == (s.num_with_kv + block_size() - 1) / block_size(),
            "no page beyond the tokens");
    require(s.path.size() <= s.num_with_kv / block_size(), "published blocks to be full");
    require(!s.is_preempted || size == 0, "a preempted sequence to hold no page");
    for (size_t g = 0; g < groups_.size(); ++g) {
      const PageTable& table = s.tables[g];
      require(table.size() == size, "tables of one length in all groups");
      require(s.is_preempted || table.num_dropped == first_seen(g, next_position(s)),
              "the pages of a window, and no others");
      for (size_t i = 0; i < size; ++i)
        require((table[i] == kNoBlock) == (i < table.num_dropped), "no page in front of a window");
      for (size_t i = 0; i < s.path.size(); ++i) {
        NodeId node = s.path[i];
        require(i < table.num_dropped || groups_[g].node(table[i]) == node,
                "a published block's page to belong to its node");
        require(tree_.parent(node) == (i == 0 ? kRoot : s.path[i - 1]), "a path from the root");
        require(std::equal(tree_.tokens(node), tree_.tokens(node) + block_size(),
                           s.tokens.begin() + i * block_size()),
                "a path of the sequence's own tokens");
      }
    }
  }

  for (size_t g = 0; g < groups_.size(); ++g) {
    const PageGroup& group = groups_[g];

    // 2. References are exactly those of sequences, steps and allocate().
    std::vector<uint32_t> refs(group.num_pages(), 0);
    for (const Sequence* sequence : sequences_)
      for (BlockId id : sequence->tables[g].held()) ++refs[id];
    for (const Step* step : steps_)
      for (const StepRow& row : step->rows)
        if (row.copy) ++refs[row.copy->sources[g]];
    for (const Fence* fence : fences_)
      for (BlockId id : fence->pages[g]) ++refs[id];
    for (size_t id = 0; id < refs.size(); ++id) refs[id] += allocated_[g][id];
    size_t num_committed = 0;
    for (size_t id = 0; id < refs.size(); ++id) {
      BlockId page = static_cast<BlockId>(id);
      require(group.refs(page) == refs[id], "block " + std::to_string(id) + " to have " +
                                                std::to_string(refs[id]) + " references, got " +
                                                std::to_string(group.refs(page)));
      num_committed += group.state(page) == PageState::kCommitted;
    }
    require(group.num_committed() == num_committed, "a true count of committed pages");

    // 3. A page is free once, or evictable once, or referenced.
    std::vector<BlockId> order = evictable_in_order(g);
    std::vector<bool> seen(group.num_pages(), false);
    auto meet = [&](BlockId id, PageState state) {
      require(!seen[id] && group.state(id) == state,
              "block " + std::to_string(id) + " once, on the list of its state");
      seen[id] = true;
    };
    for (BlockId id : group.free_pages()) meet(id, PageState::kFree);
    for (BlockId id : order) meet(id, PageState::kEvictable);
    for (size_t id = 0; id < seen.size(); ++id) require(seen[id] || refs[id] > 0, "no lost page");

    // 4. Nodes and pages list each other, and where all is seen, eviction meets a node's last page
    // after those of its children.
    constexpr size_t kReferenced = std::numeric_limits<size_t>::max();
    std::vector<size_t> page_age(group.num_pages(), kReferenced);
    for (size_t i = 0; i < order.size(); ++i) page_age[order[i]] = i;
    std::vector<size_t> node_age(tree_.capacity() + 1, kReferenced);
    size_t num_listed = 0;
    for (NodeId node : nodes) {  // parents first
      std::vector<BlockId> pages = group.pages_of(node);
      require(!is_full(g) || !pages.empty(), "every node to have a page where all is seen");
      num_listed += pages.size();
      node_age[node] = 0;
      for (BlockId id : pages) node_age[node] = std::max(node_age[node], page_age[id]);
      size_t parent_age = node_age[tree_.parent(node)];
      require(!is_full(g) || parent_age > node_age[node] || parent_age == kReferenced,
              "leaves to be evicted before their parents");
    }
    size_t num_published = group.num_committed() + group.num_evictable();
    require(num_listed == num_published, "every published page to be listed by a node");
  }

  // Where all groups have windows, a node has a page, or others follow it, or a sequence needs it.
  if (num_full_ == 0) {
    std::unordered_map<NodeId, uint32_t> num_pins;
    for (const Sequence* sequence : sequences_)
      if (!sequence->path.empty()) ++num_pins[sequence->path.back()];
    for (NodeId node : nodes) {
      require(tree_.num_pins(node) == num_pins[node], "a pin for each sequence on its last node");
      require(has_page(node) || tree_.has_children(node) || num_pins[node] > 0,
              "no node that nobody needs");
    }
  }

  // 5. A parent is kept for at least as long as its children.
  retentions_.check();
  for (NodeId node : nodes) {
    NodeId parent = tree_.parent(node);
    if (parent == kRoot) continue;
    Retention own = retentions_.of(node), above = retentions_.of(parent);
    require(combine(above, own) == above, "no block to be worth more than its parent");
  }

  // 6. Tenants own the pages of their nodes, and those with a quota list the evictable ones.
  std::unordered_map<TenantId, size_t> num_owned, num_listed;
  for (NodeId node : nodes) num_owned[tree_.tenant(node)] += groups_[0].pages_of(node).size();
  for (TenantId tenant : tenants_.all()) {
    require(tenants_.num_pages(tenant) == num_owned[tenant], "a true count of a tenant's pages");
    if (!tenants_.has_quota(tenant)) continue;
    std::unordered_map<NodeId, size_t> num_left;  // evictable pages of a node that come later
    for (BlockId id : tenants_.in_order(tenant)) ++num_left[groups_[0].node(id)];
    for (BlockId id : tenants_.in_order(tenant)) {
      NodeId node = groups_[0].node(id), parent = tree_.parent(node);
      --num_left[node];
      bool is_parent_theirs = parent != kRoot && tree_.tenant(parent) == tenant;
      bool is_parent_held = false;
      if (is_parent_theirs)
        for (BlockId other : groups_[0].pages_of(parent))
          is_parent_held = is_parent_held || groups_[0].refs(other) > 0;
      // Another order may have taken the parent's younger page; make_room_in_quotas() copes.
      require(!is_full(0) || groups_[0].needs_leaves() || !is_parent_theirs || is_parent_held ||
                  num_left[parent] > 0,
              "a tenant's leaves to be evicted before their parents");
      require(groups_[0].state(id) == PageState::kEvictable &&
                  tree_.tenant(groups_[0].node(id)) == tenant,
              "a tenant's ring to hold its evictable pages");
      ++num_listed[tenant];
    }
  }
  for (BlockId id : evictable_in_order(0)) {
    TenantId tenant = tree_.tenant(groups_[0].node(id));
    if (tenants_.has_quota(tenant)) --num_listed[tenant];
  }
  for (auto [tenant, difference] : num_listed)
    require(difference == 0, "a tenant's ring to hold all its evictable pages");
}

}  // namespace pagedkv
