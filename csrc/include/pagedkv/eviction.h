// Which page goes next.
//
// A policy keeps the evictable pages of one group in an order of its choice. It is told of a page
// when the page becomes evictable, is used again or changes its priority, and when it is evictable
// no longer; it never learns of tokens. One that asks for it is also told what requests find and
// publish.

#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "pagedkv/changed_ids.h"
#include "pagedkv/clock.h"
#include "pagedkv/types.h"

namespace pagedkv {

/// What a policy is told of a page.
struct PageFacts {
  bool is_reachable;   // false: no prompt can hit it any more
  Priority priority;   // 0 to 100
  uint32_t depth;      // the index of its block in its prompt
  uint32_t now;        // milliseconds; differences are right up to 49 days
  bool may_go = true;  // false: it is the last page of a block that others follow. Only where
                       // EvictionPolicy::needs_leaves()
};

/// What the engine knows of blocks, beyond what it did with them.
struct ReuseHint {
  uint32_t now;
  // Milliseconds in which they are expected to be used again; 0: a request that waits needs them.
  uint32_t within;
};

/// What a policy notes on a request between two calls; the pool keeps it and forgets it with the
/// request.
struct RequestNote {
  uint32_t turn = 0;
  uint32_t gap = 0;  // milliseconds from the turn before
  uint32_t num_known = 0;
  bool is_branch = false;
  bool is_counted = false;
  uint32_t expected_within = 0;  // milliseconds, of what it holds and publishes; 0: not told
};

/// What a policy is told of a request that finds or publishes blocks.
struct RequestFacts {
  uint64_t number;      // of requests up to this one
  uint32_t now;         // milliseconds, as above
  uint32_t num_blocks;  // whole ones of its prompt; what it publishes beyond was decoded
  uint32_t num_hit;     // of these, found when it was opened
  RequestNote* note;    // the policy's own
};

/// The pool pushes a path deepest first, and whatever it pushes again it pushes with all ancestors
/// of the same priority behind it. A policy that keeps this order among pages of one priority, and
/// evicts lower priorities first, never has to name a block before its descendants. Any other one
/// needs leaves: it names none but those that may go, and is told when that changes.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Copying in slices, as ChangedIds describes it. What order pages go in is all that matters: what
  // the policy has learnt for later needs no copy.

  /// A policy of the same kind for as many pages, without any. Reads nothing that changes.
  virtual std::unique_ptr<EvictionPolicy> blank() const = 0;
  /// Until it is told nullptr, it adds the pages of which copy_page() would copy something else,
  /// besides those that it is told of.
  virtual void watch(ChangedIds* changed) = 0;
  /// Takes over what `from`, of the same kind, knows of a page.
  virtual void copy_page(const EvictionPolicy& from, BlockId id) = 0;
  /// The same for what is of no page; called last, and takes a short time.
  virtual void copy_rest(const EvictionPolicy& from) = 0;

  /// The page is evictable from now on.
  virtual void push(BlockId id, const PageFacts& facts) = 0;
  /// It is not any more: somebody references it, or it is evicted.
  virtual void remove(BlockId id) = 0;
  /// Nothing can hit any of the pages any more.
  virtual void retire_all() = 0;

  // The same for pages of blocks that follow each other in a prompt: by default one by one.

  /// Pushes them from the last to the first. `facts` are those of the first; the others differ from
  /// it in depth alone, by one each.
  virtual void push_path(std::span<const BlockId> ids, PageFacts facts) {
    facts.depth += static_cast<uint32_t>(ids.size());
    for (size_t i = ids.size(); i > 0; --i) {
      --facts.depth;
      push(ids[i - 1], facts);
    }
  }
  /// Removes them, in any order.
  virtual void remove_path(std::span<const BlockId> ids) {
    for (BlockId id : ids) remove(id);
  }

  /// The pages will be pushed or removed soon: a policy may fetch what that reads.
  virtual void fetch(std::span<const BlockId>) const {}
  /// A guess which page is the victim after `victim`, so that it can be fetched, or kNoBlock.
  virtual BlockId victim_after(BlockId /*victim*/) const { return kNoBlock; }

  /// The page to evict next, or kNoBlock when there is none. Asked again, with nothing told in
  /// between, it is the same.
  virtual BlockId victim() = 0;
  /// All pages, the next victim first. Only where the policy needs no leaves; for the audit and for
  /// page maps.
  virtual std::vector<BlockId> in_order() const { return {}; }

  /// Whether the policy depends on PageFacts::may_go and on what follows.
  virtual bool needs_leaves() const { return false; }
  /// An evictable page may go from now on, or may not any more.
  virtual void expose(BlockId, const PageFacts&) {}
  virtual void hide(BlockId) {}
  /// A request was opened and has found a path.
  virtual void found(std::span<const BlockId>, const RequestFacts&) {}
  /// A request has published the pages of its path from the block `first` on. `fingerprints` are
  /// theirs.
  virtual void stored(std::span<const BlockId> /*path*/, size_t /*first*/,
                      std::span<const uint64_t> /*fingerprints*/, const RequestFacts&) {}
  /// The engine says when pages, evictable or not, will be used; until they are.
  virtual void hinted(std::span<const BlockId>, const ReuseHint&) {}
  /// No request waits any more.
  virtual void forget_waiting() {}
  /// The page is evicted; it is removed next.
  virtual void evicted(BlockId) {}
};

/// What a policy is made for.
struct PolicyConfig {
  size_t num_pages;
  uint32_t block_size = 16;
  // How far into a prompt attention to what is before a token costs as much as all other work on
  // it; 0: all blocks cost the same; none: what the policy thinks best.
  std::optional<uint32_t> equal_cost_tokens = std::nullopt;
};

using MakePolicy = std::unique_ptr<EvictionPolicy> (*)(const PolicyConfig& config);

/// Unreachable pages first, then the lowest priority, then what was pushed longest ago. All in
/// constant time.
std::unique_ptr<EvictionPolicy> make_lru_policy(const PolicyConfig& config);

/// A policy by its name.
struct NamedPolicy {
  std::string_view name;
  MakePolicy make;
};

/// All there are, the default one first.
std::span<const NamedPolicy> policies();

}  // namespace pagedkv
