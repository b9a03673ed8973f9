// Greedy dual size frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-
// Frequency Caching Policy", 1998): the least sum of an age and of the uses times what they save.
//
// All blocks have one size. Computing one again costs work in proportion to its tokens, and for
// attention to all that is before it; the two are equal some 32,768 tokens into a prompt (models of
// 7 to 8 billion parameters).

#include <algorithm>
#include <bit>

#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class GdsfPolicy final : public Copied<GdsfPolicy> {
 public:
  explicit GdsfPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 1), block_size_(config.block_size), values_(config.num_pages) {}

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
  static constexpr double kTokensOfEqualCost = 32'768;

  void use(BlockId id, uint32_t depth) {
    double cost = 1 + depth * double{block_size_} / kTokensOfEqualCost;
    values_[id].value = age_ + ++values_[id].num_uses * cost;
  }

  struct Value {
    double value = 0;
    double num_uses = 0;
  };

  double block_size_;
  double age_ = 0;
  std::vector<Value> values_;  // [num_pages]
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_gdsf_policy(const PolicyConfig& config) {
  return std::make_unique<GdsfPolicy>(config);
}

}  // namespace pagedkv
