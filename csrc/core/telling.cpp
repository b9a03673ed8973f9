// What the pool tells policies of its requests.

#include "pagedkv/block_pool.h"

namespace pagedkv {

RequestFacts BlockPool::facts_of(const Sequence& sequence) const {
  return {.number = sequence.number,
          .now = now_,
          .num_blocks = static_cast<uint32_t>(sequence.num_prompt / block_size()),
          .num_hit = static_cast<uint32_t>(sequence.num_hit_with_kv / block_size()),
          .tenant = sequence.path.empty() ? kNobody : tree_.tenant(sequence.path.back())};
}

/// A request was opened.
void BlockPool::tell_found(const Sequence& sequence) {
  for (size_t g = 0; g < groups_.size(); ++g)
    if (groups_[g].needs_leaves())
      groups_[g].policy().found({sequence.tables[g].data(), sequence.path.size()},
                                facts_of(sequence));
}

/// A request has published its block `index`.
void BlockPool::tell_stored(const Sequence& sequence, size_t index) {
  for (size_t g = 0; g < groups_.size(); ++g)
    if (groups_[g].needs_leaves())
      groups_[g].policy().stored(sequence.tables[g][index], tree_.fingerprint(sequence.path[index]),
                                 static_cast<uint32_t>(index), facts_of(sequence));
}

}  // namespace pagedkv
