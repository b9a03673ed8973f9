// The block from which the fewest hits can be expected for its room and time.
//
// Requests sort the blocks of their paths into classes, by what is known of them: the turn of the
// conversation, how much the turn adds, how often others found the block, whether it ends the
// prompt or was decoded. A ReuseModel learns from a block of each run, cached or not, how soon
// blocks of a class come back. In each class, pages stand in the order of their last use, and what
// they are worth rises with age up to some point and falls then: so the least of a class is the
// oldest or the youngest. To evict the youngest is not to admit it.
//
// Where blocks come back in a way that classes don't tell, LRU may do better. Until two shadow
// caches have seen that it does not, and when they see that it does, the oldest of all goes.

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "../mix.h"
#include "ghosts.h"
#include "make.h"
#include "pagedkv/page_rings.h"
#include "recompute_cost.h"
#include "reuse_model.h"
#include "reuse_tracker.h"
#include "shadows.h"

namespace pagedkv {
namespace {

class HazardPolicy final : public EvictionPolicy {
 public:
  explicit HazardPolicy(const PolicyConfig& config)
      : HazardPolicy(config, std::max(kLeastFollowed, config.num_pages / 4)) {}
  HazardPolicy(const PolicyConfig& config, size_t num_followed)
      : block_size_(config.block_size),
        pages_(config.num_pages),
        rings_(config.num_pages, kNumRings),
        ghosts_(num_followed),
        tracker_(num_followed),
        shadows_(config.num_pages),
        cost_(config, 0) {}

  std::unique_ptr<EvictionPolicy> blank() const override {
    return std::make_unique<HazardPolicy>(
        PolicyConfig{.num_pages = pages_.size(), .block_size = block_size_}, 0);
  }
  void watch(ChangedIds* changed) override { rings_.watch(changed); }
  void copy_page(const EvictionPolicy& other, BlockId id) override {
    const auto& from = static_cast<const HazardPolicy&>(other);
    pages_[id] = from.pages_[id];
    rings_.copy_page(from.rings_, id);
  }
  void copy_rest(const EvictionPolicy& other) override {
    const auto& from = static_cast<const HazardPolicy&>(other);
    rings_.copy_heads(from.rings_);
    filled_ = from.filled_;
    now_ = from.now_;
    model_.copy_worth(from.model_);
    shadows_.copy_preference(from.shadows_);
    cost_ = from.cost_;
    choice_ = from.choice_;
  }
  bool needs_leaves() const override { return true; }

  void push(BlockId id, const PageFacts& facts) override {
    now_ = pages_[id].time = facts.now;
    if (facts.may_go) expose(id, facts);
  }
  void remove(BlockId id) override {
    if (!rings_.contains(id)) return;
    size_t emptied = rings_.remove(id);
    if (emptied != PageRings::kNone) filled_[emptied / 64] &= ~(uint64_t{1} << emptied % 64);
  }
  void hide(BlockId id) override { remove(id); }
  void expose(BlockId id, const PageFacts& facts) override {
    remove(id);
    size_t ring = ring_of(id, facts);
    pages_[id].has_class_ring = ring >= kFirstClass;
    put(ring, id);
  }
  void retire_all() override {
    for (size_t ring = 1; ring < kNumRings; ++ring) rings_.splice(ring, kUnreachable);
    filled_ = {};
    if (!rings_.is_empty(kUnreachable)) mark(kUnreachable);
    waiting_.clear();  // they would come back into the ring of their class
  }

  void found(std::span<const BlockId> path, const RequestFacts& request) override {
    now_ = request.now;
    tracker_.advance(now_, model_);
    RequestNote& note = *request.note;
    note.num_known = static_cast<uint32_t>(path.size());
    if (path.size() > 1) {  // the first block may be anybody's
      const Page& last = pages_[path.back()];
      note.is_branch = last.tail_distance > 1;
      if (!note.is_branch) {
        note.turn = last.turn + 1u;
        note.gap = now_ - last.time;
      }
    }
    for (BlockId id : path)
      if (pages_[id].num_hits < UINT16_MAX) ++pages_[id].num_hits;
    sort(path, 0, request);
    if (path.size() >= request.num_blocks) count(path, 0, note);
  }

  void stored(std::span<const BlockId> path, size_t first, std::span<const uint64_t> fingerprints,
              const RequestFacts& request) override {
    now_ = request.now;
    RequestNote& note = *request.note;
    bool is_news = !note.is_counted;
    for (size_t i = 0; i < fingerprints.size(); ++i) {
      pages_[path[first + i]] = {.fingerprint = fingerprints[i]};
      const Ghost* ghost = ghosts_.take(fingerprints[i]);
      if (ghost == nullptr || first + i < note.num_known) continue;
      note.num_known = static_cast<uint32_t>(first + i + 1);
      note.turn = ghost->turn + 1;
      note.gap = now_ - ghost->time;
      note.is_branch = false;
      is_news = true;
    }
    for (size_t i = first; i < std::min<size_t>(note.num_known, path.size()); ++i)
      pages_[path[i]].num_hits = static_cast<uint16_t>(std::min<uint32_t>(note.turn, UINT16_MAX));
    sort(path, is_news ? 0 : first, request);
    count(path, note.is_counted ? first : 0, note);
  }

  void hinted(std::span<const BlockId> path, const ReuseHint& hint) override {
    now_ = hint.now;
    for (BlockId id : path) {
      if (hint.within == 0) waiting_.push_back(id);
      pages_[id].time = now_;
      set_hint(id, hint_of(hint.within));
    }
  }
  void forget_waiting() override {
    for (BlockId id : waiting_)
      if (pages_[id].hint == kWaiting) set_hint(id, kNoHint);
    waiting_.clear();
  }

  void evicted(BlockId id) override {
    const Page& page = pages_[id];
    if (page.tail_distance <= 1) ghosts_.add(page.fingerprint, {page.turn, page.time});
    if (choice_.num_left > 0) --choice_.num_left;
  }

  BlockId victim() override {
    for (size_t ring = 0; ring < kFirstClass; ++ring) {
      if (ring == 1 + kDefaultPriority) {
        if (BlockId id = choose(); id != kNoBlock) return id;
      } else if (has(ring)) {
        return rings_.oldest(ring);
      }
    }
    return kNoBlock;
  }

 private:
  static constexpr size_t kUnreachable = 0;
  static constexpr size_t kFirstClass = 2 + kMaxPriority;  // after a ring for each priority
  // Hints: none, that a request waits, or the time to the next use, in buckets of ages.
  static constexpr uint8_t kNoHint = 0, kWaiting = 1, kFirstWithin = 2;
  static constexpr size_t kFirstHint = kFirstClass + ReuseModel::kNumClasses;
  static constexpr size_t kNumRings = kFirstHint + kFirstWithin + ages::kNumBuckets;
  static constexpr size_t kLeastFollowed = 16'384;
  static constexpr size_t kTrackedSpan = 4;  // sizes of the pool used while a block is followed
  static constexpr int kMostByOneChoice = 32;
  static constexpr int kMostSteps = 16;

  struct Page {
    uint64_t fingerprint = 0;
    uint32_t time = 0;
    ReuseModel::Class of = 0;
    uint16_t num_hits = 0;
    uint16_t turn = 0;
    uint16_t tail_distance = 0;  // blocks of its prompt that follow
    uint16_t depth = 0;          // blocks of its prompt before it
    uint8_t hint = kNoHint;
    bool has_class_ring = false;  // if it is in a ring: not in that of a priority
  };
  static_assert(sizeof(Page) == 24);
  /// The end of a path that was evicted.
  struct Ghost {
    uint32_t turn = 0, time = 0;  // as of the page
  };
  /// What goes next, until it is worth more than something else.
  struct Choice {
    size_t ring = 0;
    bool is_oldest = true;
    float limit = 0;
    int num_left = 0;
  };

  bool has(size_t ring) const { return filled_[ring / 64] >> ring % 64 & 1; }
  void mark(size_t ring) { filled_[ring / 64] |= uint64_t{1} << ring % 64; }

  size_t ring_of(BlockId id, const PageFacts& facts) const {
    if (!facts.is_reachable) return kUnreachable;
    return facts.priority == kDefaultPriority ? class_ring_of(id) : 1 + facts.priority;
  }
  size_t class_ring_of(BlockId id) const {
    const Page& page = pages_[id];
    return page.hint == kNoHint ? kFirstClass + page.of : kFirstHint + page.hint;
  }
  static uint8_t hint_of(uint32_t within) {
    return within == 0 ? kWaiting : static_cast<uint8_t>(kFirstWithin + ages::bucket(within));
  }
  void set_hint(BlockId id, uint8_t hint) {
    pages_[id].hint = hint;
    if (!rings_.contains(id) || !pages_[id].has_class_ring) return;
    remove(id);
    put(class_ring_of(id), id);
  }
  /// Puts a page where it belongs by the time of its last use; nearly, where that is far from both
  /// ends.
  void put(size_t ring, BlockId id) {
    uint32_t age = now_ - pages_[id].time;
    auto age_of = [&](BlockId other) { return now_ - pages_[other].time; };
    // `after` is to be the next younger one, if any; `before` the next older one.
    BlockId after = kNoBlock, before = rings_.youngest(ring), oldest = rings_.oldest(ring);
    for (int i = 0; before != kNoBlock && age > age_of(before); ++i) {
      after = before;
      before = rings_.older(before);
      if (i < kMostSteps) continue;
      // It is nearer to the other end, or in the middle.
      after = oldest;
      for (i = 0; i < kMostSteps && age < age_of(after); ++i) after = rings_.younger(after);
      break;
    }
    rings_.insert(ring, id, after);
    mark(ring);
  }

  /// Sorts the blocks of a path from `first` on into classes.
  void sort(std::span<const BlockId> path, size_t first, const RequestFacts& request) {
    const RequestNote& note = *request.note;
    size_t end = std::max<size_t>(request.num_blocks, path.size());
    size_t num_new = request.num_blocks - std::min(request.num_blocks, note.num_known);
    for (size_t i = first; i < path.size(); ++i) {
      Page& page = pages_[path[i]];
      page.time = now_;
      page.hint = note.expected_within == 0 ? kNoHint : hint_of(note.expected_within);
      page.turn = static_cast<uint16_t>(std::min<uint32_t>(note.turn, UINT16_MAX));
      page.tail_distance = static_cast<uint16_t>(std::min<size_t>(end - 1 - i, UINT16_MAX));
      page.depth = static_cast<uint16_t>(std::min<size_t>(i, UINT16_MAX));
      page.of = ReuseModel::class_of(
          {.turn = note.turn,
           .gap = note.gap,
           .is_branch = note.is_branch,
           .num_new_tokens = static_cast<uint32_t>(num_new * block_size_),
           .num_others = int32_t{page.num_hits} - static_cast<int32_t>(note.turn),
           .place = i >= request.num_blocks       ? ReuseModel::Place::kDecoded
                    : i + 1 == request.num_blocks ? ReuseModel::Place::kLast
                                                  : ReuseModel::Place::kWithin});
    }
  }
  /// Learns from the use of blocks.
  void count(std::span<const BlockId> path, size_t first, RequestNote& note) {
    note.is_counted = true;
    for (size_t begin = first, end; begin < path.size(); begin = end) {
      ReuseModel::Class of = pages_[path[begin]].of;
      uint64_t least = UINT64_MAX, followed = 0;
      for (end = begin; end < path.size() && pages_[path[end]].of == of; ++end) {
        uint64_t fingerprint = pages_[path[end]].fingerprint;
        tracker_.use(fingerprint, now_, model_);
        uint64_t sample = mix(fingerprint ^ kMix1, kMix2);
        if (sample < least) followed = fingerprint;
        least = std::min(least, sample);
        shadows_.use(fingerprint, of, cost_of(path[end]), now_, model_);
      }
      ++num_runs_;
      num_in_runs_ += end - begin;
      // Fewer, where what is followed would not span as much as the pool holds, and some more.
      uint64_t every = kTrackedSpan * pages_.size() * num_runs_ / (tracker_.size() * num_in_runs_);
      if (every < 2 || least / 65'536 % every == 0) tracker_.follow(followed, of, now_, model_);
      model_.count();
    }
    shadows_.settle();
  }

  float cost_of(BlockId id) const { return static_cast<float>(cost_.at(pages_[id].depth)); }
  float worth(BlockId id) const {
    const Page& page = pages_[id];
    if (page.hint == kWaiting) return std::numeric_limits<float>::max();
    return std::max(learnt_worth(id), hinted_worth(id)) * cost_of(id);
  }
  float learnt_worth(BlockId id) const {
    return model_.worth(pages_[id].of, now_ - pages_[id].time);
  }
  /// One hit for certain, in the time that is left.
  float hinted_worth(BlockId id) const {
    const Page& page = pages_[id];
    if (page.hint < kFirstWithin) return 0;
    uint32_t age = now_ - page.time;
    uint32_t within = ages::edge(page.hint - kFirstWithin + size_t{1});
    return age < within ? 1 / static_cast<float>(within - age) : 0;
  }

  BlockId choose() {
    if (shadows_.prefer_lru()) {
      choice_.num_left = 0;
      return longest_unused();
    }
    if (choice_.num_left > 0 && has(choice_.ring)) {
      BlockId id = end_of(choice_.ring, choice_.is_oldest);
      if (worth(id) <= choice_.limit) return id;
    }
    float least = std::numeric_limits<float>::infinity();
    choice_ = {.limit = least, .num_left = kMostByOneChoice};
    BlockId found = kNoBlock;
    each_class([&](size_t ring) {
      for (bool is_oldest : {true, false}) {
        BlockId id = end_of(ring, is_oldest);
        float own = worth(id);
        if (found == kNoBlock || own < least) {
          choice_.limit = least;
          choice_.ring = ring;
          choice_.is_oldest = is_oldest;
          least = own;
          found = id;
        } else if (own < choice_.limit && ring != choice_.ring) {
          choice_.limit = own;
        }
      }
    });
    return found;
  }
  BlockId longest_unused() const {
    BlockId found = kNoBlock;
    bool is_hinted = true;
    each_class([&](size_t ring) {
      BlockId id = rings_.oldest(ring);
      bool has_hint = pages_[id].hint == kWaiting || hinted_worth(id) > learnt_worth(id);
      if (found != kNoBlock && has_hint != is_hinted) {
        if (has_hint) return;
        found = kNoBlock;
      }
      is_hinted = has_hint;
      if (found == kNoBlock || now_ - pages_[id].time > now_ - pages_[found].time) found = id;
    });
    return found;
  }
  BlockId end_of(size_t ring, bool is_oldest) const {
    return is_oldest ? rings_.oldest(ring) : rings_.youngest(ring);
  }
  /// Calls `visit` with each ring of a class that holds a page.
  template <typename F>
  void each_class(F&& visit) const {
    for (size_t word = kFirstClass / 64; word < filled_.size(); ++word) {
      uint64_t left = filled_[word];
      if (word == kFirstClass / 64) left &= ~uint64_t{0} << kFirstClass % 64;
      for (; left != 0; left &= left - 1) visit(word * 64 + std::countr_zero(left));
    }
  }

  uint32_t block_size_;
  std::vector<Page> pages_;
  std::vector<BlockId> waiting_;  // pages that were hinted so; may have others by now
  PageRings rings_;
  std::array<uint64_t, (kNumRings + 63) / 64> filled_{};  // a bit for each ring that holds a page
  uint32_t now_ = 0;
  ReuseModel model_;
  Ghosts<Ghost> ghosts_;
  ReuseTracker tracker_;
  Shadows shadows_;
  RecomputeCost cost_;
  uint64_t num_runs_ = 0, num_in_runs_ = 0;  // used so far
  Choice choice_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_hazard_policy(const PolicyConfig& config) {
  return std::make_unique<HazardPolicy>(config);
}

}  // namespace pagedkv
