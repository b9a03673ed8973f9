// Time, in nanoseconds since the clock was made. Never the wall's: it does not jump.

#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

#include "pagedkv/error.h"

namespace pagedkv {

using Nanoseconds = int64_t;
inline constexpr Nanoseconds kForever = std::numeric_limits<int64_t>::max();
inline constexpr Nanoseconds kSecond = 1'000'000'000;
/// No clock goes beyond.
inline constexpr Nanoseconds kLatest = kForever / 2;

/// `time + span`, or kForever where that is too far away to be told from it.
inline Nanoseconds later(Nanoseconds time, Nanoseconds span) {
  return span > kForever - time ? kForever : time + span;
}

class Clock {
 public:
  enum class Kind { kMonotonic, kManual };

  explicit Clock(Kind kind) : kind_(kind) {}

  Nanoseconds now() const {
    if (kind_ == Kind::kManual) return advanced_;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                                start_)
        .count();
  }

  /// Moves a manual clock on.
  void advance(Nanoseconds span) {
    if (kind_ != Kind::kManual)
      throw StateError("advance: expected a pool with clock=\"manual\", got a monotonic clock");
    if (span < 0 || span > kLatest - advanced_)
      throw UsageError("advance: expected at most " +
                       std::to_string((kLatest - advanced_) / kSecond) +
                       " seconds, to stay within 146 years, got " + std::to_string(span / kSecond));
    advanced_ += span;
  }

 private:
  Kind kind_;
  Nanoseconds advanced_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace pagedkv
