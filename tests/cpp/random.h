// Numbers that are the same on every machine and in every standard library.

#pragma once

#include <cstdint>

namespace pagedkv::testing {

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline uint64_t mix(uint64_t a, uint64_t b) { return mix(mix(a) ^ b); }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}

  /// From 0 to `bound` - 1.
  uint64_t below(uint64_t bound) { return mix(state_++) % bound; }
  uint8_t byte() { return static_cast<uint8_t>(mix(state_++)); }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

}  // namespace pagedkv::testing
