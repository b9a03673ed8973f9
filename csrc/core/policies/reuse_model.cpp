#include "reuse_model.h"

#include <algorithm>
#include <initializer_list>

#include "reuse_prior.h"

namespace pagedkv {
namespace {

/// What was thought of a class, and of those around it, weighs as much as so many returns: in all
/// classes of a place, in those that add as much besides, and in one. Little where others find
/// blocks, of which the prior knows little.
constexpr float kPriorReturns[] = {10, 20, 20}, kPriorReturnsOfOthers = 1;
/// Older observations count less: by this at each refresh.
constexpr float kMemory = 0.995f;
/// What is seen at the ages beside counts so much.
constexpr float kBeside = 0.25f;
/// However often what was thought rarely came back.
constexpr float kMostHazard = 0.95f;
/// Fewer runs of a class are none.
constexpr float kLeastRuns = 0.5f;

constexpr uint64_t kLeastBetweenRefreshes = 32, kMostBetweenRefreshes = 256;  // runs

template <typename T>
size_t step_of(T value, std::initializer_list<T> steps) {
  return std::count_if(steps.begin(), steps.end(), [&](T step) { return value >= step; });
}

/// Blocks that came back, and as how many the prior would have had.
struct Returns {
  float seen = 0, thought = 0;

  /// By how much more they came back than was thought, if `guess` is what is known otherwise.
  float factor(float guess, float weight) const {
    return guess * (seen + weight) / (thought * guess + weight);
  }
};
using ReturnsByAge = std::array<Returns, ages::kNumBuckets>;
using FactorsByAge = std::array<float, ages::kNumBuckets>;

/// What each class was before anything was seen.
struct Prior {
  Prior() {
    for (size_t c = 0; c < ReuseModel::kNumClasses; ++c) {
      hazards[c] = prior_hazards(static_cast<ReuseModel::Class>(c));
      worth[c] = ReuseModel::worth_of(hazards[c]);
    }
  }
  std::array<ReuseModel::Hazards, ReuseModel::kNumClasses> hazards;
  std::array<ReuseModel::Worth, ReuseModel::kNumClasses> worth;
};
const Prior& prior() {
  static const Prior all;
  return all;
}

}  // namespace

ReuseModel::ReuseModel()
    : cells_(kNumClasses),
      worth_(prior().worth.begin(), prior().worth.end()),
      next_refresh_(kLeastBetweenRefreshes) {}

ReuseModel::Class ReuseModel::class_of(const Traits& traits) {
  size_t row = traits.is_branch ? 1 : 0;
  if (!traits.is_branch && traits.turn > 0)
    row = 2 + kNumPaces * step_of(traits.turn, {2u, 3u, 5u}) +
          step_of(traits.gap, {60'000u, 240'000u});
  size_t size = step_of(traits.num_new_tokens, {1024u, 2048u, 4096u, 8192u, 16'384u});
  size_t place = traits.place == Place::kWithin ? step_of(traits.num_others, {1, 3, 6, 20})
                                                : kFirstApart + (traits.place == Place::kDecoded);
  return static_cast<Class>((place * kNumSizes + size) * kNumRows + row);
}

ReuseModel::Parts ReuseModel::parts_of(Class of) {
  size_t row = of % kNumRows, size = of / kNumRows % kNumSizes, place = of / kNumRows / kNumSizes;
  if (row < 2) return {.turn = row, .pace = 0, .size = size, .place = place};
  return {.turn = 2 + (row - 2) / kNumPaces,
          .pace = (row - 2) % kNumPaces,
          .size = size,
          .place = place};
}

/// From the last bucket to the first: what follows is kept for as long as it brings no less than
/// what is before it.
ReuseModel::Worth ReuseModel::worth_of(const Hazards& hazards) {
  constexpr size_t kEnd = ages::kNumBuckets - 1;
  /// Buckets that are kept together, of a block that is there when they begin.
  struct Stretch {
    double num_hits, time, is_left;
    bool brings_less_than(const Stretch& other) const {
      return num_hits * other.time <= other.num_hits * time;
    }
  };
  std::array<Stretch, kEnd> later;
  size_t num_later = 0;
  Worth worth;
  for (size_t begin = kEnd; begin-- > 0;) {
    double hazard = hazards[begin], width = ages::edge(begin + 1) - ages::edge(begin);
    Stretch own{hazard, width * (1 - hazard / 2), 1 - hazard};
    while (num_later > 0 && own.brings_less_than(later[num_later - 1])) {
      const Stretch& next = later[--num_later];
      own.num_hits += own.is_left * next.num_hits;
      own.time += own.is_left * next.time;
      own.is_left *= next.is_left;
    }
    worth[begin] = static_cast<float>(own.num_hits / own.time);
    later[num_later++] = own;
  }
  worth[kEnd] = worth[kEnd + 1] = worth[kEnd - 1] / 2;
  return worth;
}

void ReuseModel::refresh() {
  next_refresh_ =
      num_seen_ + std::clamp(num_seen_ / 4, kLeastBetweenRefreshes, kMostBetweenRefreshes);
  for (size_t place = 0; place < kNumPlaces; ++place) refresh(place);
}

void ReuseModel::refresh(size_t place) {
  constexpr size_t kPerPlace = kNumSizes * kNumRows;
  const bool is_of_others = place > 0 && place < kFirstApart;
  auto weight = [&](size_t level) {
    return is_of_others ? kPriorReturnsOfOthers : kPriorReturns[level];
  };
  auto is_known = [&](size_t c) { return cells_[c][0].num_there >= kLeastRuns; };

  ReturnsByAge of_place{};
  std::array<ReturnsByAge, kNumSizes> of_size{};
  std::array<ReturnsByAge, kPerPlace> own;
  for (size_t i = 0; i < kPerPlace; ++i) {
    size_t c = place * kPerPlace + i;
    if (!is_known(c)) continue;
    own[i] = {};
    for (size_t b = 0; b < ages::kNumBuckets; ++b) {
      Cell& cell = cells_[c][b];
      Returns here{cell.num_back, cell.num_there * prior().hazards[c][b]};
      cell.num_there *= kMemory;
      cell.num_back *= kMemory;
      auto add = [&](size_t to, float share) {
        for (ReturnsByAge* sum : {&own[i], &of_size[i / kNumRows], &of_place}) {
          (*sum)[to].seen += share * here.seen;
          (*sum)[to].thought += share * here.thought;
        }
      };
      add(b, 1);
      if (b > 0) add(b - 1, kBeside);
      if (b + 1 < ages::kNumBuckets) add(b + 1, kBeside);
    }
  }
  FactorsByAge by_place;
  for (size_t b = 0; b < ages::kNumBuckets; ++b) by_place[b] = of_place[b].factor(1, weight(0));
  for (size_t i = 0; i < kPerPlace; ++i) {
    size_t c = place * kPerPlace + i;
    if (!is_known(c)) continue;  // what was never seen, or long ago, stays as it was
    Hazards hazards;
    for (size_t b = 0; b < ages::kNumBuckets; ++b) {
      float by_size = of_size[i / kNumRows][b].factor(by_place[b], weight(1));
      float factor = own[i][b].factor(by_size, weight(2));
      hazards[b] = std::min(prior().hazards[c][b] * factor, kMostHazard);
    }
    worth_[c] = worth_of(hazards);
  }
}

}  // namespace pagedkv
