// Pages in rings, each in the order in which they were pushed. A page is in one ring or in none;
// everything takes constant time.

#pragma once

#include <cstddef>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

class PageRings {
 public:
  PageRings(size_t num_pages, size_t num_rings);

  bool is_empty(size_t ring) const { return links_[head(ring)].younger == head(ring); }
  bool contains(BlockId id) const { return links_[id].younger != kNoBlock; }
  /// The page that was pushed longest ago, or kNoBlock.
  BlockId oldest(size_t ring) const;

  void fetch(BlockId id) const { __builtin_prefetch(&links_[id], 1); }
  /// Makes a page that is in no ring the youngest of one.
  void push(size_t ring, BlockId id) {
    Links& ends = links_[head(ring)];
    links_[id] = {.older = ends.older, .younger = head(ring)};
    links_[ends.older].younger = id;
    ends.older = id;
  }
  /// Takes a page out. Returns the ring that it leaves empty, or kNone.
  size_t remove(BlockId id) {
    Links& links = links_[id];
    links_[links.older].younger = links.younger;
    links_[links.younger].older = links.older;
    size_t emptied = links.older == links.younger ? links.older - num_pages_ : kNone;
    links = {};
    return emptied;
  }
  /// Moves all pages of `from` to the young end of `to`, in their order.
  void splice(size_t from, size_t to);
  /// One more ring, which is empty.
  void add_ring();

  /// All pages of a ring, oldest first. Throws IntegrityError when a link is broken.
  std::vector<BlockId> in_order(size_t ring) const;

  static constexpr size_t kNone = SIZE_MAX;

 private:
  struct Links {
    BlockId older = kNoBlock, younger = kNoBlock;
  };

  BlockId head(size_t ring) const { return static_cast<BlockId>(num_pages_ + ring); }

  size_t num_pages_;
  std::vector<Links> links_;  // [num_pages + num_rings]: the last ones head the rings
};

}  // namespace pagedkv
