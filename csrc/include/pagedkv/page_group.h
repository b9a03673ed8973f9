// The pages of one KV group: their references and the nodes they serve.
//
//   FREE -> WRITABLE -> COMMITTED -> EVICTABLE (-> COMMITTED | FREE),  and WRITABLE -> FREE
//
// A state is never stored: it follows from whether somebody references the page and whether a node
// lists it. The order of the evictable pages is the policy's.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
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

inline PageState state_of(uint32_t refs, NodeId node) {
  if (node == kNoNode) return refs == 0 ? PageState::kFree : PageState::kWritable;
  return refs == 0 ? PageState::kEvictable : PageState::kCommitted;
}

/// A point in time as the pages keep it; differences are right up to 49 days.
using Milliseconds = uint32_t;

/// What the pool knows of a page and of its block at one moment.
struct PageCopy {
  NodeId node = kNoNode, parent = kNoNode;
  uint32_t refs = 0, depth = 0, generation = 0;
  TenantId tenant = kNobody;
  bool is_first = false;  // of the node's pages
  Milliseconds last_use = 0;
  Priority priority = kDefaultPriority;           // that was asked for
  Priority eviction_priority = kDefaultPriority;  // that policies are told
  Nanoseconds until = kForever;                   // of the priority
};

class PageGroup {
 public:
  PageGroup(size_t num_pages, size_t max_nodes, std::unique_ptr<EvictionPolicy> policy);
  /// A group as it was copied: what is not there is free.
  PageGroup(std::span<const PageCopy> pages, size_t max_nodes,
            std::unique_ptr<EvictionPolicy> policy);
  PageGroup(PageGroup&&) = default;

  size_t num_pages() const { return pages_.size(); }
  size_t num_free() const { return free_.size(); }
  size_t num_evictable() const { return num_evictable_; }
  size_t num_committed() const { return num_committed_; }
  size_t num_referenced() const { return num_pages() - num_free() - num_evictable(); }

  PageState state(BlockId id) const { return state_of(pages_[id].refs, pages_[id].node); }
  uint32_t refs(BlockId id) const { return pages_[id].refs; }
  NodeId node(BlockId id) const { return pages_[id].node; }
  /// When a published page was published, and when it was last released or touched.
  Milliseconds published(BlockId id) const { return pages_[id].published; }
  Milliseconds last_use(BlockId id) const { return pages_[id].last_use; }

  /// For a loop over many nodes.
  class Reader {
   public:
    explicit Reader(const PageGroup& group) : first_pages_(group.first_pages_.data()) {}
    /// Fetches what first_page(node) reads.
    void fetch_first_page(NodeId node) const { __builtin_prefetch(&first_pages_[node]); }

   private:
    const BlockId* first_pages_;
  };
  Reader reader() const { return Reader(*this); }
  /// Appends the first page of each node, and fetches what ref_path() reads of it.
  void append_first_pages(std::span<const NodeId> path, std::vector<BlockId>& ids) const {
    size_t size = ids.size();
    ids.resize(size + path.size());
    for (size_t i = 0; i < path.size(); ++i) {
      ids[size + i] = first_pages_[path[i]];
      __builtin_prefetch(&pages_[ids[size + i]], 1);
    }
    policy_->fetch({ids.data() + size, path.size()});
  }

  /// Takes a free page, with one reference. There must be one.
  BlockId take();
  /// One reference more. Returns whether the page was evictable.
  bool ref(BlockId id) {
    note(id);
    if (pages_[id].refs++ > 0) return false;
    policy_->remove(id);
    --num_evictable_;
    ++num_committed_;
    return true;
  }
  /// The same for the pages of a path, none twice. Calls `was_evictable` with each that was.
  template <typename F>
  void ref_path(std::span<const BlockId> ids, F&& was_evictable) {
    note(ids);
    for (size_t begin = 0, end; begin < ids.size(); begin = end + 1) {
      for (end = begin; end < ids.size() && pages_[ids[end]].refs++ == 0; ++end)
        was_evictable(ids[end]);
      policy_->remove_path(ids.subspan(begin, end - begin));
      num_evictable_ -= end - begin;
      num_committed_ += end - begin;
    }
  }
  /// One reference less. Returns whether the page is evictable now: published, and it was the last
  /// one. A page that is not published becomes free.
  bool unref(BlockId id, const PageFacts& facts, Milliseconds now) {
    Page& page = pages_[id];
    note(id);
    if (--page.refs > 0) return false;
    if (page.node == kNoNode) {
      free_.push_back(id);
      return false;
    }
    page.last_use = now;
    push(id, facts);
    ++num_evictable_;
    --num_committed_;
    return true;
  }
  /// One reference less for the published pages of a path, from the last to the first. Calls
  /// `is_evictable` with the pages that are now, in pieces. `facts` are those of the first page;
  /// see EvictionPolicy::push_path.
  template <typename F>
  void unref_path(std::span<const BlockId> ids, const PageFacts& facts, Milliseconds now,
                  F&& is_evictable) {
    note(ids);
    for (size_t end = ids.size(); end > 0;) {
      size_t begin = end;
      for (; begin > 0; --begin) {
        Page& page = pages_[ids[begin - 1]];
        if (--page.refs > 0) break;
        page.last_use = now;
      }
      if (begin < end) {
        std::span<const BlockId> piece = ids.subspan(begin, end - begin);
        PageFacts first = facts;
        first.depth += static_cast<uint32_t>(begin);
        if (needs_leaves()) {
          push_each(piece, first);
        } else {
          policy_->push_path(piece, first);
        }
        num_evictable_ += piece.size();
        num_committed_ -= piece.size();
        is_evictable(piece);
      }
      end = begin > 0 ? begin - 1 : 0;
    }
  }
  /// An evictable page has been used, or its facts have changed.
  void push_again(BlockId id, const PageFacts& facts);
  void set_last_use(BlockId id, Milliseconds now) {
    note(id);
    pages_[id].last_use = now;
  }
  /// Nothing can hit what is evictable now.
  void retire_evictable() { policy_->retire_all(); }

  // Below, `facts` gives a node's PageFacts. It is called only where the policy needs leaves.

  /// Publishes a writable page: the node lists it last.
  template <typename F>
  void attach(BlockId id, NodeId node, NodeId parent, Milliseconds now, F&& facts) {
    bool is_first = first_page(node) == kNoBlock;
    attach(id, node, now);
    if (!needs_leaves()) return;
    if (is_first) {
      ++num_children_[parent];
    } else {
      sort_out(node, facts(node));  // one of several may go
    }
  }
  /// Takes an evictable page from its node and frees it.
  template <typename F>
  void detach(BlockId id, NodeId parent, F&& facts) {
    NodeId node = pages_[id].node;
    if (needs_leaves()) policy_->evicted(id);
    detach(id);
    if (!needs_leaves()) return;
    if (first_page(node) != kNoBlock) {
      sort_out(node, facts(node));
    } else if (--num_children_[parent] == 0 && parent != kRoot) {
      sort_out(parent, facts(parent));
    }
  }
  bool needs_leaves() const { return !num_children_.empty(); }

  // What the policy is told besides; only where it needs leaves.

  void tell_found(std::span<const BlockId> path, const RequestFacts& facts) {
    note(path);
    policy_->found(path, facts);
  }
  void tell_stored(std::span<const BlockId> path, size_t first,
                   std::span<const uint64_t> fingerprints, const RequestFacts& facts) {
    note(path);
    policy_->stored(path, first, fingerprints, facts);
  }
  void tell_hint(std::span<const BlockId> path, const ReuseHint& hint) {
    note(path);
    policy_->hinted(path, hint);
  }
  void forget_waiting() { policy_->forget_waiting(); }

  // Copying in slices, as ChangedIds describes it.

  /// Until it is told nullptr, it adds the pages that change.
  void watch(ChangedIds* changed) {
    changed_ = changed;
    policy_->watch(changed);
  }
  const EvictionPolicy& policy() const { return *policy_; }
  /// What the pool knows of the page's node has changed.
  void note_node(NodeId node) {
    BlockId first = changed_ == nullptr ? kNoBlock : first_pages_[node], id = first;
    if (first == kNoBlock) return;
    do {
      changed_->add(id);
      id = pages_[id].next_of_node;
    } while (id != first);
  }

  /// The page of `node` that was published first among those it still has, or kNoBlock.
  BlockId first_page(NodeId node) const { return first_pages_[node]; }
  /// The one published after `id` among the pages of its node, in a ring.
  BlockId next_page(BlockId id) const { return pages_[id].next_of_node; }

  /// The evictable page that goes next, or kNoBlock.
  BlockId victim() { return policy_->victim(); }
  /// Fetches what eviction reads of the pages that probably go after `victim`. Returns the node of
  /// the first of them, or kNoNode.
  NodeId fetch_victims_after(BlockId victim) const {
    BlockId next = policy_->victim_after(victim);
    if (next == kNoBlock) return kNoNode;
    NodeId node = pages_[next].node;
    __builtin_prefetch(&first_pages_[node], 1);
    next = policy_->victim_after(next);
    if (next != kNoBlock) __builtin_prefetch(&pages_[next], 1);
    return node;
  }

  // For the audit; each throws IntegrityError when a list is broken.
  std::vector<BlockId> pages_of(NodeId node) const;
  const std::vector<BlockId>& free_pages() const { return free_; }

  void check_num_evictable(size_t num_listed) const;

 private:
  void attach(BlockId id, NodeId node, Milliseconds now);
  void detach(BlockId id);

  void note(BlockId id) {
    if (changed_ != nullptr) [[unlikely]]
      changed_->add(id);
  }
  void note(std::span<const BlockId> ids) {
    if (changed_ == nullptr) [[likely]]
      return;
    for (BlockId id : ids) {
      if (id != kNoBlock) changed_->add(id);
    }
  }

  /// Whether its block would still have a page, or nothing follows it.
  bool may_go(BlockId id) const {
    return num_children_[pages_[id].node] == 0 || pages_[id].next_of_node != id;
  }
  void push(BlockId id, PageFacts facts) {
    if (needs_leaves()) facts.may_go = may_go(id);
    policy_->push(id, facts);
  }
  void push_each(std::span<const BlockId> ids, PageFacts first);
  void sort_out(NodeId node, PageFacts facts);

  struct Page {
    uint32_t refs = 0;
    NodeId node = kNoNode;
    BlockId previous_of_node = kNoBlock, next_of_node = kNoBlock;  // ring of the node's pages
    Milliseconds published = 0, last_use = 0;
  };

  std::vector<Page> pages_;             // [num_pages]
  std::vector<BlockId> free_;           // a stack: the page used last is the warmest
  std::vector<BlockId> first_pages_;    // [max_nodes + 1], by node
  std::vector<uint32_t> num_children_;  // [max_nodes + 1], by node: of those with a page here.
                                        // Empty unless the policy needs leaves
  std::unique_ptr<EvictionPolicy> policy_;
  size_t num_evictable_ = 0, num_committed_ = 0;
  ChangedIds* changed_ = nullptr;  // while somebody copies
};

}  // namespace pagedkv
