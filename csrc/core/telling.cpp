// What the pool tells policies of its requests, and what the engine knows of them.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {

RequestFacts BlockPool::facts_of(Sequence& sequence, size_t g) const {
  return {.number = sequence.number,
          .now = now_ms_,
          .num_blocks = static_cast<uint32_t>(sequence.num_prompt / block_size()),
          .num_hit = static_cast<uint32_t>(sequence.num_hit_with_kv / block_size()),
          .note = &sequence.notes[g]};
}

/// A request was opened.
void BlockPool::tell_found(Sequence& sequence) {
  for (size_t g = 0; g < groups_.size(); ++g)
    if (groups_[g].needs_leaves())
      groups_[g].tell_found({sequence.tables[g].data(), sequence.path.size()},
                            facts_of(sequence, g));
}

/// A request has published the blocks from `first` on.
void BlockPool::tell_stored(Sequence& sequence, size_t first) {
  size_t size = sequence.path.size();
  std::vector<uint64_t> fingerprints;
  for (size_t g = 0; g < groups_.size() && first < size; ++g) {
    if (!groups_[g].needs_leaves()) continue;
    fingerprints.clear();
    for (size_t i = first; i < size; ++i)
      fingerprints.push_back(tree_.fingerprint(sequence.path[i]));
    groups_[g].tell_stored({sequence.tables[g].data(), size}, first, fingerprints,
                           facts_of(sequence, g));
  }
}

/// Whoever opened the sequence will come back within a time.
void BlockPool::expect_reuse(Sequence& sequence, Nanoseconds within) {
  auto call = begin();
  check_usable(sequence, "expect_reuse");
  sequence.is_last_turn = false;
  constexpr Nanoseconds kMost = UINT32_MAX / 2;
  auto milliseconds = static_cast<uint32_t>(std::clamp<Nanoseconds>(within / 1'000'000, 1, kMost));
  for (size_t g = 0; g < groups_.size(); ++g) {
    sequence.notes[g].expected_within = milliseconds;
    std::span<const BlockId> held{sequence.tables[g].data(), sequence.path.size()};
    if (groups_[g].needs_leaves())
      groups_[g].tell_hint(held, {.now = now_ms_, .within = milliseconds});
  }
}

/// Nobody will come back: once the sequence is closed, what it alone has used goes first.
void BlockPool::last_turn(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "last_turn");
  sequence.is_last_turn = true;
  for (RequestNote& note : sequence.notes) note.expected_within = 0;
}

/// Marks the end of a path that nothing else branches off, nobody else holds and nobody retains.
void BlockPool::mark_last_turn(const Sequence& sequence) {
  for (size_t index = sequence.path.size(); index > 0; --index) {
    NodeId node = sequence.path[index - 1];
    bool has_others = index == sequence.path.size() ? tree_.has_children(node)
                                                    : !tree_.has_one_child_at_most(node);
    if (has_others || retentions_.priority(node) != kDefaultPriority) return;
    for (size_t g = 0; g < groups_.size(); ++g) {
      BlockId own = sequence.tables[g][index - 1], first = groups_[g].first_page(node), id = first;
      if (first == kNoBlock) continue;
      do {
        // Another page of it may stand behind others already, and the block goes with its last one.
        if (groups_[g].refs(id) > (id == own) || (is_full(g) && id != own)) return;
        id = groups_[g].next_page(id);
      } while (id != first);
    }
    tree_.set_goes_first(node, true);
    note_changed(node);
  }
}

void BlockPool::forget_waiting() {
  std::lock_guard lock(mutex_);
  for (PageGroup& group : groups_)
    if (group.needs_leaves()) group.forget_waiting();
}

/// A request with this prompt waits. Counts what is cached of it as used now.
size_t BlockPool::await(std::span<const Token> tokens, std::span<const BlockExtras> extras) {
  mutex_.let_others_go_first();  // one of many prompts
  auto call = begin();
  Hit hit = find({tokens, extras, generation_});
  touch_path(hit);
  for (PageGroup& group : groups_) {
    if (!group.needs_leaves()) continue;
    std::vector<BlockId> ids;
    group.append_first_pages(hit.path, ids);
    group.tell_hint(ids, {.now = now_ms_, .within = 0});
  }
  return hit.path.size() * block_size();
}

}  // namespace pagedkv
