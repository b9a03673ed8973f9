// What watchers of the index are told. Events tell of what a prompt can hit, so blocks of an older
// generation are no news.
//
// Whoever takes them too late is told anew: from nothing, all that is there. Until then nothing is
// noted, and while it is told, slice by slice, changes are noted for what has been told already.

#include <algorithm>
#include <utility>

#include "pagedkv/block_pool.h"

namespace pagedkv {

namespace {

constexpr int kFreedAtOnce = 4;  // events that nobody took

}  // namespace

/// Twice as many as a full index has are told faster anew.
size_t BlockPool::most_noted() const { return std::max(config_.events_kept, 2 * tree_.capacity()); }

/// Whether a change of `num_blocks` is to be noted; counted in any case. What is too much is
/// dropped with all that was noted before it.
bool BlockPool::makes_room_for_note(size_t num_blocks) {
  if (telling_ != Telling::kLate) {
    num_noted_ += num_blocks;
    if (num_noted_ <= most_noted()) return true;
    num_dropped_notes_ += std::exchange(num_noted_, 0);
    dropped_events_ = std::make_unique<std::deque<Event>>(std::exchange(events_, {}));
    is_told_ = {};
    telling_ = Telling::kLate;
    return false;
  }
  num_dropped_notes_ += num_blocks;
  if (!dropped_events_) return false;
  for (int i = 0; i < kFreedAtOnce && !dropped_events_->empty(); ++i) dropped_events_->pop_back();
  return false;
}

/// `nodes` lie on one path, from the root on; those between them were there before.
void BlockPool::note_stored(std::span<const NodeId> nodes) {
  if (!config_.events || !is_reachable(nodes.front())) return;
  if (telling_ == Telling::kAnew) {
    for (size_t i = 0; i < nodes.size() && telling_ == Telling::kAnew; ++i)
      tell_anew(nodes[i], SIZE_MAX);
    return;
  }
  if (makes_room_for_note(nodes.size())) add_stored(nodes);
}

void BlockPool::add_stored(std::span<const NodeId> nodes) {
  tree_.digest(nodes.back());  // with those of all before it, in one go
  for (size_t i = 0; i < nodes.size(); ++i) {
    NodeId node = nodes[i], parent = tree_.parent(node);
    bool continues = !events_.empty() && events_.back().kind == Event::Kind::kStored &&
                     parent != kRoot && tree_.digest(parent) == events_.back().digests.back();
    if (!continues) {
      events_.push_back({.kind = Event::Kind::kStored, .has_parent = parent != kRoot});
      Event& event = events_.back();
      if (parent != kRoot) event.parent = tree_.digest(parent);
      event.digests.reserve(nodes.size() - i);
      event.tokens.reserve((nodes.size() - i) * block_size());
      event.payloads.reserve(nodes.size() - i);
    }
    Event& event = events_.back();
    event.digests.push_back(tree_.digest(node));
    const Token* tokens = tree_.tokens(node);
    event.tokens.insert(event.tokens.end(), tokens, tokens + block_size());
    event.payloads.emplace_back(tree_.extras().bytes(tree_.key(node).payload));
  }
}

void BlockPool::note_removed(NodeId node) {
  if (!config_.events) return;
  bool is_known = telling_ != Telling::kAnew || is_told_[node];
  if (telling_ == Telling::kAnew) is_told_[node] = false;  // another block may get the number
  if (!is_known || !is_reachable(node) || !makes_room_for_note(1)) return;
  if (events_.empty() || events_.back().kind != Event::Kind::kRemoved)
    events_.push_back({.kind = Event::Kind::kRemoved});
  events_.back().digests.push_back(tree_.digest(node));
}

void BlockPool::note_cleared() {
  if (config_.events && makes_room_for_note(1)) events_.push_back({.kind = Event::Kind::kCleared});
}

/// Tells of a block after those before it, as far as that is not done: of `most` blocks, the first
/// of them. Returns how many that were; when there was no room, none is told.
size_t BlockPool::tell_anew(NodeId node, size_t most) {
  std::vector<NodeId> path;
  // Where all groups have windows, those before it may be gone.
  for (; node != kRoot && !is_told_[node]; node = num_full_ > 0 ? tree_.parent(node) : kRoot)
    path.push_back(node);
  std::ranges::reverse(path);
  path.resize(std::min(path.size(), most));
  if (path.empty() || !makes_room_for_note(path.size())) return path.size();
  for (NodeId told : path) is_told_[told] = true;
  add_stored(path);
  return path.size();
}

/// Tells of some more of what is there.
void BlockPool::tell_more() {
  if (telling_ == Telling::kLate) {
    telling_ = Telling::kAnew;
    is_told_.assign(tree_.capacity() + 1, false);
    next_to_tell_ = kRoot + 1;
    events_.push_back({.kind = Event::Kind::kCleared});
  }
  for (size_t num_left = kBatch; num_left > 0 && telling_ == Telling::kAnew;) {
    if (next_to_tell_ > tree_.capacity()) {
      telling_ = Telling::kAll;
      is_told_ = {};
      return;
    }
    NodeId node = next_to_tell_;
    bool can_be_hit =
        tree_.parent(node) != kNoNode && is_reachable(node) && has_page(node) && !is_told_[node];
    size_t num_told = can_be_hit ? tell_anew(node, num_left) : 0;
    if (telling_ != Telling::kAnew) return;
    if (!can_be_hit || is_told_[node]) ++next_to_tell_;
    num_left -= std::max<size_t>(num_told, 1);
  }
}

std::deque<Event> BlockPool::take_events() {
  std::unique_ptr<std::deque<Event>> dropped;  // freed without the lock
  for (;; mutex_.let_others_go_first()) {
    std::lock_guard lock(mutex_);  // anew for each slice, so that it stops nobody for long
    if (dropped_events_) dropped = std::move(dropped_events_);
    if (telling_ != Telling::kAll) tell_more();
    if (telling_ != Telling::kAll) continue;
    num_noted_ = 0;
    return std::exchange(events_, {});
  }
}

}  // namespace pagedkv
