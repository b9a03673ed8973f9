// What `hazard` learns from: classes, life tables, the index, and the shadows that it is judged by.

#include "../../csrc/core/policies/reuse_model.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "../../csrc/core/policies/reuse_prior.h"
#include "../../csrc/core/policies/shadows.h"
#include "check.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

using Model = ReuseModel;

bool is_near(double a, double b, double share) {
  return std::abs(a - b) <= share * std::max(std::abs(a), std::abs(b));
}

/// The most hits for their time, of all ages up to which a block may be kept: tried one by one.
double best_by_trial(const Model::Hazards& hazards, size_t begin) {
  double is_there = 1, num_hits = 0, time = 0, best = 0;
  for (size_t bucket = begin; bucket + 1 < ages::kNumBuckets; ++bucket) {
    double width = ages::edge(bucket + 1) - ages::edge(bucket);
    num_hits += is_there * hazards[bucket];
    time += is_there * width * (1 - hazards[bucket] / 2);
    is_there *= 1 - hazards[bucket];
    best = std::max(best, num_hits / time);
  }
  return best;
}

TEST(a_block_is_worth_the_most_hits_for_its_time) {
  Random random(1);
  for (int i = 0; i < 500; ++i) {
    Model::Hazards hazards;
    for (float& hazard : hazards)
      hazard = static_cast<float>(random.below(1000)) / (random.one_in(3) ? 1'050.f : 20'000.f);
    Model::Worth worth = Model::worth_of(hazards);
    for (size_t begin = 0; begin + 1 < ages::kNumBuckets; ++begin)
      CHECK(is_near(worth[begin], best_by_trial(hazards, begin), 1e-4));
  }
}

TEST(every_class_has_its_own_parts_and_is_reached) {
  std::set<std::tuple<size_t, size_t, size_t, size_t>> all;
  for (Model::Class of = 0; of < Model::kNumClasses; ++of) {
    Model::Parts parts = Model::parts_of(of);
    CHECK(parts.turn < 6 && parts.pace < Model::kNumPaces);
    CHECK(parts.size < Model::kNumSizes && parts.place < Model::kNumPlaces);
    CHECK(all.emplace(parts.turn, parts.pace, parts.size, parts.place).second);
  }
  std::set<Model::Class> reached;
  for (uint32_t turn = 0; turn < 8; ++turn)
    for (uint32_t gap : {0u, 60'000u, 300'000u})
      for (bool is_branch : {false, true})
        for (uint32_t num_new_tokens : {0u, 1'024u, 3'000u, 5'000u, 9'000u, 100'000u})
          for (int32_t num_others : {-5, 1, 3, 6, 20})
            for (Model::Place place :
                 {Model::Place::kWithin, Model::Place::kLast, Model::Place::kDecoded})
              reached.insert(
                  Model::class_of({turn, gap, is_branch, num_new_tokens, num_others, place}));
  CHECK(reached.size() == Model::kNumClasses);
}

/// The share of blocks of a class that are thought to come back within an hour.
double comes_back(const Model::Traits& traits) {
  Model::Hazards hazards = prior_hazards(Model::class_of(traits));
  double is_there = 1;
  for (size_t bucket = 0; ages::edge(bucket + 1) < 3'600'000; ++bucket)
    is_there *= 1 - hazards[bucket];
  return 1 - is_there;
}

TEST(before_anything_is_seen_later_turns_and_short_additions_are_thought_to_come_back) {
  auto traits = [](uint32_t turn, uint32_t num_new_tokens) {
    return Model::Traits{turn, 100'000, false, num_new_tokens, 0, Model::Place::kWithin};
  };
  for (uint32_t turn : {1u, 2u, 3u, 5u})
    CHECK(comes_back(traits(turn, 0)) > comes_back(traits(0, 0)));
  CHECK(comes_back(traits(0, 0)) > comes_back(traits(0, 20'000)));
  for (Model::Class of = 0; of < Model::kNumClasses; ++of)
    for (float hazard : prior_hazards(of)) CHECK(hazard > 0 && hazard < 1);
}

TEST(what_is_seen_outweighs_what_was_thought) {
  Random random(2);
  for (int i = 0; i < 8; ++i) {
    Model::Class of = static_cast<Model::Class>(random.below(Model::kNumClasses));
    // Blocks that come back at one age, within the time of a bucket, or never.
    size_t bucket = 8 + random.below(18);
    double share = 0.2 + static_cast<double>(random.below(60)) / 100;
    Model model;
    for (int run = 0; run < 20'000; ++run) {
      bool returns = static_cast<double>(random.below(1'000)) < 1'000 * share;
      for (size_t b = 0; b <= (returns ? bucket : ages::kNumBuckets - 1); ++b) model.reached(of, b);
      if (returns) model.came_back(of, bucket);
      model.count();
    }
    // It is about to come back; what is seen at an age counts at those beside, too.
    uint32_t begin = ages::edge(bucket), end = ages::edge(bucket + 1);
    double expected = share / ((1 - share / 2) * (end - begin));
    double found = model.worth(of, begin);
    CHECK(found > expected / 2 && found < expected * 2);
    // Once that age has passed, nothing is worth as much.
    CHECK(model.worth(of, 4 * end) < found);
  }
}

TEST(lru_is_preferred_until_the_learned_shadow_has_hit_more) {
  Model model;
  Shadows shadows(256);
  CHECK(shadows.prefer_lru());
  // Blocks of two classes: one comes back later than LRU can keep it, the other never does. Half of
  // the room would do for the first.
  Model::Class back = 0, gone = 1;
  CHECK(back != gone);
  uint32_t now = 0;
  auto seen = [&](Model::Class of, bool returns) {
    for (size_t b = 0; b <= (returns ? size_t{8} : ages::kNumBuckets - 1); ++b)
      model.reached(of, b);
    if (returns) model.came_back(of, 8);
    model.count();
  };
  for (int i = 0; i < 2'000; ++i) {
    seen(back, true);
    seen(gone, false);
  }
  uint64_t num_new = 1'000'000;
  for (int round = 0; round < 60; ++round) {
    for (uint64_t i = 1; i <= 50; ++i) {
      shadows.use(i, back, 1, now, model);
      for (int j = 0; j < 8; ++j) shadows.use(num_new++, gone, 1, now, model);
      shadows.settle();
      now += 4;
    }
  }
  CHECK(!shadows.prefer_lru());
  // Now it is the other way round: the class that never came back does, soon.
  for (int round = 0; round < 3'000 && !shadows.prefer_lru(); ++round) {
    for (int j = 0; j < 40; ++j) shadows.use(num_new + j, gone, 1, now, model);
    for (int j = 0; j < 8; ++j) shadows.use(9'000'000 + num_new + j, back, 1, now, model);
    shadows.settle();
    if (round % 2 == 1) num_new += 40;
    now += 4;
  }
  CHECK(shadows.prefer_lru());
}

}  // namespace
}  // namespace pagedkv::testing
