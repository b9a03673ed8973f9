// Pages in rings, each in the order in which they were pushed. A page is in one ring or in none;
// everything takes constant time.

#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "pagedkv/changed_ids.h"
#include "pagedkv/types.h"

namespace pagedkv {

class PageRings {
 public:
  PageRings(size_t num_pages, size_t num_rings);

  bool is_empty(size_t ring) const { return links_[head(ring)].younger == head(ring); }
  bool contains(BlockId id) const { return links_[id].younger != kNoBlock; }
  /// The page that was pushed longest ago, or kNoBlock.
  BlockId oldest(size_t ring) const;
  /// The one pushed next after `id` into the same ring, or kNoBlock.
  BlockId younger(BlockId id) const {
    BlockId next = links_[id].younger;
    return next < head(0) ? next : kNoBlock;
  }

  /// The one pushed just before `id` into the same ring, or kNoBlock.
  BlockId older(BlockId id) const {
    BlockId next = links_[id].older;
    return next < head(0) ? next : kNoBlock;
  }

  /// The page that was pushed last, or kNoBlock.
  BlockId youngest(size_t ring) const {
    return is_empty(ring) ? kNoBlock : links_[head(ring)].older;
  }
  /// Puts a page that is in no ring into one, just before `younger`, or kNoBlock: as its youngest.
  void insert(size_t ring, BlockId id, BlockId younger) {
    BlockId next = younger == kNoBlock ? head(ring) : younger;
    links_[id] = {.older = links_[next].older, .younger = next};
    note_around(id);
    links_[links_[id].older].younger = id;
    links_[next].older = id;
  }

  void fetch(BlockId id) const { __builtin_prefetch(&links_[id], 1); }
  /// Makes a page that is in no ring the youngest of one.
  void push(size_t ring, BlockId id) {
    Links& ends = links_[head(ring)];
    links_[id] = {.older = ends.older, .younger = head(ring)};
    note_around(id);
    links_[ends.older].younger = id;
    ends.older = id;
  }
  /// Takes a page out. Returns the ring that it leaves empty, or kNone.
  size_t remove(BlockId id) {
    Links& links = links_[id];
    note_around(id);
    links_[links.older].younger = links.younger;
    links_[links.younger].older = links.older;
    size_t emptied = links.older == links.younger ? links.older - num_pages_ : kNone;
    links = {};
    return emptied;
  }
  // The same for the pages of a path, in the order of the path.

  /// Pushes them from the last to the first.
  void push_path(size_t ring, std::span<const BlockId> ids) {
    Links& ends = links_[head(ring)];
    BlockId older = ends.older;
    if (changed_ != nullptr) note(older), note(ids);
    for (size_t i = ids.size(); i > 0; --i) {
      links_[older].younger = ids[i - 1];
      links_[ids[i - 1]].older = older;
      older = ids[i - 1];
    }
    links_[older].younger = head(ring);
    ends.older = older;
  }
  /// Calls `emptied` with each ring left empty. What was pushed as a path is taken out in one
  /// piece, unless something was taken out of its middle or pushed again since.
  template <typename F>
  void remove_path(std::span<const BlockId> ids, F&& emptied) {
    if (changed_ != nullptr) note(ids);
    for (size_t i = 0; i < ids.size();) {
      BlockId younger = links_[ids[i]].younger, older;
      do {
        older = links_[ids[i]].older;
        links_[ids[i]] = {};
      } while (++i < ids.size() && ids[i] == older);
      if (changed_ != nullptr) note(younger), note(older);
      links_[younger].older = older;
      links_[older].younger = younger;
      if (younger == older) emptied(static_cast<size_t>(older) - num_pages_);
    }
  }
  /// Moves all pages of `from` to the young end of `to`, in their order.
  void splice(size_t from, size_t to);
  size_t num_rings() const { return links_.size() - num_pages_; }
  /// One more ring, which is empty.
  void add_ring();

  /// All pages of a ring, oldest first. Throws IntegrityError when a link is broken.
  std::vector<BlockId> in_order(size_t ring) const;

  static constexpr size_t kNone = SIZE_MAX;

  // Copying in slices; see EvictionPolicy.

  void watch(ChangedIds* changed) { changed_ = changed; }
  void copy_page(const PageRings& from, BlockId id) { links_[id] = from.links_[id]; }
  /// `from` has as many rings.
  void copy_heads(const PageRings& from) {
    std::copy(from.links_.begin() + num_pages_, from.links_.end(), links_.begin() + num_pages_);
  }

 private:
  struct Links {
    BlockId older = kNoBlock, younger = kNoBlock;
  };

  BlockId head(size_t ring) const { return static_cast<BlockId>(num_pages_ + ring); }

  // Notes pages of which copy_page() copies something else from now on.
  void note(BlockId id) {
    if (id < head(0)) changed_->add(id);
  }
  void note(std::span<const BlockId> ids) {
    for (BlockId id : ids) changed_->add(id);
  }
  void note_around(BlockId id) {
    if (changed_ == nullptr) [[likely]]
      return;
    note(id);
    note(links_[id].older);
    note(links_[id].younger);
  }

  size_t num_pages_;
  ChangedIds* changed_ = nullptr;  // while somebody copies
  std::vector<Links> links_;       // [num_pages + num_rings]: the last ones head the rings
};

}  // namespace pagedkv
