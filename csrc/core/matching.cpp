// What the index holds of a prompt.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// The key of block `index`, with the ids that the table knows for its extras. `next` walks along
/// `prompt.extras`.
BlockKey BlockPool::key_of(const Prompt& prompt, size_t index, size_t& next) const {
  size_t begin = index * block_size();
  size_t num_tokens = std::min<size_t>(block_size(), prompt.tokens.size() - begin);
  BlockKey key{.tokens = prompt.tokens.data() + begin,
               .num_tokens = static_cast<uint32_t>(num_tokens),
               .payload = kNoExtras,
               .scope = kNoExtras,
               .first_offset = block_size(),
               .generation = prompt.generation};
  if (const BlockExtras* extras = extras_of(prompt, index, next)) {
    key.payload = extras->is_torn ? kUnknownExtras : tree_.extras().find(extras->payload);
    key.scope = tree_.extras().find(extras->scope);
    key.first_offset = extras->first_offset;
  }
  return key;
}

const BlockExtras* BlockPool::extras_of(const Prompt& prompt, size_t index, size_t& next) {
  while (next < prompt.extras.size() && prompt.extras[next].block_index < index) ++next;
  bool is_there = next < prompt.extras.size() && prompt.extras[next].block_index == index;
  return is_there ? &prompt.extras[next] : nullptr;
}

BlockPool::Hit BlockPool::find(const Prompt& prompt) const {
  Hit hit;
  if (!config_.prefix_caching) return hit;
  NodeId parent = kRoot;
  size_t next_extras = 0;
  hit.path.reserve(prompt.tokens.size() / block_size());
  for (size_t index = 0; index * block_size() < prompt.tokens.size(); ++index) {
    BlockKey key = key_of(prompt, index, next_extras);
    NodeId node = key.num_tokens == block_size() ? tree_.find(parent, key) : kNoNode;
    if (node == kNoNode) {
      if (config_.token_granular) hit.run = tree_.longest_run(parent, key);
      break;
    }
    if (NodeId ahead = tree_.fetch_ahead(node); ahead != kNoNode)
      groups_[0].fetch_first_page(ahead);
    hit.path.push_back(node);
    parent = node;
  }
  return hit;
}

/// find() under the cap of `open`: the last token is always computed, for its logits. A full hit
/// keeps its pages.
BlockPool::Hit BlockPool::find_for(const Sequence& sequence) const {
  Hit hit = find({sequence.tokens, sequence.extras, generation_});
  size_t num_block_tokens = hit.path.size() * block_size();
  if (hit.run.num_tokens > 0 && num_block_tokens + hit.run.num_tokens == sequence.tokens.size())
    --hit.run.num_tokens;
  return hit;
}

Match BlockPool::match(std::span<const Token> tokens, std::span<const BlockExtras> extras) const {
  std::lock_guard lock(mutex_);
  Hit hit = find({tokens, extras, generation_});
  Match match;
  match.num_block_tokens = hit.path.size() * block_size();
  match.num_partial_tokens = hit.run.num_tokens;
  for (NodeId node : hit.path) match.block_ids.push_back(groups_[0].first_page(node));
  if (hit.run.num_tokens > 0) match.partial_block_id = groups_[0].first_page(hit.run.node);
  return match;
}

size_t BlockPool::match_length(std::span<const Token> tokens,
                               std::span<const BlockExtras> extras) const {
  std::lock_guard lock(mutex_);
  Hit hit = find({tokens, extras, generation_});
  return hit.path.size() * block_size() + hit.run.num_tokens;
}

size_t BlockPool::touch(std::span<const Token> tokens, std::span<const BlockExtras> extras) {
  auto call = begin();
  Hit hit = find({tokens, extras, generation_});
  touch_path(hit.path);
  return hit.path.size() * block_size();
}

}  // namespace pagedkv
