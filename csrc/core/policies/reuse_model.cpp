#include "reuse_model.h"

#include <algorithm>
#include <initializer_list>

namespace pagedkv {
namespace {

/// What is not known yet is guessed from what is known of more: a class from those with the same
/// num_others or place and num_new, these from all with the same num_others or place, and those
/// from all there are. The guess weighs as much as so many runs.
constexpr float kGuessWeight = 10;
/// With nothing known at all, a block comes back in any bucket of ages with this probability.
constexpr float kFirstGuess = 0.03f, kFirstGuessWeight = 50;
/// Older observations count less: by this at each refresh.
constexpr float kMemory = 0.99f;

/// How much likelier than others a block is thought to come back before its class is known: what
/// people continue, they go on to continue, and long additions are documents that they leave.
constexpr float kByTurn[] = {0.75f, 0.35f, 1, 1.4f, 1.8f, 2.4f};
constexpr float kByNew[] = {1.3f, 1.4f, 1.1f, 0.8f, 0.65f, 0.5f};

template <typename T>
size_t step_of(T value, std::initializer_list<T> steps) {
  return std::count_if(steps.begin(), steps.end(), [&](T step) { return value >= step; });
}

constexpr size_t kNumOthersSteps = 5;
constexpr size_t kNumTurnSteps = std::size(kByTurn), kNumNewSteps = std::size(kByNew);

/// The hits per millisecond of a block that is there at the beginning of each bucket, kept for as
/// many buckets as give most.
template <typename Hazards>
void fill_worth(const Hazards& hazards, Hazards& worth) {
  constexpr size_t kEnd = ages::kNumBuckets - 1;
  for (size_t begin = 0; begin < kEnd; ++begin) {
    float is_there = 1, num_hits = 0, time = 0, best = 0;
    for (size_t bucket = begin; bucket < kEnd; ++bucket) {
      float width = static_cast<float>(ages::edge(bucket + 1) - ages::edge(bucket));
      num_hits += is_there * hazards[bucket];
      time += is_there * width * (1 - hazards[bucket] / 2);
      is_there *= 1 - hazards[bucket];
      best = std::max(best, num_hits / time);
    }
    worth[begin] = best;
  }
  worth[kEnd] = worth[kEnd - 1] / 2;
}

}  // namespace

ReuseModel::ReuseModel() : cells_(kNumClasses), worth_(kNumClasses) { refresh(); }

ReuseModel::Class ReuseModel::class_of(const Traits& traits) {
  size_t turn = traits.is_branch   ? 1
                : traits.turn == 0 ? 0
                                   : 2 + step_of(traits.turn, {2u, 3u, 5u});
  size_t num_new = step_of(traits.num_new, {2u, 4u, 8u, 16u, 32u});
  size_t others = traits.place == Place::kWithin
                      ? step_of(traits.num_others, {1, 3, 6, 20})
                      : kNumOthersSteps + (traits.place == Place::kDecoded);
  return static_cast<Class>((others * kNumNewSteps + num_new) * kNumTurnSteps + turn);
}

float ReuseModel::estimate(const Cell& cell, float guess) {
  return (cell.num_back + kGuessWeight * guess) / (cell.num_there + kGuessWeight);
}

void ReuseModel::refresh() {
  next_refresh_ =
      num_seen_ + std::min(std::max(num_seen_, kLeastBetweenRefreshes), kMostBetweenRefreshes);
  constexpr size_t kNumCoarse = kNumClasses / kNumTurnSteps;
  constexpr size_t kNumCoarsest = kNumCoarse / kNumNewSteps;
  std::array<Cells, kNumCoarse> coarse{};
  std::array<Cells, kNumCoarsest> coarsest{};
  Cells all{};
  for (size_t c = 0; c < kNumClasses; ++c) {
    for (size_t b = 0; b < ages::kNumBuckets; ++b) {
      Cell& cell = cells_[c][b];
      for (Cell* sum : {&coarse[c / kNumTurnSteps][b],
                        &coarsest[c / kNumTurnSteps / kNumNewSteps][b], &all[b]}) {
        sum->num_there += cell.num_there;
        sum->num_back += cell.num_back;
      }
    }
  }
  for (size_t c = 0; c < kNumClasses; ++c) {
    bool is_first = num_seen_ == 0;  // afterwards, what was never seen stays as it was
    if (!is_first && cells_[c][0].num_there < 0.5f) continue;
    size_t coarser = c / kNumTurnSteps;
    float factor = kByTurn[c % kNumTurnSteps] * kByNew[coarser % kNumNewSteps];
    Hazards hazards;
    for (size_t b = 0; b < ages::kNumBuckets; ++b) {
      float guess = (all[b].num_back + kFirstGuess * kFirstGuessWeight) /
                    (all[b].num_there + kFirstGuessWeight);
      guess = estimate(coarsest[coarser / kNumNewSteps][b], guess) * factor;
      guess = estimate(coarse[coarser][b], std::min(guess, 0.9f));
      hazards[b] = std::min(estimate(cells_[c][b], std::min(guess, 0.9f)), 0.95f);
    }
    fill_worth(hazards, worth_[c]);
  }
  for (Cells& cells : cells_) {
    for (Cell& cell : cells) {
      cell.num_there *= kMemory;
      cell.num_back *= kMemory;
    }
  }
}

}  // namespace pagedkv
