// Requests. Matching, publication, pages, steps and the audit have files of their own.

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

}  // namespace

BlockPool::BlockPool(PoolConfig config)
    : config_(std::move(config)),
      tree_(config_.block_size, total(config_.num_blocks),
            chain_root(config_.block_size, config_.digest_namespace)) {
  groups_.reserve(config_.num_blocks.size());
  for (size_t num_blocks : config_.num_blocks) groups_.emplace_back(num_blocks, tree_.capacity());
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
  sequence.generation = generation_;
  sequence.num_with_kv = hit.path.size() * block_size() + hit.run.num_tokens;
  sequence.num_cached = sequence.num_computed =
      std::min(sequence.num_with_kv, sequence.tokens.size() - 1);
}

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

void BlockPool::append(std::span<Sequence* const> sequences,
                       std::span<const std::vector<Token>> tokens) {
  std::lock_guard lock(mutex_);
  for (const Sequence* sequence : sequences) check_usable(*sequence, "append");
  for (size_t i = 0; i < sequences.size(); ++i)
    sequences[i]->tokens.insert(sequences[i]->tokens.end(), tokens[i].begin(), tokens[i].end());
}

void BlockPool::append_each(std::span<Sequence* const> sequences, std::span<const Token> tokens) {
  std::lock_guard lock(mutex_);
  for (const Sequence* sequence : sequences) check_usable(*sequence, "append");
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i]->tokens.push_back(tokens[i]);
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

  // A range that must not be published ends with its first token.
  if (num_tokens <= sequence.publish_end) sequence.publish_end = SIZE_MAX;
  for (BlockExtras& extras : sequence.extras) {
    if (extras.first_offset == block_size() || extras.block_index < num_whole_blocks) continue;
    size_t block_begin = size_t{extras.block_index} * block_size();
    if (block_begin + extras.first_offset >= num_tokens) {
      extras.payload = extras.scope;  // its items are gone; the salt and the adapter stay
      extras.first_offset = block_size();
    } else {
      // An item that began before the cut has lost its end, so the block is no longer what its
      // extras say.
      sequence.publish_end = std::min(sequence.publish_end, block_begin);
    }
  }
}

void BlockPool::stop_publishing(Sequence& sequence, size_t position) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "no_cache");
  if (position / block_size() < sequence.path.size())
    throw StateError("no_cache: expected a position from the " +
                     std::to_string(sequence.path.size() * block_size()) +
                     " published tokens on, got " + std::to_string(position));
  sequence.publish_end = std::min(sequence.publish_end, position);
}

std::shared_ptr<Sequence> BlockPool::fork(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "fork");
  auto child = std::make_shared<Sequence>(sequence);
  child->num_counted = 0;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (BlockId id : child->tables[g]) groups_[g].ref(id);
  sequences_.insert(child.get());
  return child;
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
      unref(groups_[g], sequence.tables[g].back());
      sequence.tables[g].pop_back();
    }
  }
  size_t num_published = std::min(num_kept, sequence.tokens.size() / block_size());
  if (sequence.path.size() > num_published) sequence.path.resize(num_published);
}

std::vector<Digest> BlockPool::block_digests(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  std::vector<Digest>& digests = sequence.digests;
  Prompt prompt{sequence.tokens, sequence.extras, sequence.generation};
  size_t next_extras = 0;
  for (size_t index = digests.size(); index < sequence.tokens.size() / block_size(); ++index) {
    if (index < sequence.path.size()) {
      digests.push_back(tree_.digest(sequence.path[index]));
      continue;
    }
    std::span<const uint8_t> payload;
    if (const BlockExtras* extras = extras_of(prompt, index, next_extras))
      payload = {reinterpret_cast<const uint8_t*>(extras->payload.data()), extras->payload.size()};
    digests.push_back(chain_next(index == 0 ? tree_.digest(kRoot) : digests.back(),
                                 prompt.tokens.subspan(index * block_size(), block_size()),
                                 payload));
  }
  return digests;
}

}  // namespace pagedkv
