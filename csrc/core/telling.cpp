// What the pool tells policies of its requests.

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
      groups_[g].policy().found({sequence.tables[g].data(), sequence.path.size()},
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
    groups_[g].policy().stored({sequence.tables[g].data(), size}, first, fingerprints,
                               facts_of(sequence, g));
  }
}

}  // namespace pagedkv
