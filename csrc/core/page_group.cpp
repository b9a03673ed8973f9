#include "pagedkv/page_group.h"

#include <string>
#include <utility>

#include "pagedkv/error.h"

namespace pagedkv {

PageGroup::PageGroup(size_t num_pages, size_t max_nodes, std::unique_ptr<EvictionPolicy> policy)
    : pages_(num_pages), first_pages_(max_nodes + 1, kNoBlock), policy_(std::move(policy)) {
  free_.reserve(num_pages);
  for (size_t id = num_pages; id > 0; --id) free_.push_back(static_cast<BlockId>(id - 1));
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

void PageGroup::push_again(BlockId id, const PageFacts& facts) {
  policy_->remove(id);
  policy_->push(id, facts);
}

void PageGroup::attach(BlockId id, NodeId node, Milliseconds now) {
  Page& page = pages_[id];
  page.node = node;
  page.published = now;
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
  policy_->remove(id);
  --num_evictable_;
  Page& page = pages_[id];
  BlockId next = page.next_of_node;
  pages_[next].previous_of_node = page.previous_of_node;
  pages_[page.previous_of_node].next_of_node = next;
  if (first_pages_[page.node] == id) first_pages_[page.node] = next == id ? kNoBlock : next;
  page = Page{};
  free_.push_back(id);
}

std::vector<BlockId> PageGroup::evictable_in_order() const {
  std::vector<BlockId> ids = policy_->in_order();
  if (ids.size() != num_evictable_)
    throw IntegrityError("eviction policy: expected " + std::to_string(num_evictable_) +
                         " pages, got " + std::to_string(ids.size()));
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
