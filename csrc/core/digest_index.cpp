#include "pagedkv/digest_index.h"

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

void DigestIndex::add(NodeId node) {
  size_t slot = home(digests_[node]);
  while (slots_[slot] != kNoNode) slot = next(slot);
  slots_[slot] = node;
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

}  // namespace pagedkv
