// S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023): a small
// queue for what is new, a main one for what was found more than once there or is back soon after
// it was evicted. Both are in the order of entry; in the main one, finding a block lets it pass up
// to three times.

#include <algorithm>
#include <vector>

#include "ghosts.h"
#include "leaf_policy.h"
#include "make.h"

namespace pagedkv {
namespace {

class S3FifoPolicy final : public Copied<S3FifoPolicy> {
 public:
  explicit S3FifoPolicy(const PolicyConfig& config)
      : Copied(config.num_pages, 2),
        pages_(config.num_pages),
        ghosts_(config.num_pages * 9 / 10),
        most_small_(config.num_pages / 10) {}

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t> fingerprints,
              const RequestFacts&) override {
    for (size_t i = 0; i < fingerprints.size(); ++i) {
      bool was_evicted = ghosts_.take(fingerprints[i]) != nullptr;
      Page& page = pages_[path[first + i]];
      num_small_ += !was_evicted - page.is_small;
      page = {fingerprints[i], next_tick(), 0, !was_evicted};
    }
  }
  void found(std::span<const BlockId> path, const RequestFacts&) override {
    for (BlockId id : path) pages_[id].num_hits = std::min(pages_[id].num_hits + 1, 3);
  }
  void evicted(BlockId id) override {
    num_small_ -= pages_[id].is_small;
    if (pages_[id].is_small) ghosts_.add(pages_[id].fingerprint, {});
    pages_[id].is_small = false;
  }
  void copy_own(const S3FifoPolicy& from, BlockId id) { pages_[id] = from.pages_[id]; }
  void copy_own_rest(const S3FifoPolicy& from) { num_small_ = from.num_small_; }

 protected:
  static constexpr size_t kSmall = 1, kMain = 2;

  void place(BlockId id, const PageFacts& facts) override {
    heaps_.push(pages_[id].is_small ? kSmall : kMain, id,
                {ranked(facts.priority, 0), pages_[id].entry});
  }

  BlockId choose() override {
    for (size_t queue; (queue = next_queue()) != 0;) {
      BlockId id = heaps_.top(queue);
      Page& page = pages_[id];
      bool stays = queue == kSmall ? page.num_hits > 1 : page.num_hits > 0;
      if (!stays) return id;
      Key key = heaps_.top_key(queue);
      note(id);
      heaps_.remove(id);
      num_small_ -= page.is_small;
      page.num_hits = queue == kSmall ? 0 : page.num_hits - 1;
      page.is_small = false;
      page.entry = next_tick();
      heaps_.push(kMain, id, {key.first, page.entry});
    }
    return kNoBlock;
  }

 private:
  struct Page {
    uint64_t fingerprint = 0, entry = 0;
    int num_hits = 0;
    bool is_small = false;
  };

  /// The queue to take from; 0 when there is nothing.
  size_t next_queue() const {
    if (heaps_.is_empty(kSmall)) return heaps_.is_empty(kMain) ? 0 : kMain;
    if (heaps_.is_empty(kMain)) return kSmall;
    uint64_t small = heaps_.top_key(kSmall).first, main = heaps_.top_key(kMain).first;
    if (small != main) return small < main ? kSmall : kMain;  // priority
    return num_small_ > most_small_ ? kSmall : kMain;
  }

  std::vector<Page> pages_;
  Ghosts<char> ghosts_;
  size_t num_small_ = 0, most_small_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_s3fifo_policy(const PolicyConfig& config) {
  return std::make_unique<S3FifoPolicy>(config);
}

}  // namespace pagedkv
