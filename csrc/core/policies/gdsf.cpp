// Greedy dual size frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-
// Frequency Caching Policy", 1998): the least sum of an age and of the uses times what they save.
//
// All blocks have one size. What computing one again costs depends on its depth.

#include <algorithm>
#include <bit>

#include "leaf_policy.h"
#include "make.h"
#include "recompute_cost.h"

namespace pagedkv {
namespace {

class GdsfPolicy final : public Copied<GdsfPolicy> {
 public:
  explicit GdsfPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 1), cost_(config, kEqualCostTokens), values_(config.num_pages) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t>,
              const RequestFacts&) override {
    for (size_t depth = first; depth < path.size(); ++depth) {
      values_[path[depth]] = {};
      use(path[depth], static_cast<uint32_t>(depth));
    }
  }
  void found(std::span<const BlockId> path, const RequestFacts&) override {
    for (size_t depth = 0; depth < path.size(); ++depth)
      use(path[depth], static_cast<uint32_t>(depth));
  }
  void evicted(BlockId id) override { age_ = std::max(age_, values_[id].value); }
  void copy_own(const GdsfPolicy& from, BlockId id) { values_[id] = from.values_[id]; }

 protected:
  void place(BlockId id, const PageFacts& facts) override {
    // Positive numbers are ordered as their bits are.
    uint64_t value = std::bit_cast<uint64_t>(values_[id].value);
    heaps_.push(1, id, {ranked(facts.priority, value), last_use(id)});
  }

 private:
  static constexpr uint32_t kEqualCostTokens = 32'768;  // models of 7 to 8 billion parameters

  void use(BlockId id, uint32_t depth) {
    values_[id].value = age_ + ++values_[id].num_uses * cost_.at(depth);
  }

  struct Value {
    double value = 0;
    double num_uses = 0;
  };

  RecomputeCost cost_;
  double age_ = 0;
  std::vector<Value> values_;  // [num_pages]
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_gdsf_policy(const PolicyConfig& config) {
  return std::make_unique<GdsfPolicy>(config);
}

}  // namespace pagedkv
