#include "pagedkv/page_rings.h"

#include "pagedkv/error.h"

namespace pagedkv {

PageRings::PageRings(size_t num_pages, size_t num_rings) : num_pages_(num_pages) {
  // Room that is not used costs address space alone, and more rings don't move those of a million
  // pages.
  links_.reserve(2 * num_pages + num_rings);
  links_.resize(num_pages);
  for (size_t ring = 0; ring < num_rings; ++ring) add_ring();
}

void PageRings::add_ring() {
  BlockId id = static_cast<BlockId>(links_.size());
  links_.push_back({.older = id, .younger = id});
}

BlockId PageRings::oldest(size_t ring) const {
  return is_empty(ring) ? kNoBlock : links_[head(ring)].younger;
}

void PageRings::splice(size_t from, size_t to) {
  if (is_empty(from)) return;
  Links& source = links_[head(from)];
  Links& target = links_[head(to)];
  if (changed_ != nullptr) note(source.younger), note(source.older), note(target.older);
  links_[source.younger].older = target.older;
  links_[target.older].younger = source.younger;
  links_[source.older].younger = head(to);
  target.older = source.older;
  source.older = source.younger = head(from);
}

std::vector<BlockId> PageRings::in_order(size_t ring) const {
  std::vector<BlockId> ids;
  BlockId previous = head(ring);
  for (BlockId id = links_[previous].younger; id != head(ring); id = links_[id].younger) {
    if (links_[id].older != previous || ids.size() > num_pages_)
      throw IntegrityError("ring of pages: expected links in both directions, got a broken one");
    ids.push_back(id);
    previous = id;
  }
  return ids;
}

}  // namespace pagedkv
