// Orders of eviction: rings, the default policy, another one in a pool, ends of retention, quotas.

#include "pagedkv/eviction.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "check.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/page_rings.h"
#include "pagedkv/retention.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

TEST(rings_keep_the_order_of_pushes) {
  constexpr size_t kNumPages = 12, kNumRings = 3;
  Random random(1);
  PageRings rings(kNumPages, kNumRings);
  std::vector<std::vector<BlockId>> meant(kNumRings);
  for (int i = 0; i < 20'000; ++i) {
    BlockId id = static_cast<BlockId>(random.below(kNumPages));
    size_t ring = random.below(kNumRings);
    if (random.below(50) == 0) {
      size_t to = (ring + 1) % kNumRings;
      rings.splice(ring, to);
      meant[to].insert(meant[to].end(), meant[ring].begin(), meant[ring].end());
      meant[ring].clear();
    } else if (!rings.contains(id)) {
      rings.push(ring, id);
      meant[ring].push_back(id);
    } else {
      for (size_t r = 0; r < kNumRings; ++r) {
        if (std::erase(meant[r], id) == 0) continue;
        CHECK(rings.remove(id) == (meant[r].empty() ? r : PageRings::kNone));
      }
    }
    for (size_t r = 0; r < kNumRings; ++r) {
      CHECK(rings.in_order(r) == meant[r]);
      CHECK(rings.is_empty(r) == meant[r].empty());
      CHECK(rings.oldest(r) == (meant[r].empty() ? kNoBlock : meant[r][0]));
    }
  }
}

TEST(rings_take_a_path_as_they_take_its_pages_one_by_one) {
  constexpr size_t kNumPages = 12, kNumRings = 3;
  Random random(5);
  PageRings rings(kNumPages, kNumRings), one_by_one(kNumPages, kNumRings);
  for (int i = 0; i < 20'000; ++i) {
    // Some pages in some order, all in rings or all in none.
    bool are_in_rings = random.one_in(2);
    std::vector<BlockId> path;
    for (size_t tries = random.below(kNumPages); tries > 0; --tries) {
      BlockId id = static_cast<BlockId>(random.below(kNumPages));
      // Often the one that follows in the ring, as on a path that was pushed together.
      if (are_in_rings && !path.empty() && !random.one_in(4)) {
        for (size_t ring = 0; ring < kNumRings; ++ring) {
          std::vector<BlockId> order = rings.in_order(ring);
          auto last = std::find(order.begin(), order.end(), path.back());
          if (last != order.end() && last != order.begin()) id = *(last - 1);
        }
      }
      bool is_new = std::find(path.begin(), path.end(), id) == path.end();
      if (is_new && rings.contains(id) == are_in_rings) path.push_back(id);
    }
    if (are_in_rings) {
      std::vector<size_t> emptied, expected;
      rings.remove_path(path, [&](size_t ring) { emptied.push_back(ring); });
      for (BlockId id : path)
        if (size_t ring = one_by_one.remove(id); ring != PageRings::kNone) expected.push_back(ring);
      CHECK(emptied == expected);
    } else {
      size_t ring = random.below(kNumRings);
      rings.push_path(ring, path);
      for (size_t left = path.size(); left > 0; --left) one_by_one.push(ring, path[left - 1]);
    }
    for (size_t ring = 0; ring < kNumRings; ++ring)
      CHECK(rings.in_order(ring) == one_by_one.in_order(ring));
    for (BlockId id = 0; id < static_cast<BlockId>(kNumPages); ++id)
      CHECK(rings.contains(id) == one_by_one.contains(id));
  }
}

TEST(the_victim_is_unreachable_or_of_the_lowest_priority_or_the_oldest) {
  struct Pushed {
    BlockId id;
    int rank;  // 0: unreachable, else 1 + priority
  };
  constexpr size_t kNumPages = 10;
  constexpr Priority kPriorities[] = {0, 34, 35, 62, 63, 64, 100};
  Random random(2);
  std::unique_ptr<EvictionPolicy> policy = make_lru_policy({kNumPages});
  std::vector<Pushed> meant;
  for (int i = 0; i < 20'000; ++i) {
    BlockId id = static_cast<BlockId>(random.below(kNumPages));
    if (random.below(100) == 0) {
      policy->retire_all();
      std::stable_sort(meant.begin(), meant.end(),
                       [](const Pushed& a, const Pushed& b) { return a.rank < b.rank; });
      for (Pushed& pushed : meant) pushed.rank = 0;
    } else if (std::erase_if(meant, [&](const Pushed& pushed) { return pushed.id == id; }) > 0) {
      policy->remove(id);
    } else {
      PageFacts facts{.is_reachable = random.below(5) > 0,
                      .priority = kPriorities[random.below(std::size(kPriorities))],
                      .depth = 0,
                      .now = 0};
      policy->push(id, facts);
      meant.push_back({id, facts.is_reachable ? 1 + facts.priority : 0});
    }
    std::vector<Pushed> sorted = meant;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Pushed& a, const Pushed& b) { return a.rank < b.rank; });
    std::vector<BlockId> ids;
    for (const Pushed& pushed : sorted) ids.push_back(pushed.id);
    CHECK(policy->in_order() == ids);
    CHECK(policy->victim() == (ids.empty() ? kNoBlock : ids[0]));
  }
}

/// Evicts the deepest block of all; whatever the order of release, that is a leaf.
class DeepestFirst final : public EvictionPolicy {
 public:
  std::unique_ptr<EvictionPolicy> blank() const override {
    return std::make_unique<DeepestFirst>();
  }
  void watch(ChangedIds*) override {}
  void copy_page(const EvictionPolicy& other, BlockId id) override {
    const auto& from = static_cast<const DeepestFirst&>(other);
    remove(id);
    if (auto found = from.depth_.find(id); found != from.depth_.end()) {
      depth_[id] = found->second;
      if (from.pages_.contains({-static_cast<int64_t>(found->second), id}))
        push(id, {.is_reachable = true, .priority = 0, .depth = found->second, .now = 0});
    }
  }
  void copy_rest(const EvictionPolicy&) override {}
  void push(BlockId id, const PageFacts& facts) override {
    depth_[id] = facts.depth;
    pages_.insert({{-static_cast<int64_t>(facts.depth), id}, id});
  }
  void remove(BlockId id) override { pages_.erase({-static_cast<int64_t>(depth_[id]), id}); }
  void retire_all() override {}
  BlockId victim() override { return pages_.empty() ? kNoBlock : pages_.begin()->second; }
  std::vector<BlockId> in_order() const override {
    std::vector<BlockId> ids;
    for (const auto& [key, id] : pages_) ids.push_back(id);
    return ids;
  }

 private:
  std::map<BlockId, uint32_t> depth_;
  std::map<std::pair<int64_t, BlockId>, BlockId> pages_;
};

TEST(a_pool_evicts_what_its_policy_names) {
  PoolConfig config;
  config.num_blocks = {16};
  config.block_size = 4;
  config.make_policy = [](const PolicyConfig&) -> std::unique_ptr<EvictionPolicy> {
    return std::make_unique<DeepestFirst>();
  };
  BlockPool pool(config);
  auto remember = [&](Token first, size_t num_tokens) {
    std::vector<Token> tokens(num_tokens);
    std::iota(tokens.begin(), tokens.end(), first);
    std::shared_ptr<Sequence> sequence = pool.open(tokens, {});
    const int64_t counts[] = {static_cast<int64_t>(num_tokens)};
    pool.commit(*pool.reserve({sequence}, counts), {});
    pool.close(*sequence);
    return tokens;
  };
  std::vector<Token> deep = remember(0, 32), shallow = remember(1000, 16);
  for (size_t num_left : {28, 24, 20, 16}) {  // though the shallow one is younger
    CHECK(pool.evict(1) == 1);
    pool.check_integrity();
    CHECK(pool.match_length(deep, {}) == num_left);
    CHECK(pool.match_length(shallow, {}) == 16);
  }
}

TEST(ends_of_retention_come_in_order_the_deepest_first) {
  constexpr size_t kNumNodes = 20;
  Random random(3);
  Retentions retentions(kNumNodes);
  CHECK(!retentions.is_active() && retentions.first_due(kForever) == kNoNode);
  retentions.activate();
  std::map<NodeId, Nanoseconds> ends;
  for (int i = 0; i < 20'000; ++i) {
    NodeId node = static_cast<NodeId>(1 + random.below(kNumNodes));
    uint32_t depth = node % 5;
    if (random.below(3) == 0) {
      retentions.set(node, depth, {});
      ends.erase(node);
    } else {
      Nanoseconds until = static_cast<Nanoseconds>(random.below(8));
      retentions.set(node, depth, {.priority = 70, .until = until, .ttl = 3});
      ends[node] = until;
      Nanoseconds now = static_cast<Nanoseconds>(random.below(8));
      retentions.refresh(node, depth, now);
      if (until > now) ends[node] = std::max(until, now + 3);
    }
    retentions.check();
    NodeId due = retentions.first_due(6);
    auto earlier = [](auto& a, auto& b) {
      return a.second != b.second ? a.second < b.second : a.first % 5 > b.first % 5;
    };
    auto first = std::min_element(ends.begin(), ends.end(), earlier);
    bool is_due = first != ends.end() && first->second <= 6;
    CHECK((due != kNoNode) == is_due);
    if (is_due) CHECK(ends.at(due) == first->second && due % 5 == first->first % 5);
  }
}

TEST(claims_on_one_block_are_combined) {
  Retention high{70, 10, 5}, higher{80, 7, 0}, low{10, 3, 0}, lower{5, 9, 0}, none{};
  CHECK(combine(high, higher) == Retention{80, 10, 5});
  CHECK(combine(low, lower) == Retention{10, 9, 0});
  CHECK(combine(low, none) == none && combine(none, high) == high && combine(low, high) == high);
}

}  // namespace
}  // namespace pagedkv::testing
