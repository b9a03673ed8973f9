#include "pagedkv/retention.h"

#include <algorithm>

#include "pagedkv/error.h"

namespace pagedkv {

Retention combine(const Retention& a, const Retention& b) {
  auto side = [](const Retention& r) {
    return (r.priority > kDefaultPriority) - (r.priority < kDefaultPriority);
  };
  if (side(a) != side(b) || side(a) == 0) return a.priority >= b.priority ? a : b;
  return {std::max(a.priority, b.priority), std::max(a.until, b.until), std::max(a.ttl, b.ttl)};
}

std::optional<Retention> claim(std::span<const RetentionRange> ranges, size_t block,
                               Nanoseconds since) {
  std::optional<Retention> all;
  for (const RetentionRange& range : ranges) {
    if (block < range.begin || block >= range.end) continue;
    Retention one{.priority = range.priority};
    if (range.priority != kDefaultPriority && range.ttl > 0) {
      one.until = later(since, range.ttl);
      if (range.refreshes) one.ttl = range.ttl;
    }
    all = all ? combine(*all, one) : one;
  }
  return all;
}

void Retentions::activate() {
  if (is_active()) return;
  ends_.reserve(max_nodes_);
  places_.resize(max_nodes_ + 1, kNotQueued);
  of_node_.resize(max_nodes_ + 1);
}

void Retentions::set(NodeId node, uint32_t depth, const Retention& retention) {
  Nanoseconds before = of_node_[node].until;
  of_node_[node] = retention;
  if (retention.until == before) return;
  leave_queue(node);
  if (retention.until == kForever) return;
  ends_.push_back({});
  sift_up(ends_.size() - 1, {retention.until, depth, node});
}

void Retentions::refresh(NodeId node, uint32_t depth, Nanoseconds now) {
  Retention retention = of_node_[node];
  if (retention.ttl == 0 || retention.until <= now) return;
  retention.until = std::max(retention.until, later(now, retention.ttl));
  set(node, depth, retention);
}

NodeId Retentions::first_due(Nanoseconds now) const {
  return !ends_.empty() && ends_[0].until <= now ? ends_[0].node : kNoNode;
}

void Retentions::put(size_t place, const End& end) {
  ends_[place] = end;
  places_[end.node] = static_cast<uint32_t>(place);
}

void Retentions::sift_up(size_t place, End end) {
  for (; place > 0 && end < ends_[(place - 1) / 2]; place = (place - 1) / 2)
    put(place, ends_[(place - 1) / 2]);
  put(place, end);
}

void Retentions::sift_down(size_t place, End end) {
  for (size_t child; (child = 2 * place + 1) < ends_.size(); place = child) {
    if (child + 1 < ends_.size() && ends_[child + 1] < ends_[child]) ++child;
    if (!(ends_[child] < end)) break;
    put(place, ends_[child]);
  }
  put(place, end);
}

void Retentions::leave_queue(NodeId node) {
  size_t place = places_[node];
  if (place == kNotQueued) return;
  places_[node] = kNotQueued;
  End last = ends_.back();
  ends_.pop_back();
  if (place == ends_.size()) return;
  if (place > 0 && last < ends_[(place - 1) / 2]) {
    sift_up(place, last);
  } else {
    sift_down(place, last);
  }
}

void Retentions::check() const {
  size_t num_with_end = 0;
  for (size_t node = 0; node < of_node_.size(); ++node) {
    num_with_end += of_node_[node].until != kForever;
    if ((places_[node] != kNotQueued) != (of_node_[node].until != kForever))
      throw IntegrityError("retention: expected every node with an end in the queue");
  }
  if (num_with_end != ends_.size()) throw IntegrityError("retention: expected each end once");
  for (size_t place = 0; place < ends_.size(); ++place) {
    const End& end = ends_[place];
    if (places_[end.node] != place || of_node_[end.node].until != end.until ||
        (place > 0 && end < ends_[(place - 1) / 2]))
      throw IntegrityError("retention: expected a heap of ends, got one out of order");
  }
}

}  // namespace pagedkv
