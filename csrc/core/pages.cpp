// Pages as such: taking, giving back, counting.

#include <algorithm>
#include <string>

#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv {

BlockId BlockPool::take_page(PageGroup& group) {
  if (group.num_free() == 0) {
    evict_oldest(group);
    ++num_evicted_blocks_;
  }
  return group.take();
}

std::vector<BlockId> BlockPool::allocate(int64_t num_blocks) {
  if (num_blocks < 0)
    throw UsageError("allocate: expected num_blocks >= 0, got " + std::to_string(num_blocks));
  std::lock_guard lock(mutex_);
  PageGroup& group = groups_[0];
  size_t needed = static_cast<size_t>(num_blocks);
  if (needed > group.num_free() + group.num_evictable())
    throw OutOfBlocksError("allocate: expected at most " + std::to_string(group.num_free()) +
                               " free + " + std::to_string(group.num_evictable()) +
                               " evictable blocks, got a need of " + std::to_string(needed),
                           needed, group.num_free(), group.num_evictable());
  std::vector<BlockId> ids;
  ids.reserve(needed);
  for (size_t i = 0; i < needed; ++i) ids.push_back(take_page(group));
  for (BlockId id : ids) allocated_[id] = true;
  return ids;
}

void BlockPool::free(std::span<const int64_t> block_ids) {
  std::lock_guard lock(mutex_);
  std::unordered_set<int64_t> seen;
  for (int64_t id : block_ids) {
    if (id < 0 || id >= static_cast<int64_t>(groups_[0].num_pages()))
      throw UsageError("free: expected block ids from 0 to " +
                       std::to_string(groups_[0].num_pages() - 1) + ", got " + std::to_string(id));
    if (!allocated_[id])
      throw StateError("free: expected blocks held through allocate, got block " +
                       std::to_string(id) + ", which is not");
    if (!seen.insert(id).second)
      throw StateError("free: expected each block once for each reference, got block " +
                       std::to_string(id) + " twice with one reference");
  }
  for (size_t i = block_ids.size(); i > 0; --i) {
    BlockId id = static_cast<BlockId>(block_ids[i - 1]);
    allocated_[id] = false;
    groups_[0].unref(id);
  }
}

size_t BlockPool::evict(int64_t num_blocks) {
  if (num_blocks < 0)
    throw UsageError("evict: expected num_blocks >= 0, got " + std::to_string(num_blocks));
  std::lock_guard lock(mutex_);
  size_t num_evicted = std::min(static_cast<size_t>(num_blocks), groups_[0].num_evictable());
  for (size_t i = 0; i < num_evicted; ++i)
    for (PageGroup& group : groups_) evict_oldest(group);
  num_evicted_blocks_ += num_evicted * groups_.size();
  return num_evicted;
}

PoolStats BlockPool::stats() const {
  std::lock_guard lock(mutex_);
  const PageGroup& group = groups_[0];
  PoolStats stats{};
  stats.num_blocks = group.num_pages();
  stats.num_free = group.num_free();
  stats.num_evictable = group.num_evictable();
  stats.num_committed = group.num_committed();
  stats.num_writable = group.num_referenced() - group.num_committed();
  stats.num_nodes = tree_.size();
  stats.num_evicted_blocks = num_evicted_blocks_;
  stats.num_prompts = num_prompts_;
  stats.num_prompt_tokens = num_prompt_tokens_;
  stats.num_cached_tokens = num_cached_tokens_;
  return stats;
}

bool BlockPool::digest_of(int64_t block_id, Digest* digest) {
  std::lock_guard lock(mutex_);
  if (block_id < 0 || block_id >= static_cast<int64_t>(groups_[0].num_pages()))
    throw UsageError("digest_of: expected a block id from 0 to " +
                     std::to_string(groups_[0].num_pages() - 1) + ", got " +
                     std::to_string(block_id));
  NodeId node = groups_[0].node(static_cast<BlockId>(block_id));
  if (node == kNoNode) return false;
  *digest = tree_.digest(node);
  return true;
}

}  // namespace pagedkv
