// SIEVE (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024): blocks stay in the order in which
// they were published; a hand goes round from the oldest to the youngest, forgives what was found
// since it last came by, and takes what was not.
//
// Turns of the hand are counted: what it has passed waits for the next one. Of blocks that the hand
// could not take, since others followed them, it knows where they stand when they may go.

#include <vector>

#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class SievePolicy final : public Copied<SievePolicy> {
 public:
  explicit SievePolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 1), pages_(config.num_pages) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t>,
              const RequestFacts&) override {
    for (BlockId id : path.subspan(first)) pages_[id] = {next_tick(), false};
  }
  void found(std::span<const BlockId> path, const RequestFacts&) override {
    for (BlockId id : path) pages_[id].is_visited = true;
  }
  void copy_own(const SievePolicy& from, BlockId id) { pages_[id] = from.pages_[id]; }
  void copy_own_rest(const SievePolicy& from) {
    turn_ = from.turn_;
    hand_ = from.hand_;
  }

 protected:
  void place(BlockId id, const PageFacts& facts) override {
    uint64_t turn = pages_[id].born <= hand_ ? turn_ + 1 : turn_;
    heaps_.push(1, id, {ranked(facts.priority, turn << 7), pages_[id].born});
  }

  BlockId choose() override {
    while (!heaps_.is_empty(1)) {
      BlockId id = heaps_.top(1);
      Key key = heaps_.top_key(1);
      turn_ = key.first & kTurns;
      hand_ = key.second;
      if (!pages_[id].is_visited) return id;
      note(id);
      pages_[id].is_visited = false;
      heaps_.remove(id);
      heaps_.push(1, id, {key.first + 1, key.second});
    }
    return kNoBlock;
  }

 private:
  static constexpr uint64_t kTurns = (uint64_t{1} << 57) - 1;

  struct Page {
    uint64_t born = 0;
    bool is_visited = false;
  };
  std::vector<Page> pages_;
  uint64_t turn_ = 0, hand_ = 0;  // how often it began at the oldest, and where it is
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_sieve_policy(const PolicyConfig& config) {
  return std::make_unique<SievePolicy>(config);
}

}  // namespace pagedkv
