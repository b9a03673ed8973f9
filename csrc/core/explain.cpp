// Why a prompt is not cached.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {
namespace {

/// Entries of the history, and walks, that are made before others get a turn.
constexpr size_t kLook = 4096;
constexpr size_t kWalks = 64;

}  // namespace

Explanation BlockPool::explain(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                               bool across_tenants) const {
  using Reason = Explanation::Reason;
  Explanation answer;
  uint64_t fingerprint = 0;  // of the first block that is missing
  uint64_t history_end = 0;
  {
    std::lock_guard lock(mutex_);
    Hit hit = find_known({tokens, extras, generation_});
    size_t num_known = hit.path.size() * block_size() + hit.run.num_tokens;
    if (has_windows()) limit(hit);
    size_t index = hit.path.size();
    answer.num_block_tokens = index * block_size();
    answer.num_partial_tokens = hit.run.num_tokens;
    size_t num_cached = answer.num_block_tokens + answer.num_partial_tokens;
    if (num_cached == tokens.size()) return answer.reason = Reason::kHit, answer;
    if (tokens.size() - answer.num_block_tokens < block_size())
      return answer.reason = Reason::kShortTail, answer;

    if (num_cached < num_known) return answer.reason = Reason::kWindow, answer;

    std::optional<uint32_t> generation = generation_;
    while ((generation = tree_.generation_before(*generation)))
      if (find_known({tokens, extras, *generation}).path.size() > index)
        return answer.reason = Reason::kGeneration, answer;

    Prompt prompt{tokens, extras, generation_};
    size_t next_extras = 0;
    NodeId parent = index == 0 ? kRoot : hit.path.back();
    BlockKey key = key_of(prompt, index, next_extras);
    const BlockExtras* own = extras_of(prompt, index, next_extras);
    fingerprint = fingerprint_of(tree_.fingerprint(parent), {key.tokens, block_size()},
                                 own == nullptr ? std::string_view() : own->payload);
    history_end = history_.num_added();

    NodeId there = hit.run.node != kNoNode ? hit.run.node : tree_.nearest(parent, key);
    if (there != kNoNode) {
      // Where the tokens agree, what differs is an item that goes with them.
      answer.reason = Reason::kDiffers;
      Token expected = tree_.tokens(there)[hit.run.num_tokens];
      if (expected != key.tokens[hit.run.num_tokens]) answer.expected_token = expected;
    }
  }
  // The newest entry of the block counts.
  for (bool is_done = false; !is_done; mutex_.let_others_go_first()) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < kLook; ++i) {
      is_done = history_end == 0 || !history_.has(history_end - 1);
      if (is_done) break;
      const EvictionHistory::Entry& entry = history_.entry(--history_end);
      if (entry.fingerprint != fingerprint) continue;
      answer.reason = Reason::kEvicted;
      answer.expected_token.reset();
      answer.evicted_at = static_cast<Nanoseconds>(entry.milliseconds) * 1'000'000;
      answer.evicted_by = static_cast<EvictionReason>(entry.reason);
      return answer;
    }
  }
  if (across_tenants && is_elsewhere(tokens, extras, answer.num_block_tokens / block_size())) {
    answer.reason = Reason::kOtherSalt;
    answer.expected_token.reset();
  }
  return answer;
}

/// Whether more blocks of a prompt are there with other request-wide extras.
bool BlockPool::is_elsewhere(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                             size_t num_cached_blocks) const {
  std::vector<BlockExtras> others(extras.begin(), extras.end());
  if (others.empty() || others[0].block_index != 0)
    others.insert(others.begin(),
                  {.block_index = 0, .payload = {}, .scope = {}, .first_offset = block_size()});
  // Another salt may enter where the prompt has something request-wide, and where the blocks that
  // are shared end.
  auto missing = std::lower_bound(
      others.begin(), others.end(), num_cached_blocks,
      [](const BlockExtras& block, size_t index) { return block.block_index < index; });
  if (missing == others.end() || missing->block_index != num_cached_blocks)
    others.insert(missing, {.block_index = static_cast<uint32_t>(num_cached_blocks),
                            .payload = {},
                            .scope = {},
                            .first_offset = block_size()});
  for (BlockExtras& block : others) {
    if (block.block_index > 0 && block.block_index != num_cached_blocks && block.scope.empty())
      continue;
    BlockExtras own = block;
    for (size_t first = 0, num_ids = 1; first < num_ids; first += kWalks) {
      mutex_.let_others_go_first();
      std::lock_guard lock(mutex_);  // anew for each batch, so that it stops nobody for long
      num_ids = tree_.extras().num_ids();
      for (size_t id = first; id < std::min(first + kWalks, num_ids); ++id) {
        if (!tree_.extras().is_live(static_cast<ExtrasId>(id))) continue;
        block.scope = tree_.extras().bytes(static_cast<ExtrasId>(id));
        block.payload = with_scope(own, block.scope);
        if (find({tokens, others, generation_}).path.size() > num_cached_blocks) return true;
      }
    }
    block = own;
  }
  return false;
}

}  // namespace pagedkv
