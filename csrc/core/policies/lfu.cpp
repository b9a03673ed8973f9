// The block that was found least often since it was published; of equals the one used longest ago.

#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class LfuPolicy final : public Copied<LfuPolicy> {
 public:
  explicit LfuPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 1), num_hits_(config.num_pages) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t>,
              const RequestFacts&) override {
    for (BlockId id : path.subspan(first)) num_hits_[id] = 0;
  }
  void found(std::span<const BlockId> path, const RequestFacts&) override {
    for (BlockId id : path) ++num_hits_[id];
  }
  void copy_own(const LfuPolicy& from, BlockId id) { num_hits_[id] = from.num_hits_[id]; }

 protected:
  void place(BlockId id, const PageFacts& facts) override {
    heaps_.push(1, id, {ranked(facts.priority, uint64_t{num_hits_[id]} << 7), last_use(id)});
  }

 private:
  std::vector<uint32_t> num_hits_;  // [num_pages]
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lfu_policy(const PolicyConfig& config) {
  return std::make_unique<LfuPolicy>(config);
}

}  // namespace pagedkv
