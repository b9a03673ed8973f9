#include "pagedkv/eviction.h"

#include <array>
#include <bit>

#include "pagedkv/page_rings.h"

namespace pagedkv {
namespace {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(size_t num_pages) : num_pages_(num_pages), rings_(num_pages, kNumRings) {}

  std::unique_ptr<EvictionPolicy> blank() const override {
    return std::make_unique<LruPolicy>(num_pages_);
  }
  void watch(ChangedIds* changed) override { rings_.watch(changed); }
  void copy_page(const EvictionPolicy& from, BlockId id) override {
    rings_.copy_page(static_cast<const LruPolicy&>(from).rings_, id);
  }
  void copy_rest(const EvictionPolicy& from) override {
    rings_.copy_heads(static_cast<const LruPolicy&>(from).rings_);
    filled_ = static_cast<const LruPolicy&>(from).filled_;
  }

  void push(BlockId id, const PageFacts& facts) override {
    size_t ring = ring_of(facts);
    rings_.push(ring, id);
    mark(ring);
  }

  void remove(BlockId id) override {
    size_t emptied = rings_.remove(id);
    if (emptied != PageRings::kNone) unmark(emptied);
  }

  void push_path(std::span<const BlockId> ids, PageFacts facts) override {
    if (ids.empty()) return;
    size_t ring = ring_of(facts);
    rings_.push_path(ring, ids);
    mark(ring);
  }

  void remove_path(std::span<const BlockId> ids) override {
    rings_.remove_path(ids, [this](size_t ring) { unmark(ring); });
  }

  void retire_all() override {
    for (size_t ring = 1; ring < kNumRings; ++ring) rings_.splice(ring, kUnreachable);
    filled_ = {};
    if (!rings_.is_empty(kUnreachable)) mark(kUnreachable);
  }

  void fetch(std::span<const BlockId> ids) const override {
    for (BlockId id : ids) rings_.fetch(id);
  }

  BlockId victim_after(BlockId victim) const override { return rings_.younger(victim); }

  BlockId victim() override {
    for (size_t word = 0; word < filled_.size(); ++word)
      if (filled_[word] != 0) return rings_.oldest(word * 64 + std::countr_zero(filled_[word]));
    return kNoBlock;
  }

  std::vector<BlockId> in_order() const override {
    std::vector<BlockId> ids;
    for (size_t ring = 0; ring < kNumRings; ++ring) {
      std::vector<BlockId> more = rings_.in_order(ring);
      ids.insert(ids.end(), more.begin(), more.end());
    }
    return ids;
  }

 private:
  static constexpr size_t kUnreachable = 0;
  static constexpr size_t kNumRings = 2 + kMaxPriority;

  static size_t ring_of(const PageFacts& facts) {
    return facts.is_reachable ? 1 + facts.priority : kUnreachable;
  }

  void unmark(size_t ring) { filled_[ring / 64] &= ~(uint64_t{1} << ring % 64); }
  void mark(size_t ring) { filled_[ring / 64] |= uint64_t{1} << ring % 64; }

  size_t num_pages_;
  PageRings rings_;
  std::array<uint64_t, 2> filled_{};  // a bit for each ring that holds a page
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy(const PolicyConfig& config) {
  return std::make_unique<LruPolicy>(config.num_pages);
}

}  // namespace pagedkv
