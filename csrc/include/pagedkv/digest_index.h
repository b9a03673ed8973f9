// From a digest to the block that it names, for routers, tiers and other processes.

#pragma once

#include <cstddef>
#include <vector>

#include "pagedkv/sha256.h"
#include "pagedkv/types.h"

namespace pagedkv {

/// A table of nodes by digest, with open addressing and linear probing. The digests themselves stay
/// with the tree.
class DigestIndex {
 public:
  /// @param digests  [max_nodes + 1], by node; outlives the index
  DigestIndex(const std::vector<Digest>& digests, size_t max_nodes);

  void add(NodeId node);
  void remove(NodeId node);

  /// The node that `digest` names among those that `is_meant`; kNoNode when there is none, or when
  /// there are several, since a digest alone can't tell them apart.
  template <typename F>
  NodeId find(const Digest& digest, F&& is_meant) const {
    NodeId found = kNoNode;
    for (size_t slot = home(digest); slots_[slot] != kNoNode; slot = next(slot)) {
      if (digests_[slots_[slot]] != digest || !is_meant(slots_[slot])) continue;
      if (found != kNoNode) return kNoNode;
      found = slots_[slot];
    }
    return found;
  }

 private:
  size_t home(const Digest& digest) const;
  size_t next(size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }

  const std::vector<Digest>& digests_;
  std::vector<NodeId> slots_;
};

}  // namespace pagedkv
