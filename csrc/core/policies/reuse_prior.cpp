// Constants are fitted to the first 6,015 requests of the conversations of Mooncake (FAST '25),
// those of paces to all 12,031.

#include "reuse_prior.h"

#include <algorithm>
#include <cmath>

namespace pagedkv {
namespace {

/// The probability of another turn, by what the request is and what it adds: what people continue,
/// they go on to continue; long additions are documents that they leave; and a later turn with a
/// long addition is rather another conversation under the same first words.
constexpr double kContinued[4][ReuseModel::kNumSizes] = {
    {.44, .44, .42, .36, .31, .29},  // a first turn
    {.50, .40, .33, .28, .12, .05},  // a branch
    {.50, .56, .33, .09, .09, .15},  // a second turn
    {.68, .65, .60, .20, .12, .10},  // a later one
};
/// What the odds of it are multiplied with, from the fourth and from the sixth turn on, when a turn
/// came late, and by how many others found the block. The end of a prompt was never found again
/// there, and may be elsewhere.
constexpr double kFromFourth = 1.2, kFromSixth = 2, kWhenLate = .8;
constexpr double kByOthers[ReuseModel::kNumPlaces] = {1, 1.7, 3, 10, 50, .3, 1};

/// The time to the next turn is log-normal: its median, by how long people took for this one, who
/// keep their rhythm, and the deviation of its logarithm. A tenth is anything from 0.1 s to an
/// hour.
constexpr double kMedian = 140'000, kByPace[ReuseModel::kNumPaces] = {.6, .9, 1.35};
constexpr double kDeviation = 1, kOtherwise = .1, kSoonest = 100, kLatest = 3'600'000;
/// What is possible in any bucket.
constexpr double kLeastHazard = .0005, kMostHazard = .9;

/// The share of next turns that come before an age, in milliseconds.
double came_before(double age, double median) {
  if (age <= 0) return 0;
  double usual = .5 * std::erfc(-std::log(age / median) / kDeviation / std::sqrt(2.));
  double other = std::log(age / kSoonest) / std::log(kLatest / kSoonest);
  return (1 - kOtherwise) * usual + kOtherwise * std::clamp(other, 0., 1.);
}

}  // namespace

ReuseModel::Hazards prior_hazards(ReuseModel::Class of) {
  const ReuseModel::Parts parts = ReuseModel::parts_of(of);
  double continued = kContinued[std::min<size_t>(parts.turn, 3)][parts.size];
  double odds = continued / (1 - continued) * kByOthers[parts.place];
  if (parts.turn == 4) odds *= kFromFourth;
  if (parts.turn == 5) odds *= kFromSixth;
  double median = kMedian;
  if (parts.turn >= 2) {
    median *= kByPace[parts.pace];
    if (parts.pace + 1 == ReuseModel::kNumPaces) odds *= kWhenLate;
  }
  continued = odds / (1 + odds);

  ReuseModel::Hazards hazards;
  double before = 0;
  for (size_t bucket = 0; bucket < ages::kNumBuckets; ++bucket) {
    bool is_last = bucket + 1 == ages::kNumBuckets;
    double by_then = is_last ? 1 : came_before(ages::edge(bucket + 1), median);
    double hazard = continued * (by_then - before) / (1 - continued * before);
    hazards[bucket] = static_cast<float>(std::clamp(hazard, kLeastHazard, kMostHazard));
    before = by_then;
  }
  return hazards;
}

}  // namespace pagedkv
