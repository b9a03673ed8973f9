// How soon blocks come back, learnt by class.
//
// For each class: how many blocks had reached an age without coming back, and how many came back at
// that age (a life table; Kaplan & Meier, "Nonparametric Estimation from Incomplete Observations",
// 1958, on logarithmic ages). What it gives is an index of a block to keep: the hits that it can be
// expected to bring for each unit of room and time, if it is kept for as long as that pays
// (Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). It differs from the hazard at
// this moment: a user reads before he asks again, so a young block is worth more than its present
// hazard.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagedkv {

/// Ages in milliseconds fall into buckets: 0, powers of two up to a second, then of the root of
/// two.
namespace ages {

inline constexpr size_t kNumBuckets = 40;

/// The least age of a bucket.
constexpr uint32_t edge(size_t bucket) {
  if (bucket <= 11) return bucket == 0 ? 0 : uint32_t{1} << (bucket - 1);
  uint32_t power = uint32_t{1} << (10 + (bucket - 11) / 2);
  return (bucket - 11) % 2 == 0 ? power : static_cast<uint32_t>(power * 1.41421356);
}
constexpr size_t bucket(uint32_t age) {
  if (age < 1024) return std::bit_width(age);
  size_t power = std::bit_width(age) - 1;
  size_t found = 11 + 2 * (power - 10);
  found += age >= edge(found + 1);
  return found < kNumBuckets ? found : kNumBuckets - 1;
}

}  // namespace ages

class ReuseModel {
 public:
  /// Where in its request a block stands. The last one of a prompt may be there for no other: where
  /// names stand for blocks, a last one that was not full is never found again.
  enum class Place { kWithin, kLast, kDecoded };
  /// What is known of a block when it is found or published.
  struct Traits {
    uint32_t turn;       // of its conversation, from 0
    bool is_branch;      // its request left the middle of an earlier one
    uint32_t num_new;    // blocks that its request adds
    int32_t num_others;  // times that it was found, beyond the turns of its conversation
    Place place;         // others are counted only within
  };
  using Class = uint16_t;

  ReuseModel();

  static Class class_of(const Traits& traits);
  static constexpr size_t kNumClasses = 7 * 6 * 6;

  void reached(Class of, size_t bucket) { ++cells_[of][bucket].num_there; }
  void came_back(Class of, size_t bucket) { ++cells_[of][bucket].num_back; }
  /// Counts one run more as seen, and now and then works what was learnt into the index.
  void count() {
    if (++num_seen_ >= next_refresh_) refresh();
  }

  /// What keeping a block is worth, in hits a millisecond.
  float worth(Class of, uint32_t age) const { return worth_[of][ages::bucket(age)]; }

 private:
  struct Cell {
    float num_there = 0, num_back = 0;
  };
  using Cells = std::array<Cell, ages::kNumBuckets>;
  using Hazards = std::array<float, ages::kNumBuckets>;

  static float estimate(const Cell& cell, float guess);

  void refresh();

  static constexpr uint64_t kLeastBetweenRefreshes = 32, kMostBetweenRefreshes = 512;  // runs

  std::vector<Cells> cells_;                                 // [kNumClasses]
  std::vector<std::array<float, ages::kNumBuckets>> worth_;  // [kNumClasses]
  uint64_t num_seen_ = 0, next_refresh_ = kLeastBetweenRefreshes;
};

}  // namespace pagedkv
