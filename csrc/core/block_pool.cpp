// Requests and pages; steps are in step.cpp, the audit in integrity.cpp.

#include "pagedkv/block_pool.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "pagedkv/error.h"

namespace pagedkv {
namespace {

size_t total(const std::vector<size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

/// The key of block `index`, with the ids that the table knows for its extras. `next` walks along
/// `extras`.
BlockKey key_of(const ExtrasTable& table, std::span<const Token> tokens, size_t index,
                uint32_t block_size, std::span<const BlockExtras> extras, size_t& next) {
  size_t begin = index * block_size;
  BlockKey key{tokens.data() + begin,
               static_cast<uint32_t>(std::min<size_t>(block_size, tokens.size() - begin)),
               kNoExtras, kNoExtras, block_size};
  while (next < extras.size() && extras[next].block_index < index) ++next;
  if (next < extras.size() && extras[next].block_index == index) {
    key.payload = table.find(extras[next].payload);
    key.scope = table.find(extras[next].scope);
    key.first_offset = extras[next].first_offset;
  }
  return key;
}

}  // namespace

BlockPool::BlockPool(PoolConfig config)
    : config_(std::move(config)),
      tree_(config_.block_size, total(config_.num_blocks),
            chain_root(config_.block_size, config_.digest_namespace)) {
  groups_.reserve(config_.num_blocks.size());
  for (size_t num_blocks : config_.num_blocks) groups_.emplace_back(num_blocks, tree_.capacity());
}

// --- matching

BlockPool::Hit BlockPool::find(std::span<const Token> tokens,
                               std::span<const BlockExtras> extras) const {
  Hit hit;
  if (!config_.prefix_caching) return hit;
  NodeId parent = kRoot;
  size_t next_extras = 0;
  for (size_t index = 0; index * block_size() < tokens.size(); ++index) {
    BlockKey key = key_of(tree_.extras(), tokens, index, block_size(), extras, next_extras);
    NodeId node = key.num_tokens == block_size() ? tree_.find(parent, key) : kNoNode;
    if (node == kNoNode) {
      if (config_.token_granular) hit.run = tree_.longest_run(parent, key);
      break;
    }
    hit.path.push_back(node);
    parent = node;
  }
  return hit;
}

/// find() under the cap of `open`: the last token is always computed, for its logits. A full hit
/// keeps its pages.
BlockPool::Hit BlockPool::find_for(const Sequence& sequence) const {
  Hit hit = find(sequence.tokens, sequence.extras);
  size_t num_block_tokens = hit.path.size() * block_size();
  if (hit.run.num_tokens > 0 && num_block_tokens + hit.run.num_tokens == sequence.tokens.size())
    --hit.run.num_tokens;
  return hit;
}

Match BlockPool::match(std::span<const Token> tokens, std::span<const BlockExtras> extras) const {
  std::lock_guard lock(mutex_);
  Hit hit = find(tokens, extras);
  Match match;
  match.num_block_tokens = hit.path.size() * block_size();
  match.num_partial_tokens = hit.run.num_tokens;
  for (NodeId node : hit.path) match.block_ids.push_back(groups_[0].first_page(node));
  if (hit.run.num_tokens > 0) match.partial_block_id = groups_[0].first_page(hit.run.node);
  return match;
}

/// Takes references on the pages of a hit, for a sequence that holds none.
void BlockPool::reference(Sequence& sequence, const Hit& hit) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    std::vector<BlockId>& table = sequence.tables[g];
    for (NodeId node : hit.path) table.push_back(groups_[g].first_page(node));
    if (hit.run.num_tokens > 0) table.push_back(groups_[g].first_page(hit.run.node));
    for (BlockId id : table) groups_[g].ref(id);
  }
  sequence.path = hit.path;
  sequence.num_with_kv = hit.path.size() * block_size() + hit.run.num_tokens;
  sequence.num_cached = sequence.num_computed =
      std::min(sequence.num_with_kv, sequence.tokens.size() - 1);
}

// --- one request

std::shared_ptr<Sequence> BlockPool::open(std::vector<Token> tokens,
                                          std::vector<BlockExtras> extras) {
  if (tokens.empty()) throw UsageError("open: expected at least one token, got none");
  auto sequence = std::make_shared<Sequence>();
  sequence->pool = this;
  sequence->tokens = std::move(tokens);
  sequence->extras = std::move(extras);
  sequence->tables.resize(groups_.size());
  std::lock_guard lock(mutex_);
  reference(*sequence, find_for(*sequence));
  sequences_.insert(sequence.get());
  ++num_prompts_;
  num_prompt_tokens_ += sequence->tokens.size();
  num_cached_tokens_ += sequence->num_counted = sequence->num_cached;
  return sequence;
}

void BlockPool::check_usable(const Sequence& sequence, const char* verb) const {
  if (sequence.pool != this)
    throw UsageError(std::string(verb) +
                     ": expected a sequence of this pool, got one of another pool");
  if (sequence.is_closed)
    throw StateError(std::string(verb) + ": expected an open sequence, got a closed one");
  if (sequence.is_in_step)
    throw StateError(std::string(verb) +
                     ": expected a sequence outside a step, got one whose step is still open");
}

void BlockPool::append(std::span<const std::shared_ptr<Sequence>> sequences,
                       std::span<const std::vector<Token>> tokens) {
  std::lock_guard lock(mutex_);
  for (const auto& sequence : sequences) check_usable(*sequence, "append");
  for (size_t i = 0; i < sequences.size(); ++i)
    sequences[i]->tokens.insert(sequences[i]->tokens.end(), tokens[i].begin(), tokens[i].end());
}

void BlockPool::truncate(Sequence& sequence, size_t num_tokens) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "truncate");
  if (num_tokens > sequence.tokens.size())
    throw UsageError("truncate: expected num_tokens from 0 to " +
                     std::to_string(sequence.tokens.size()) + ", got " +
                     std::to_string(num_tokens));
  cut(sequence, num_tokens);
}

/// Forgets the tokens from `num_tokens` on, with their pages, their digests and their extras.
void BlockPool::cut(Sequence& sequence, size_t num_tokens) {
  size_t num_whole_blocks = num_tokens / block_size();
  sequence.tokens.resize(num_tokens);
  sequence.digests.resize(std::min(sequence.digests.size(), num_whole_blocks));
  for (size_t* length : {&sequence.num_cached, &sequence.num_computed, &sequence.num_with_kv})
    *length = std::min(*length, num_tokens);
  release_blocks(sequence, (num_tokens + block_size() - 1) / block_size());

  for (BlockExtras& extras : sequence.extras) {
    if (extras.first_offset == block_size() || extras.block_index < num_whole_blocks) continue;
    if (size_t{extras.block_index} * block_size() + extras.first_offset >= num_tokens) {
      extras.payload = extras.scope;  // its items are gone; the salt and the adapter stay
      extras.first_offset = block_size();
    } else {
      // An item that began before the cut has lost its end, so the block is no longer what its
      // extras say.
      sequence.publish_end = std::min<size_t>(sequence.publish_end, extras.block_index);
    }
  }
}

void BlockPool::preempt(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "preempt");
  release_blocks(sequence, 0);
  sequence.num_cached = sequence.num_computed = sequence.num_with_kv = 0;
  sequence.num_counted = 0;
  sequence.is_preempted = true;
}

void BlockPool::close(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  if (sequence.is_closed) throw StateError("close: expected an open sequence, got a closed one");
  sequence.is_closed = true;
  if (sequence.is_in_step) return;  // the step still uses the pages; its end releases them
  release_blocks(sequence, 0);
  sequences_.erase(&sequence);
}

/// Gives back all pages but the first `num_kept` blocks', deepest first.
void BlockPool::release_blocks(Sequence& sequence, size_t num_kept) {
  for (size_t size = sequence.tables[0].size(); size > num_kept; --size) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].unref(sequence.tables[g].back());
      sequence.tables[g].pop_back();
    }
  }
  size_t num_published = std::min(num_kept, sequence.tokens.size() / block_size());
  if (sequence.path.size() > num_published) sequence.path.resize(num_published);
}

std::vector<Digest> BlockPool::block_digests(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  std::vector<Digest>& digests = sequence.digests;
  size_t next_extras = 0;
  for (size_t index = digests.size(); index < sequence.tokens.size() / block_size(); ++index) {
    if (index < sequence.path.size()) {
      digests.push_back(tree_.digest(sequence.path[index]));
      continue;
    }
    std::span<const uint8_t> payload;
    while (next_extras < sequence.extras.size() && sequence.extras[next_extras].block_index < index)
      ++next_extras;
    if (next_extras < sequence.extras.size() && sequence.extras[next_extras].block_index == index) {
      const std::string& bytes = sequence.extras[next_extras].payload;
      payload = {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
    }
    digests.push_back(chain_next(index == 0 ? tree_.digest(kRoot) : digests.back(),
                                 {sequence.tokens.data() + index * block_size(), block_size()},
                                 payload));
  }
  return digests;
}

/// Publishes every block whose tokens are all computed: as the first page of a new node, or as one
/// more of a node that somebody else published meanwhile.
void BlockPool::publish(Sequence& sequence) {
  if (!config_.prefix_caching) return;
  size_t end = std::min(sequence.num_computed / block_size(), sequence.publish_end);
  size_t next_extras = 0;
  for (size_t index = sequence.path.size(); index < end; ++index) {
    NodeId parent = index == 0 ? kRoot : sequence.path.back();
    BlockKey key =
        key_of(tree_.extras(), sequence.tokens, index, block_size(), sequence.extras, next_extras);
    NodeId node = tree_.find(parent, key);
    if (node == kNoNode) {
      if (next_extras < sequence.extras.size() &&
          sequence.extras[next_extras].block_index == index) {
        key.payload = tree_.extras().intern(sequence.extras[next_extras].payload);
        key.scope = tree_.extras().intern(sequence.extras[next_extras].scope);
      }
      node = tree_.insert(parent, key);
    }
    for (size_t g = 0; g < groups_.size(); ++g) groups_[g].attach(sequence.tables[g][index], node);
    sequence.path.push_back(node);
  }
}

// --- pages

void BlockPool::evict_oldest(PageGroup& group) {
  BlockId id = group.oldest_evictable();
  NodeId node = group.node(id);
  group.detach(id);
  for (const PageGroup& other : groups_)
    if (other.first_page(node) != kNoBlock) return;
  if (tree_.has_children(node))
    throw IntegrityError("evict: expected a leaf, got a node with children");
  tree_.remove(node);
}

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
  allocated_.insert(ids.begin(), ids.end());
  return ids;
}

void BlockPool::free(std::span<const int64_t> block_ids) {
  std::lock_guard lock(mutex_);
  std::unordered_set<int64_t> seen;
  for (int64_t id : block_ids) {
    if (id < 0 || id >= static_cast<int64_t>(groups_[0].num_pages()))
      throw UsageError("free: expected block ids from 0 to " +
                       std::to_string(groups_[0].num_pages() - 1) + ", got " + std::to_string(id));
    if (!allocated_.contains(static_cast<BlockId>(id)))
      throw StateError("free: expected blocks held through allocate, got block " +
                       std::to_string(id) + ", which is not");
    if (!seen.insert(id).second)
      throw StateError("free: expected each block once for each reference, got block " +
                       std::to_string(id) + " twice with one reference");
  }
  for (size_t i = block_ids.size(); i > 0; --i) {
    BlockId id = static_cast<BlockId>(block_ids[i - 1]);
    allocated_.erase(id);
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

bool BlockPool::reset() {
  std::lock_guard lock(mutex_);
  for (const PageGroup& group : groups_)
    if (group.num_referenced() > 0) return false;
  for (PageGroup& group : groups_)
    while (group.num_evictable() > 0) evict_oldest(group);
  return true;
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
