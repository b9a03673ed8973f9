// How soon blocks come back, learnt by class.
//
// For each class: how many blocks had reached an age without coming back, and how many came back at
// that age (a life table; Kaplan & Meier, "Nonparametric Estimation from Incomplete Observations",
// 1958, on logarithmic ages). What it gives is an index of a block to keep: the hits that it can be
// expected to bring for each unit of room and time, if it is kept for as long as that pays
// (Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). It differs from the hazard at
// this moment: a user reads before he asks again, so a young block is worth more than its present
// hazard.
//
// A table begins with what is thought of chats (reuse_prior.h). What is seen is counted beside what
// was thought for the same blocks: at each age, a place, then its classes of one size, then each
// class comes back so many times as often as thought.

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
/// One by the width of each bucket; 0 for the last one, which has no end.
inline constexpr std::array<float, kNumBuckets> kPerWidth = [] {
  std::array<float, kNumBuckets> all{};
  for (size_t i = 0; i + 1 < kNumBuckets; ++i)
    all[i] = 1 / static_cast<float>(edge(i + 1) - edge(i));
  return all;
}();

}  // namespace ages

class ReuseModel {
 public:
  /// Where in its request a block stands. The last one of a prompt may be there for no other: where
  /// names stand for blocks, a last one that was not full is never found again.
  enum class Place { kWithin, kLast, kDecoded };
  /// What is known of a block when it is found or published.
  struct Traits {
    uint32_t turn;            // of its conversation, from 0
    uint32_t gap;             // milliseconds from the turn before to this one
    bool is_branch;           // its request left the middle of an earlier one
    uint32_t num_new_tokens;  // that its request adds
    int32_t num_others;       // times that it was found, beyond the turns of its conversation
    Place place;              // others are counted only within
  };
  using Class = uint16_t;
  /// What a class is, in steps from 0. `turn`: the first, a branch, the second, the third, the
  /// fourth and fifth, later; `pace`: whether a following turn came at once or late; `size`: of
  /// what is added; `place`: how many others found it, then the last one of a prompt, and decoded.
  struct Parts {
    size_t turn, pace, size, place;
  };
  static constexpr size_t kNumPaces = 3, kNumSizes = 6, kNumPlaces = 7;
  static constexpr size_t kFirstApart = 5;               // places that others don't count in
  static constexpr size_t kNumRows = 2 + 4 * kNumPaces;  // of turns and paces
  static constexpr size_t kNumClasses = kNumPlaces * kNumSizes * kNumRows;

  /// How likely a block comes back in each bucket of ages, if it did not before.
  using Hazards = std::array<float, ages::kNumBuckets>;
  /// The hits per millisecond at the beginning of each bucket, and at the end.
  using Worth = std::array<float, ages::kNumBuckets + 1>;

  ReuseModel();

  static Class class_of(const Traits& traits);
  static Parts parts_of(Class of);
  /// What a block is worth if it is kept for as many buckets as give most.
  static Worth worth_of(const Hazards& hazards);

  void reached(Class of, size_t bucket) { ++cells_[of][bucket].num_there; }
  void came_back(Class of, size_t bucket) { ++cells_[of][bucket].num_back; }
  /// Counts one run more as seen, and now and then works what was learnt into the index.
  void count() {
    if (++num_seen_ >= next_refresh_) refresh();
  }

  /// Takes over what blocks are worth, and not what it was learnt from.
  void copy_worth(const ReuseModel& from) { worth_ = from.worth_; }
  /// What keeping a block is worth, in hits a millisecond.
  float worth(Class of, uint32_t age) const {
    size_t bucket = ages::bucket(age);
    const Worth& own = worth_[of];
    float share = static_cast<float>(age - ages::edge(bucket)) * ages::kPerWidth[bucket];
    return own[bucket] + share * (own[bucket + 1] - own[bucket]);
  }

 private:
  struct Cell {
    float num_there = 0, num_back = 0;
  };
  using Cells = std::array<Cell, ages::kNumBuckets>;

  void refresh();
  void refresh(size_t place);

  std::vector<Cells> cells_;  // [kNumClasses]
  std::vector<Worth> worth_;  // [kNumClasses]
  uint64_t num_seen_ = 0, next_refresh_;
};

}  // namespace pagedkv
