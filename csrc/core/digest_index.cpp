#include "pagedkv/digest_index.h"

#include <utility>

#include "little_endian.h"

namespace pagedkv {

DigestIndex::DigestIndex(const std::vector<Digest>& digests, size_t max_nodes)
    : digests_(digests), slots_(max_nodes + max_nodes / 2 + 2, kNoNode) {}

/// Where the search for a digest begins.
size_t DigestIndex::home(const Digest& digest) const {
  unsigned __int128 scaled =
      static_cast<unsigned __int128>(load_le<uint64_t>(digest.data())) * slots_.size();
  return static_cast<size_t>(scaled >> 64);
}

bool DigestIndex::contains(NodeId node) const {
  for (size_t slot = home(digests_[node]); slots_[slot] != kNoNode; slot = next(slot))
    if (slots_[slot] == node) return true;
  return false;
}

bool DigestIndex::add(NodeId node) {
  bool is_shared = false;
  size_t slot = home(digests_[node]);
  for (; slots_[slot] != kNoNode; slot = next(slot))
    is_shared = is_shared || digests_[slots_[slot]] == digests_[node];
  slots_[slot] = node;
  return is_shared;
}

void DigestIndex::remove(NodeId node) {
  size_t hole = home(digests_[node]);
  while (slots_[hole] != node) hole = next(hole);
  // Move back whatever would not be found any more behind the hole.
  for (size_t slot = next(hole); slots_[slot] != kNoNode; slot = next(slot)) {
    size_t wanted = home(digests_[slots_[slot]]);
    bool stays = hole < slot ? hole < wanted && wanted <= slot : hole < wanted || wanted <= slot;
    if (stays) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole] = kNoNode;
}

NodeId DigestIndex::find(const Digest& digest) const {
  NodeId found = kNoNode;
  for (size_t slot = home(digest); slots_[slot] != kNoNode; slot = next(slot)) {
    if (digests_[slots_[slot]] != digest) continue;
    if (found != kNoNode) return kNoNode;
    found = slots_[slot];
  }
  return found;
}

}  // namespace pagedkv
