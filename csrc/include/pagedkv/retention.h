// What is to be kept for longer, and until when. Soft: it orders eviction and forbids nothing.

#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pagedkv/clock.h"
#include "pagedkv/types.h"

namespace pagedkv {

/// How much a block is worth keeping.
struct Retention {
  Priority priority = kDefaultPriority;
  Nanoseconds until = kForever;  // from then on the priority is the default again
  Nanoseconds ttl = 0;           // > 0: whoever hits the block moves the end to so much later

  bool operator==(const Retention&) const = default;
};

/// What two claims on one block come to. On the same side of the default priority the higher
/// priority and the later end hold; else the claim of the higher priority does.
Retention combine(const Retention& a, const Retention& b);

/// A request's claim on a range of its blocks.
struct RetentionRange {
  size_t begin, end;  // blocks [begin, end)
  Priority priority;
  Nanoseconds ttl;  // 0: for good
  bool refreshes;   // a later hit begins the time anew
};

/// What a request claims for one block; nullopt when none of the ranges covers it.
std::optional<Retention> claim(std::span<const RetentionRange> ranges, size_t block,
                               Nanoseconds since);

/// The retention of every node, and the order in which it ends. Takes no memory before the first
/// claim.
///
/// A parent never has a lower priority, an earlier end or a shorter TTL than a child above the
/// default priority: the pool raises both.
class Retentions {
 public:
  explicit Retentions(size_t max_nodes) : max_nodes_(max_nodes) {}

  bool is_active() const { return !of_node_.empty(); }
  /// Takes the memory; whatever follows can't fail.
  void activate();
  /// Takes the memory of `room`, unless it has its own or `room` has none.
  void activate(Retentions&& room) {
    if (!is_active() && room.is_active()) *this = std::move(room);
  }

  const Retention& of(NodeId node) const { return is_active() ? of_node_[node] : kNone; }
  Priority priority(NodeId node) const { return of(node).priority; }
  /// Must be active.
  void set(NodeId node, uint32_t depth, const Retention& retention);
  /// Moves the end of a node that was hit, unless it has passed.
  void refresh(NodeId node, uint32_t depth, Nanoseconds now);

  /// A node whose end has come, or kNoNode: the earliest end first, then the deepest node.
  NodeId first_due(Nanoseconds now) const;

  /// Throws IntegrityError unless the order of ends holds and lists exactly the nodes that have
  /// one.
  void check() const;

 private:
  struct End {
    Nanoseconds until;
    uint32_t depth;
    NodeId node;
    bool operator<(const End& other) const {
      return until != other.until ? until < other.until : depth > other.depth;
    }
  };

  void sift_up(size_t place, End end);
  void sift_down(size_t place, End end);
  void put(size_t place, const End& end);
  void leave_queue(NodeId node);

  static constexpr Retention kNone{};
  static constexpr uint32_t kNotQueued = UINT32_MAX;

  size_t max_nodes_;
  std::vector<Retention> of_node_;  // [max_nodes + 1] once active
  std::vector<End> ends_;           // a binary heap
  std::vector<uint32_t> places_;    // [max_nodes + 1]: where in the heap a node is
};

}  // namespace pagedkv
