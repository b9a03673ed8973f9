#include "pagedkv/page_group.h"

#include <string>
#include <utility>

#include "pagedkv/error.h"

namespace pagedkv {

PageGroup::PageGroup(size_t num_pages, size_t max_nodes, std::unique_ptr<EvictionPolicy> policy)
    : pages_(num_pages), first_pages_(max_nodes + 1, kNoBlock), policy_(std::move(policy)) {
  if (policy_->needs_leaves()) num_children_.resize(max_nodes + 1);
  free_.reserve(num_pages);
  for (size_t id = num_pages; id > 0; --id) free_.push_back(static_cast<BlockId>(id - 1));
}

PageGroup::PageGroup(std::span<const PageCopy> pages, size_t max_nodes,
                     std::unique_ptr<EvictionPolicy> policy)
    : pages_(pages.size()), first_pages_(max_nodes + 1, kNoBlock), policy_(std::move(policy)) {
  if (policy_->needs_leaves()) num_children_.resize(max_nodes + 1);
  free_.reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageCopy& page = pages[i];
    BlockId id = static_cast<BlockId>(i);
    pages_[id].refs = page.refs;
    if (page.node == kNoNode) continue;
    if (needs_leaves() && first_page(page.node) == kNoBlock) ++num_children_[page.parent];
    attach(id, page.node, 0);
    num_committed_ -= page.refs == 0;
    num_evictable_ += page.refs == 0;
  }
}

BlockId PageGroup::take() {
  BlockId id = free_.back();
  free_.pop_back();
  note(id);
  pages_[id].refs = 1;
  return id;
}

void PageGroup::push_again(BlockId id, const PageFacts& facts) {
  note(id);
  policy_->remove(id);
  push(id, facts);
}

/// Pushes the pages of a path, of which `first` are the facts of the first, from the last on.
void PageGroup::push_each(std::span<const BlockId> ids, PageFacts first) {
  first.depth += static_cast<uint32_t>(ids.size());
  for (size_t i = ids.size(); i > 0; --i) {
    --first.depth;
    push(ids[i - 1], first);
  }
}

/// Tells the policy which of the node's evictable pages may go.
void PageGroup::sort_out(NodeId node, PageFacts facts) {
  BlockId first = first_pages_[node], id = first;
  if (first == kNoBlock) return;
  do {
    note(id);
    facts.may_go = may_go(id);
    if (pages_[id].refs == 0 && facts.may_go) policy_->expose(id, facts);
    if (pages_[id].refs == 0 && !facts.may_go) policy_->hide(id);
    id = pages_[id].next_of_node;
  } while (id != first);
}

void PageGroup::attach(BlockId id, NodeId node, Milliseconds now) {
  Page& page = pages_[id];
  note(id);
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
  note(id);
  policy_->remove(id);
  --num_evictable_;
  Page& page = pages_[id];
  BlockId next = page.next_of_node;
  note(next);  // it may be the first one now
  pages_[next].previous_of_node = page.previous_of_node;
  pages_[page.previous_of_node].next_of_node = next;
  if (first_pages_[page.node] == id) first_pages_[page.node] = next == id ? kNoBlock : next;
  page = Page{};
  free_.push_back(id);
}

void PageGroup::check_num_evictable(size_t num_listed) const {
  if (num_listed != num_evictable_)
    throw IntegrityError("eviction policy: expected " + std::to_string(num_evictable_) +
                         " pages, got " + std::to_string(num_listed));
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
