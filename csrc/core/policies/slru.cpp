// Segmented LRU (Karedla, Love & Wherry, "Caching Strategies to Improve Disk System Performance",
// 1994): what was never found goes first; what was found is protected, up to four fifths of the
// pages.

#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class SlruPolicy final : public Copied<SlruPolicy> {
 public:
  explicit SlruPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 2),
        is_protected_(config.num_pages),
        most_protected_(config.num_pages * 4 / 5) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t>,
              const RequestFacts&) override {
    for (BlockId id : path.subspan(first)) set_protected(id, false);
  }
  void found(std::span<const BlockId> path, const RequestFacts&) override {
    for (BlockId id : path) set_protected(id, true);
  }
  void evicted(BlockId id) override { set_protected(id, false); }
  void copy_own(const SlruPolicy& from, BlockId id) { is_protected_[id] = from.is_protected_[id]; }
  void copy_own_rest(const SlruPolicy& from) { num_protected_ = from.num_protected_; }

 protected:
  static constexpr size_t kProbation = 1, kProtected = 2;

  void place(BlockId id, const PageFacts& facts) override {
    heaps_.push(is_protected_[id] ? kProtected : kProbation, id,
                {ranked(facts.priority, 0), last_use(id)});
  }

  BlockId choose() override {
    // Whatever protects too much is on probation again, as if it were used just now.
    while (num_protected_ > most_protected_ && !heaps_.is_empty(kProtected)) {
      BlockId id = heaps_.top(kProtected);
      Key key = heaps_.top_key(kProtected);
      note(id);
      heaps_.remove(id);
      set_protected(id, false);
      heaps_.push(kProbation, id, {key.first, next_tick()});
    }
    if (heaps_.is_empty(kProtected))
      return heaps_.is_empty(kProbation) ? kNoBlock : heaps_.top(kProbation);
    bool is_lower = !heaps_.is_empty(kProbation) &&
                    heaps_.top_key(kProbation).first <= heaps_.top_key(kProtected).first;
    return heaps_.top(is_lower ? kProbation : kProtected);
  }

 private:
  void set_protected(BlockId id, bool value) {
    num_protected_ += value - is_protected_[id];
    is_protected_[id] = value;
  }

  std::vector<bool> is_protected_;  // [num_pages]
  size_t num_protected_ = 0, most_protected_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_slru_policy(const PolicyConfig& config) {
  return std::make_unique<SlruPolicy>(config);
}

}  // namespace pagedkv
