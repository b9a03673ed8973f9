// Pages as such: taking, giving back, counting.

#include <algorithm>
#include <string>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {

BlockId BlockPool::take_page(size_t g) {
  PageGroup& group = groups_[g];
  if (group.num_free() == 0) evict_page(g, group.victim(), EvictionReason::kCapacity);
  return group.take();
}

/// Counts a path as used now: of each group, the pages that are looked back to.
void BlockPool::touch_path(const Hit& hit) {
  for (size_t i = hit.path.size(); i > 0; --i) {
    NodeId node = hit.path[i - 1];
    keep(node);
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (i <= first_seen(g, hit.next_position)) continue;
      BlockId id = groups_[g].first_page(node);
      if (groups_[g].refs(id) > 0) continue;
      groups_[g].push_again(id, facts(node));
      groups_[g].set_last_use(id, now_ms_);
      if (g > 0) continue;
      tenants_.remove(tree_.tenant(node), id);
      tenants_.push(tree_.tenant(node), id);
    }
  }
}

std::vector<BlockId> BlockPool::allocate(int64_t num_blocks, size_t g) {
  if (num_blocks < 0)
    throw UsageError("allocate: expected num_blocks >= 0, got " + std::to_string(num_blocks));
  auto call = begin();
  PageGroup& group = groups_[g];
  size_t needed = static_cast<size_t>(num_blocks);
  if (needed > group.num_free() + group.num_evictable())
    throw OutOfBlocksError("allocate: expected at most " + std::to_string(group.num_free()) +
                               " free + " + std::to_string(group.num_evictable()) +
                               " evictable blocks, got a need of " + std::to_string(needed),
                           needed, group.num_free(), group.num_evictable());
  std::vector<BlockId> ids;
  ids.reserve(needed);
  expire_due();
  for (size_t i = 0; i < needed; ++i) ids.push_back(take_page(g));
  for (BlockId id : ids) allocated_[g][id] = true;
  return ids;
}

void BlockPool::free(std::span<const int64_t> block_ids, size_t g) {
  auto call = begin();
  std::unordered_set<int64_t> seen;
  for (int64_t id : block_ids) {
    if (id < 0 || id >= static_cast<int64_t>(groups_[g].num_pages()))
      throw UsageError("free: expected block ids from 0 to " +
                       std::to_string(groups_[g].num_pages() - 1) + ", got " + std::to_string(id));
    if (!allocated_[g][id])
      throw StateError("free: expected blocks held through allocate, got block " +
                       std::to_string(id) + ", which is not");
    if (!seen.insert(id).second)
      throw StateError("free: expected each block once for each reference, got block " +
                       std::to_string(id) + " twice with one reference");
  }
  for (size_t i = block_ids.size(); i > 0; --i) {
    BlockId id = static_cast<BlockId>(block_ids[i - 1]);
    allocated_[g][id] = false;
    unref(g, id);
  }
}

size_t BlockPool::evict(int64_t num_blocks) {
  if (num_blocks < 0)
    throw UsageError("evict: expected num_blocks >= 0, got " + std::to_string(num_blocks));
  size_t num_left = static_cast<size_t>(num_blocks), num_evicted = 0;
  for (size_t num_now = kBatch; num_now == kBatch; num_left -= num_now, num_evicted += num_now) {
    mutex_.let_others_go_first();
    auto call = begin();  // anew for each batch, so that it stops nobody for long
    expire_due();
    const size_t most = std::min(num_left, kBatch);
    num_now = 0;
    // What goes with a node counts for its group.
    std::vector<size_t> before;
    for (const PageGroup& group : groups_) before.push_back(group.num_evictable());
    for (size_t g = 0; g < groups_.size(); ++g) {
      PageGroup& group = groups_[g];
      while (group.num_evictable() > 0 && before[g] - group.num_evictable() < most)
        evict_page(g, group.victim(), EvictionReason::kRequest);
      num_now = std::max(num_now, std::min(most, before[g] - group.num_evictable()));
    }
  }
  return num_evicted;
}

PoolStats BlockPool::stats() const {
  std::lock_guard lock(mutex_);
  PoolStats stats{};
  for (size_t g = 0; g < groups_.size(); ++g) {
    const PageGroup& group = groups_[g];
    std::unordered_set<BlockId> fenced;
    for (const Fence* fence : fences_)
      fenced.insert(fence->pages[g].begin(), fence->pages[g].end());
    stats.groups.push_back({.num_blocks = group.num_pages(),
                            .num_free = group.num_free(),
                            .num_writable = group.num_referenced() - group.num_committed(),
                            .num_committed = group.num_committed(),
                            .num_evictable = group.num_evictable(),
                            .num_fenced = fenced.size()});
  }
  static_cast<PageCounts&>(stats) = stats.groups[0];
  stats.num_nodes = tree_.size();
  stats.num_evicted_by = num_evicted_by_;
  stats.num_prompts = num_prompts_;
  stats.num_prompt_tokens = num_prompt_tokens_;
  stats.num_cached_tokens = num_cached_tokens_;
  stats.num_collisions = tree_.num_collisions();
  stats.num_dropped_events = num_dropped_notes_;
  stats.residency = residency_;
  stats.reuse_gaps = reuse_gaps_;
  return stats;
}

PoolWork BlockPool::work() const {
  std::lock_guard lock(mutex_);
  return {tree_.num_digests(), tree_.num_steps()};
}

bool BlockPool::digest_of(int64_t block_id, Digest* digest, size_t g) {
  std::lock_guard lock(mutex_);
  if (block_id < 0 || block_id >= static_cast<int64_t>(groups_[g].num_pages()))
    throw UsageError("digest_of: expected a block id from 0 to " +
                     std::to_string(groups_[g].num_pages() - 1) + ", got " +
                     std::to_string(block_id));
  NodeId node = groups_[g].node(static_cast<BlockId>(block_id));
  if (node == kNoNode) return false;
  *digest = tree_.digest(node);
  return true;
}

std::vector<BlockId> BlockPool::lookup(std::span<const Digest> digests) {
  for (bool is_ready = false; !is_ready; mutex_.let_others_go_first()) {
    std::lock_guard lock(mutex_);
    is_ready = tree_.has_digest_index();
    if (!is_ready) tree_.extend_digest_index(kBatch);
  }
  std::lock_guard lock(mutex_);
  std::vector<BlockId> ids;
  for (const Digest& digest : digests) {
    NodeId node = tree_.find_digest(digest, generation_);
    if (node == kNoNode || groups_[0].first_page(node) == kNoBlock) break;
    ids.push_back(groups_[0].first_page(node));
  }
  return ids;
}

}  // namespace pagedkv
