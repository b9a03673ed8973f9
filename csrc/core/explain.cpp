// Why a prompt is not cached.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {
namespace {

/// Entries that are looked at before others get a turn.
constexpr size_t kLook = 4096;

}  // namespace

Explanation BlockPool::explain(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                               bool across_tenants) const {
  using Reason = Explanation::Reason;
  Explanation answer;
  uint64_t fingerprint = 0;  // of the first block that is missing
  uint64_t history_end = 0;
  {
    std::lock_guard lock(mutex_);
    Prompt prompt{tokens, extras, generation_};
    Hit hit = find(prompt);
    size_t index = hit.path.size();
    answer.num_block_tokens = index * block_size();
    answer.num_partial_tokens = hit.run.num_tokens;
    size_t num_cached = answer.num_block_tokens + answer.num_partial_tokens;
    if (num_cached == tokens.size()) return answer.reason = Reason::kHit, answer;
    if (tokens.size() - answer.num_block_tokens < block_size())
      return answer.reason = Reason::kShortTail, answer;

    size_t next_extras = 0;
    NodeId parent = index == 0 ? kRoot : hit.path.back();
    BlockKey key = key_of(prompt, index, next_extras);
    const BlockExtras* own = extras_of(prompt, index, next_extras);
    fingerprint = fingerprint_of(tree_.fingerprint(parent), {key.tokens, block_size()},
                                 own == nullptr ? std::string_view() : own->payload);
    history_end = history_.num_added();

    NodeId there = tree_.nearest(parent, key);
    if (hit.run.node != kNoNode) there = hit.run.node;
    if (there != kNoNode) {
      // With unequal extras the tokens may agree further than what can be shared.
      auto [ours, theirs] =
          std::mismatch(key.tokens, key.tokens + block_size(), tree_.tokens(there));
      answer.reason = Reason::kDiffers;
      if (ours != key.tokens + block_size()) answer.expected_token = *theirs;
    }
    if (generation_ > 0 && find({tokens, extras, generation_ - 1}).path.size() > hit.path.size())
      answer.reason = Reason::kGeneration;
  }
  if (across_tenants && answer.reason != Reason::kGeneration && is_elsewhere({tokens, extras, 0}))
    answer.reason = Reason::kOtherSalt;

  // The newest entry counts.
  for (bool is_done = false; !is_done;) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < kLook && !is_done; ++i) {
      is_done = history_end == 0 || !history_.has(history_end - 1);
      if (is_done) break;
      const EvictionHistory::Entry& entry = history_.entry(--history_end);
      if (entry.fingerprint != fingerprint) continue;
      answer.reason = Reason::kEvicted;
      answer.evicted_at = static_cast<Nanoseconds>(entry.milliseconds) * 1'000'000;
      answer.evicted_by = static_cast<EvictionReason>(entry.reason);
      is_done = true;
    }
  }
  if (answer.reason != Reason::kDiffers) answer.expected_token.reset();
  return answer;
}

/// Whether the first missing block of a prompt is there with other request-wide extras.
bool BlockPool::is_elsewhere(Prompt prompt) const {
  for (size_t first = 0, num_ids = 1; first < num_ids; first += kLook) {
    std::lock_guard lock(mutex_);
    prompt.generation = generation_;
    num_ids = tree_.extras().num_ids();
    Hit hit = find(prompt);  // again for each batch: a node may have gone meanwhile
    size_t index = hit.path.size(), next_extras = 0;
    if ((index + 1) * block_size() > prompt.tokens.size()) return false;
    NodeId parent = index == 0 ? kRoot : hit.path.back();
    BlockKey key = key_of(prompt, index, next_extras);
    if (key.first_offset < block_size()) return false;
    ExtrasId own = key.scope;
    for (size_t id = first; id < std::min(first + kLook, num_ids); ++id) {
      key.payload = key.scope = static_cast<ExtrasId>(id);
      if (key.scope != own && tree_.find(parent, key) != kNoNode) return true;
    }
  }
  return false;
}

}  // namespace pagedkv
