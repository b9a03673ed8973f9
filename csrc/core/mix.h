// Fast hashes of few bytes. Not cryptographic: whatever they find is compared.

#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace pagedkv {

// Odd constants with well-spread bits: the fractions of the square roots of 2, 3 and 5.
inline constexpr uint64_t kMix1 = 0x6a09e667f3bcc909, kMix2 = 0xbb67ae8584caa73b,
                          kMix3 = 0x3c6ef372fe94f82b;

inline uint64_t mix(uint64_t a, uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_bytes(std::string_view bytes, uint64_t seed) {
  // Both factors of each product depend on the seed, lest somebody makes one of them 0.
  const uint64_t other = mix(seed ^ kMix2, kMix3);
  uint64_t value = mix(seed ^ kMix1, bytes.size() ^ kMix2), words[2];
  for (; bytes.size() >= sizeof words; bytes.remove_prefix(sizeof words)) {
    std::memcpy(words, bytes.data(), sizeof words);
    value = mix(words[0] ^ value, words[1] ^ other);
  }
  words[0] = words[1] = 0;
  std::memcpy(words, bytes.data(), bytes.size());
  return mix(words[0] ^ value, words[1] ^ other ^ kMix2);
}

}  // namespace pagedkv
