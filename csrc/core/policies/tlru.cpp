// Tail-optimised LRU (Zhang et al., "Tail-Optimized Caching for LLM Inference", 2025): the next
// turn of a conversation is quick enough as long as it computes at most so many tokens; what it can
// do without, at the end of the conversation, goes first. The rest is LRU.

#include <algorithm>
#include <vector>

#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class TailLruPolicy final : public Copied<TailLruPolicy> {
 public:
  explicit TailLruPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 1), block_size_(config.block_size), ends_(config.num_pages) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t>,
              const RequestFacts& request) override {
    for (size_t i = first; i < path.size(); ++i)
      ends_[path[i]] = std::max<uint32_t>(request.num_blocks, i + 1);
  }
  void found(std::span<const BlockId> path, const RequestFacts& request) override {
    if (path.empty()) return;
    for (BlockId id : path) ends_[id] = std::max<uint32_t>(request.num_blocks, path.size());
    num_new_ += (request.num_blocks - double(path.size()) - num_new_) / kMemory;
  }
  void copy_own(const TailLruPolicy& from, BlockId id) { ends_[id] = from.ends_[id]; }
  void copy_own_rest(const TailLruPolicy& from) {
    block_size_ = from.block_size_;
    num_new_ = from.num_new_;
  }

 protected:
  void place(BlockId id, const PageFacts& facts) override {
    double num_to_compute = ends_[id] - double(facts.depth) + num_new_;
    bool is_needed = num_to_compute * block_size_ > kQuickTokens;
    heaps_.push(1, id, {ranked(facts.priority, uint64_t{is_needed} << 7), last_use(id)});
  }

 private:
  static constexpr double kQuickTokens = 2'048;
  static constexpr double kMemory = 256;  // requests

  double block_size_;
  double num_new_ = 0;          // blocks that a turn adds, on the average
  std::vector<uint32_t> ends_;  // [num_pages]: blocks of the last prompt through a page
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_tlru_policy(const PolicyConfig& config) {
  return std::make_unique<TailLruPolicy>(config);
}

}  // namespace pagedkv
