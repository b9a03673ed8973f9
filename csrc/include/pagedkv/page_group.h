// The pages of one KV group: their references and the nodes they serve.
//
//   FREE -> WRITABLE -> COMMITTED -> EVICTABLE (-> COMMITTED | FREE),  and WRITABLE -> FREE
//
// A state is never stored: it follows from whether somebody references the page and whether a node
// lists it. The order of the evictable pages is the policy's.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "pagedkv/eviction.h"
#include "pagedkv/types.h"

namespace pagedkv {

enum class PageState : uint8_t {
  kFree,       // holds nothing; on the free stack
  kWritable,   // referenced, not published: its owner may write it
  kCommitted,  // referenced and published: read only
  kEvictable,  // published, unreferenced: on the eviction list
};

/// A point in time as the pages keep it; differences are right up to 49 days.
using Milliseconds = uint32_t;

class PageGroup {
 public:
  PageGroup(size_t num_pages, size_t max_nodes, std::unique_ptr<EvictionPolicy> policy);

  size_t num_pages() const { return pages_.size(); }
  size_t num_free() const { return free_.size(); }
  size_t num_evictable() const { return num_evictable_; }
  size_t num_committed() const { return num_committed_; }
  size_t num_referenced() const { return num_pages() - num_free() - num_evictable(); }

  PageState state(BlockId id) const;
  uint32_t refs(BlockId id) const { return pages_[id].refs; }
  NodeId node(BlockId id) const { return pages_[id].node; }
  /// When a published page was published, and when it was last released or touched.
  Milliseconds published(BlockId id) const { return pages_[id].published; }
  Milliseconds last_use(BlockId id) const { return pages_[id].last_use; }

  /// Fetches what first_page(node) reads, and what ref(id) does.
  void fetch_first_page(NodeId node) const { __builtin_prefetch(&first_pages_[node]); }
  void fetch(BlockId id) const {
    __builtin_prefetch(&pages_[id], 1);
    policy_->fetch(id);
  }

  /// Takes a free page, with one reference. There must be one.
  BlockId take();
  /// One reference more. Returns whether the page was evictable.
  bool ref(BlockId id) {
    if (pages_[id].refs++ > 0) return false;
    policy_->remove(id);
    --num_evictable_;
    ++num_committed_;
    return true;
  }
  /// One reference less. Returns whether the page is evictable now: published, and it was the last
  /// one. A page that is not published becomes free.
  bool unref(BlockId id, const PageFacts& facts, Milliseconds now) {
    Page& page = pages_[id];
    if (--page.refs > 0) return false;
    if (page.node == kNoNode) {
      free_.push_back(id);
      return false;
    }
    page.last_use = now;
    policy_->push(id, facts);
    ++num_evictable_;
    --num_committed_;
    return true;
  }
  /// An evictable page has been used, or its facts have changed.
  void push_again(BlockId id, const PageFacts& facts);
  void set_last_use(BlockId id, Milliseconds now) { pages_[id].last_use = now; }
  /// Nothing can hit what is evictable now.
  void retire_evictable() { policy_->retire_all(); }

  /// Publishes a writable page: the node lists it last.
  void attach(BlockId id, NodeId node, Milliseconds now);
  /// Takes an evictable page from its node and frees it.
  void detach(BlockId id);

  /// The page of `node` that was published first among those it still has, or kNoBlock.
  BlockId first_page(NodeId node) const { return first_pages_[node]; }
  /// The one published after `id` among the pages of its node, in a ring.
  BlockId next_page(BlockId id) const { return pages_[id].next_of_node; }

  /// The evictable page that goes next, or kNoBlock.
  BlockId victim() const { return policy_->victim(); }

  // For the audit; each throws IntegrityError when a list is broken.
  std::vector<BlockId> evictable_in_order() const;
  std::vector<BlockId> pages_of(NodeId node) const;
  const std::vector<BlockId>& free_pages() const { return free_; }

 private:
  struct Page {
    uint32_t refs = 0;
    NodeId node = kNoNode;
    BlockId previous_of_node = kNoBlock, next_of_node = kNoBlock;  // ring of the node's pages
    Milliseconds published = 0, last_use = 0;
  };

  std::vector<Page> pages_;           // [num_pages]
  std::vector<BlockId> free_;         // a stack: the page used last is the warmest
  std::vector<BlockId> first_pages_;  // [max_nodes + 1], by node
  std::unique_ptr<EvictionPolicy> policy_;
  size_t num_evictable_ = 0, num_committed_ = 0;
};

}  // namespace pagedkv
