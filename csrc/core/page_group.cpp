#include "pagedkv/page_group.h"

#include "pagedkv/error.h"

namespace pagedkv {

PageGroup::PageGroup(size_t num_pages, size_t max_nodes)
    : num_pages_(num_pages), pages_(num_pages + 2), first_pages_(max_nodes + 1, kNoBlock) {
  free_.reserve(num_pages);
  for (size_t id = num_pages; id > 0; --id) free_.push_back(static_cast<BlockId>(id - 1));
  for (BlockId list : {unreachable(), reachable()})
    pages_[list].older = pages_[list].younger = list;
}

PageState PageGroup::state(BlockId id) const {
  const Page& page = pages_[id];
  if (page.node == kNoNode) return page.refs == 0 ? PageState::kFree : PageState::kWritable;
  return page.refs == 0 ? PageState::kEvictable : PageState::kCommitted;
}

BlockId PageGroup::take() {
  BlockId id = free_.back();
  free_.pop_back();
  pages_[id].refs = 1;
  return id;
}

void PageGroup::ref(BlockId id) {
  if (pages_[id].refs++ > 0) return;
  unlink(id);
  --num_evictable_;
  ++num_committed_;
}

void PageGroup::unref(BlockId id) { release(id, reachable()); }

void PageGroup::unref_unreachable(BlockId id) { release(id, unreachable()); }

void PageGroup::release(BlockId id, BlockId list) {
  if (--pages_[id].refs > 0) return;
  if (pages_[id].node == kNoNode) {
    free_.push_back(id);
    return;
  }
  link_youngest(id, list);
  ++num_evictable_;
  --num_committed_;
}

void PageGroup::touch(BlockId id) {
  if (pages_[id].refs > 0) return;
  unlink(id);
  link_youngest(id, reachable());
}

void PageGroup::retire_evictable() {
  Page& from = pages_[reachable()];
  Page& to = pages_[unreachable()];
  if (from.younger == reachable()) return;
  pages_[from.younger].older = to.older;
  pages_[to.older].younger = from.younger;
  pages_[from.older].younger = unreachable();
  to.older = from.older;
  from.older = from.younger = reachable();
}

BlockId PageGroup::oldest_evictable() const {
  for (BlockId list : {unreachable(), reachable()})
    if (pages_[list].younger != list) return pages_[list].younger;
  return kNoBlock;
}

void PageGroup::attach(BlockId id, NodeId node) {
  Page& page = pages_[id];
  page.node = node;
  ++num_committed_;
  BlockId first = first_pages_[node];
  if (first == kNoBlock) {
    first_pages_[node] = page.previous_of_node = page.next_of_node = id;
    return;
  }
  page.next_of_node = first;
  page.previous_of_node = pages_[first].previous_of_node;
  pages_[page.previous_of_node].next_of_node = id;
  pages_[first].previous_of_node = id;
}

void PageGroup::detach(BlockId id) {
  unlink(id);
  --num_evictable_;
  Page& page = pages_[id];
  BlockId next = page.next_of_node;
  pages_[next].previous_of_node = page.previous_of_node;
  pages_[page.previous_of_node].next_of_node = next;
  if (first_pages_[page.node] == id) first_pages_[page.node] = next == id ? kNoBlock : next;
  page = Page{};
  free_.push_back(id);
}

void PageGroup::link_youngest(BlockId id, BlockId list) {
  BlockId youngest = pages_[list].older;
  pages_[id].older = youngest;
  pages_[id].younger = list;
  pages_[youngest].younger = id;
  pages_[list].older = id;
}

void PageGroup::unlink(BlockId id) {
  Page& page = pages_[id];
  pages_[page.older].younger = page.younger;
  pages_[page.younger].older = page.older;
  page.older = page.younger = kNoBlock;
}

std::vector<BlockId> PageGroup::evictable_in_order() const {
  std::vector<BlockId> ids;
  for (BlockId list : {unreachable(), reachable()}) {
    BlockId previous = list;
    for (BlockId id = pages_[list].younger; id != list; previous = id, id = pages_[id].younger) {
      ids.push_back(id);
      if (pages_[id].older != previous || ids.size() > num_evictable_)
        throw IntegrityError("eviction list: broken link");
    }
  }
  if (ids.size() != num_evictable_) throw IntegrityError("eviction list: wrong length");
  return ids;
}

std::vector<BlockId> PageGroup::pages_of(NodeId node) const {
  std::vector<BlockId> ids;
  BlockId first = first_pages_[node];
  if (first == kNoBlock) return ids;
  BlockId id = first;
  do {
    ids.push_back(id);
    BlockId next = pages_[id].next_of_node;
    if (pages_[id].node != node || pages_[next].previous_of_node != id ||
        ids.size() > pages_.size())
      throw IntegrityError("pages of a node: broken link");
    id = next;
  } while (id != first);
  return ids;
}

}  // namespace pagedkv
