// What the index holds of a prompt.

#include <algorithm>
#include <array>
#include <optional>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// The key of block `index`, or of what there is of it, as if it had no extras.
BlockKey BlockPool::plain_key_of(const Prompt& prompt, size_t index) const {
  size_t begin = index * block_size();
  size_t num_tokens = std::min<size_t>(block_size(), prompt.tokens.size() - begin);
  return {.tokens = prompt.tokens.data() + begin,
          .num_tokens = static_cast<uint32_t>(num_tokens),
          .payload = kNoExtras,
          .scope = kNoExtras,
          .first_offset = block_size(),
          .generation = prompt.generation};
}

/// Adds to a key the ids that the table knows for the extras.
void BlockPool::look_up(const BlockExtras& extras, BlockKey& key) const {
  key.scope = tree_.extras().find(extras.scope);
  key.payload = extras.is_scope() ? key.scope : tree_.extras().find(extras.payload);
  if (extras.is_torn) key.payload = kUnknownExtras;
  key.first_offset = extras.first_offset;
}

/// The key of block `index`. `next` walks along `prompt.extras`.
BlockKey BlockPool::key_of(const Prompt& prompt, size_t index, size_t& next) const {
  BlockKey key = plain_key_of(prompt, index);
  if (const BlockExtras* extras = extras_of(prompt, index, next)) look_up(*extras, key);
  return key;
}

/// Where the extras of the blocks from `index` on begin.
size_t BlockPool::first_extras(const Prompt& prompt, size_t index) {
  auto first = std::ranges::lower_bound(prompt.extras, index, {}, &BlockExtras::block_index);
  return first - prompt.extras.begin();
}

const BlockExtras* BlockPool::extras_of(const Prompt& prompt, size_t index, size_t& next) {
  while (next < prompt.extras.size() && prompt.extras[next].block_index < index) ++next;
  bool is_there = next < prompt.extras.size() && prompt.extras[next].block_index == index;
  return is_there ? &prompt.extras[next] : nullptr;
}

/// Walks down the tree along a prompt and calls `visit` with each node.
///
/// A node hints at the one kHintDistance below it that the last walk came to. Hints are guesses:
/// mostly right, and known so early that no node has to wait for the one before it.
template <typename Visit>
BlockPool::Walk BlockPool::walk(const Prompt& prompt, Visit&& visit) const {
  if (!config_.prefix_caching) return {};
  constexpr uint32_t kUsual = PrefixTree::kUsualBlockSize;
  return block_size() == kUsual ? walk_by(tree_.reader<kUsual>(), prompt, visit)
                                : walk_by(tree_.reader<0>(), prompt, visit);
}

template <typename Reader, typename Visit>
BlockPool::Walk BlockPool::walk_by(const Reader& tree, const Prompt& prompt, Visit&& visit) const {
  constexpr size_t kDistance = PrefixTree::kHintDistance;
  const PageGroup::Reader pages = groups_[0].reader();
  const size_t size = tree.block_size(), num_whole_blocks = prompt.tokens.size() / size;
  std::array<NodeId, kDistance> guesses;
  guesses.fill(kNoNode);
  NodeId parent = kRoot;
  const Token* tokens = prompt.tokens.data();
  auto extras = prompt.extras.begin();
  size_t index = 0, next_extras = 0, num_right = 0;
  std::optional<BlockKey> missed;  // the key of block `index`, where it was looked for in vain
  const auto guessed = [&] {
    NodeId guess = guesses[index % kDistance];
    return guess == kNoNode ? tree.some_child(parent) : guess;
  };
  const auto step = [&](NodeId node) {
    visit(node);
    NodeId& guess = guesses[index % kDistance];
    num_right += guess == node;
    guess = tree.fetch_ahead(node);
    if (guess != kNoNode) pages.fetch_first_page(guess);
    parent = node;
    ++index;
    tokens += size;
  };
  while (index < num_whole_blocks) {
    // Most steps are of this kind, so nothing else is in their loop.
    size_t end = num_whole_blocks;
    if (extras != prompt.extras.end()) end = std::min<size_t>(end, extras->block_index);
    for (NodeId node; index < end && (node = guessed()) != kNoNode; step(node))
      if (!tree.is_plain_child(node, parent, tokens, prompt.generation)) break;
    if (index == num_whole_blocks) break;

    const BlockExtras* own = nullptr;
    if (extras != prompt.extras.end() && extras->block_index == index) own = &*extras++;
    NodeId node = guessed();
    if (node == kNoNode || !tree.is_child(node, parent, tokens, own, prompt.generation)) {
      missed = key_of(prompt, index, next_extras);
      node = tree_.find(parent, *missed);
      if (node == kNoNode) break;
      missed.reset();
    }
    step(node);
  }
  Walk walk;
  walk.hints_hold = num_right + std::min(index, kDistance) == index;
  if (config_.token_granular && index * size < prompt.tokens.size())
    walk.run = tree_.longest_run(parent, missed ? *missed : key_of(prompt, index, next_extras));
  return walk;
}

/// What the tree knows of a prompt, whether its pages can be used or not.
BlockPool::Hit BlockPool::find_known(const Prompt& prompt) const {
  Hit hit;
  hit.path.resize(config_.prefix_caching ? prompt.tokens.size() / block_size() : 0);
  NodeId* end = hit.path.data();
  static_cast<Walk&>(hit) = walk(prompt, [&](NodeId node) { *end++ = node; });
  hit.path.resize(end - hit.path.data());
  size_t num_before_last = prompt.tokens.size() - std::min<size_t>(prompt.tokens.size(), 1);
  hit.next_position = std::min(hit.path.size() * block_size(), num_before_last);
  return hit;
}

BlockPool::Hit BlockPool::find(const Prompt& prompt) const {
  Hit hit = find_known(prompt);
  if (has_windows()) limit(hit);
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
  match.block_ids.resize(first_seen(0, hit.next_position), kNoBlock);
  for (size_t i = match.block_ids.size(); i < hit.path.size(); ++i)
    match.block_ids.push_back(groups_[0].first_page(hit.path[i]));
  if (hit.run.num_tokens > 0) match.partial_block_id = groups_[0].first_page(hit.run.node);
  return match;
}

size_t BlockPool::match_length(std::span<const Token> tokens,
                               std::span<const BlockExtras> extras) const {
  mutex_.let_others_go_first();  // one of many prompts
  std::lock_guard lock(mutex_);
  if (has_windows()) {
    Hit hit = find({tokens, extras, generation_});
    return hit.path.size() * block_size() + hit.run.num_tokens;
  }
  size_t num_blocks = 0;
  Walk found = walk({tokens, extras, generation_}, [&](NodeId) { ++num_blocks; });
  return num_blocks * block_size() + found.run.num_tokens;
}

size_t BlockPool::touch(std::span<const Token> tokens, std::span<const BlockExtras> extras) {
  auto call = begin();
  Hit hit = find({tokens, extras, generation_});
  touch_path(hit);
  return hit.path.size() * block_size();
}

}  // namespace pagedkv
