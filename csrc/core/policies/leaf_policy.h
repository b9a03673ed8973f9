// What policies share that may not keep the order of releases: they order none but the pages that
// may go, so that whatever they prefer, a block goes after those that follow it.
//
// Unreachable pages go first, then the lowest priority: a block is worth at least as much as those
// that follow it, so the lowest priority of all is among those that may go.

#pragma once

#include <memory>
#include <span>
#include <vector>

#include "page_heaps.h"
#include "pagedkv/eviction.h"

namespace pagedkv {

/// What keeps the pages of a block from being told apart: nothing but times. Ticks are counted in
/// releases, and no clock is read.
class LeafPolicy : public EvictionPolicy {
 public:
  bool needs_leaves() const final { return true; }

  void push(BlockId id, const PageFacts& facts) final {
    last_use_[id] = ++tick_;
    if (facts.may_go) expose(id, facts);
  }
  void remove(BlockId id) final { heaps_.remove(id); }
  void hide(BlockId id) final { heaps_.remove(id); }
  void expose(BlockId id, const PageFacts& facts) final {
    heaps_.remove(id);
    if (facts.is_reachable) {
      place(id, facts);
    } else {
      heaps_.push(kUnreachable, id, {0, last_use_[id]});
    }
  }
  /// Constant time, unless what was retired before is still there.
  void retire_all() final {
    if (changed_ != nullptr) changed_->add_all();
    for (size_t queue = 1; queue <= num_queues_; ++queue)
      heaps_.move_all(queue, num_queues_ + queue);
  }
  BlockId victim() final {
    if (!heaps_.is_empty(kUnreachable)) return heaps_.top(kUnreachable);
    for (size_t queue = 1; queue <= num_queues_; ++queue)
      if (!heaps_.is_empty(num_queues_ + queue)) return heaps_.top(num_queues_ + queue);
    return choose();
  }

 protected:
  using Key = PageHeaps::Key;

  /// `num_queues` heaps, numbered from 1; as many follow for what they held and was retired.
  LeafPolicy(size_t num_pages, size_t num_queues)
      : num_queues_(num_queues), heaps_(num_pages, 1 + 2 * num_queues), last_use_(num_pages) {}

  /// Puts a page that may go into one of the queues.
  virtual void place(BlockId id, const PageFacts& facts) = 0;
  /// The page of the queues to evict next, or kNoBlock.
  virtual BlockId choose() { return heaps_.is_empty(1) ? kNoBlock : heaps_.top(1); }

  /// A key that orders by priority, then by `value`, of which the lowest seven bits are lost.
  static uint64_t ranked(Priority priority, uint64_t value) {
    return uint64_t{priority} << 57 | value >> 7;
  }

  /// A page was told of by nobody and has changed.
  void note(BlockId id) {
    if (changed_ != nullptr) changed_->add(id);
  }

  uint64_t next_tick() { return ++tick_; }
  uint64_t last_use(BlockId id) const { return last_use_[id]; }

  size_t num_pages() const { return last_use_.size(); }

  size_t num_queues_;
  PageHeaps heaps_;

 private:
  template <typename Policy>
  friend class Copied;

  static constexpr size_t kUnreachable = 0;

  ChangedIds* changed_ = nullptr;  // while somebody copies
  uint64_t tick_ = 0;
  std::vector<uint64_t> last_use_;  // [num_pages]
};

/// What a policy that copies `copy_own` of a page, and `copy_own_rest`, needs beyond that.
template <typename Policy>
class Copied : public LeafPolicy {
 public:
  using LeafPolicy::LeafPolicy;
  std::unique_ptr<EvictionPolicy> blank() const final {
    return std::make_unique<Policy>(static_cast<const Policy&>(*this).config());
  }
  void watch(ChangedIds* changed) final { changed_ = changed; }
  void copy_page(const EvictionPolicy& other, BlockId id) final {
    const Policy& from = static_cast<const Policy&>(other);
    heaps_.copy_page(from.heaps_, id);
    last_use_[id] = from.last_use_[id];
    static_cast<Policy&>(*this).copy_own(from, id);
  }
  void copy_rest(const EvictionPolicy& other) final {
    const Policy& from = static_cast<const Policy&>(other);
    tick_ = from.tick_;
    static_cast<Policy&>(*this).copy_own_rest(from);
  }

  PolicyConfig config() const { return {.num_pages = num_pages()}; }
  void copy_own_rest(const Policy&) {}
};

}  // namespace pagedkv
