// The pages of one KV group: their references, the nodes they serve, and the order of eviction.
//
//   FREE -> WRITABLE -> COMMITTED -> EVICTABLE (-> COMMITTED | FREE),  and WRITABLE -> FREE
//
// A state is never stored: it follows from whether somebody references the page and whether a node
// lists it.

#pragma once

#include <cstddef>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

enum class PageState : uint8_t {
  kFree,       // holds nothing; on the free stack
  kWritable,   // referenced, not published: its owner may write it
  kCommitted,  // referenced and published: read only
  kEvictable,  // published, unreferenced: on the eviction list
};

class PageGroup {
 public:
  PageGroup(size_t num_pages, size_t max_nodes);

  size_t num_pages() const { return pages_.size(); }
  size_t num_free() const { return free_.size(); }
  size_t num_evictable() const { return num_evictable_; }
  size_t num_committed() const { return num_committed_; }
  size_t num_referenced() const { return num_pages() - num_free() - num_evictable(); }

  PageState state(BlockId id) const;
  uint32_t refs(BlockId id) const { return pages_[id].refs; }
  NodeId node(BlockId id) const { return pages_[id].node; }

  /// Takes a free page, with one reference. There must be one.
  BlockId take();
  /// One reference more; an evictable page leaves the eviction list.
  void ref(BlockId id);
  /// One reference less; the last one makes a published page the youngest to evict, any other page
  /// free.
  void unref(BlockId id);

  /// Publishes a writable page: the node lists it last.
  void attach(BlockId id, NodeId node);
  /// Takes an evictable page from its node and frees it.
  void detach(BlockId id);

  /// The page of `node` that was published first among those it still has, or kNoBlock.
  BlockId first_page(NodeId node) const { return first_pages_[node]; }

  /// The evictable page that was released longest ago, or kNoBlock. Since a path is released
  /// deepest first and its ancestors are referenced for as long as it is, no page stands before one
  /// of its descendants.
  BlockId oldest_evictable() const { return oldest_; }

  // For the audit; each throws IntegrityError when a list is broken.
  std::vector<BlockId> evictable_in_order() const;
  std::vector<BlockId> pages_of(NodeId node) const;
  const std::vector<BlockId>& free_pages() const { return free_; }

 private:
  struct Page {
    uint32_t refs = 0;
    NodeId node = kNoNode;
    BlockId older = kNoBlock, younger = kNoBlock;                  // eviction list
    BlockId previous_of_node = kNoBlock, next_of_node = kNoBlock;  // ring of the node's pages
  };

  std::vector<Page> pages_;
  std::vector<BlockId> free_;         // a stack: the page used last is the warmest
  std::vector<BlockId> first_pages_;  // [max_nodes + 1], by node
  BlockId oldest_ = kNoBlock, youngest_ = kNoBlock;
  size_t num_evictable_ = 0, num_committed_ = 0;

  void push_youngest(BlockId id);
  void unlink(BlockId id);
};

}  // namespace pagedkv
