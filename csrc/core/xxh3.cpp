#include "pagedkv/xxh3.h"

#include <bit>
#include <cstddef>

#include "little_endian.h"

namespace pagedkv {
namespace {

constexpr uint64_t kPrime32_1 = 0x9e3779b1, kPrime32_2 = 0x85ebca77, kPrime32_3 = 0xc2b2ae3d;
constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87, kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t kPrime64_3 = 0x165667b19e3779f9, kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr uint64_t kPrime64_5 = 0x27d4eb2f165667c5;
constexpr uint64_t kPrimeMx1 = 0x165667919e3779f9, kPrimeMx2 = 0x9fb21c651e98df25;

constexpr size_t kSecretBytes = 192;
constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Halves {
  uint64_t low, high;
};

uint64_t load64(const uint8_t* in) { return load_le<uint64_t>(in); }
uint64_t load32(const uint8_t* in) { return load_le<uint32_t>(in); }
uint64_t secret64(size_t offset) { return load64(kSecret + offset); }
uint64_t secret32(size_t offset) { return load32(kSecret + offset); }

uint64_t swap_bytes(uint64_t x) {
  x = (x & 0x00ff00ff00ff00ff) << 8 | (x >> 8 & 0x00ff00ff00ff00ff);
  x = (x & 0x0000ffff0000ffff) << 16 | (x >> 16 & 0x0000ffff0000ffff);
  return x << 32 | x >> 32;
}

Halves multiply(uint64_t a, uint64_t b) {
  // In 32-bit digits: no compiler's 128-bit type is needed, and all of them see through it.
  const uint64_t a0 = a & 0xffffffff, a1 = a >> 32, b0 = b & 0xffffffff, b1 = b >> 32;
  const uint64_t low = a0 * b0, cross = a1 * b0 + (low >> 32);
  const uint64_t middle = a0 * b1 + (cross & 0xffffffff);
  return {middle << 32 | (low & 0xffffffff), a1 * b1 + (cross >> 32) + (middle >> 32)};
}

uint64_t multiply_and_fold(uint64_t a, uint64_t b) {
  const Halves product = multiply(a, b);
  return product.low ^ product.high;
}

uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kPrimeMx1;
  return x ^ x >> 32;
}

uint64_t avalanche_xxh64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64_2;
  x = (x ^ x >> 29) * kPrime64_3;
  return x ^ x >> 32;
}

Halves hash_1_to_3(const uint8_t* in, size_t size) {
  const uint32_t combined = in[size - 1] | static_cast<uint32_t>(size) << 8 |
                            static_cast<uint32_t>(in[0]) << 16 |
                            static_cast<uint32_t>(in[size >> 1]) << 24;
  const auto swapped = static_cast<uint32_t>(swap_bytes(combined) >> 32);
  return {avalanche_xxh64((secret32(0) ^ secret32(4)) ^ combined),
          avalanche_xxh64((secret32(8) ^ secret32(12)) ^ std::rotl(swapped, 13))};
}

Halves hash_4_to_8(const uint8_t* in, size_t size) {
  const uint64_t combined = load32(in) | load32(in + size - 4) << 32;
  auto [low, high] =
      multiply((secret64(16) ^ secret64(24)) ^ combined, kPrime64_1 + (uint64_t{size} << 2));
  high += low << 1;
  low ^= high >> 3;
  low = (low ^ low >> 35) * kPrimeMx2;
  return {low ^ low >> 28, avalanche(high)};
}

Halves hash_9_to_16(const uint8_t* in, size_t size) {
  const uint64_t first = load64(in), last = load64(in + size - 8);
  const uint64_t one = (secret64(32) ^ secret64(40)) ^ first ^ last;
  const uint64_t two = (secret64(48) ^ secret64(56)) ^ last;
  auto [low, high] = multiply(one, kPrime64_1);
  low += (uint64_t{size} - 1) << 54;
  high += two + (two & 0xffffffff) * (kPrime32_2 - 1);
  low ^= swap_bytes(high);
  const Halves product = multiply(low, kPrime64_2);
  return {avalanche(product.low), avalanche(product.high + high * kPrime64_2)};
}

uint64_t mix(const uint8_t* in, size_t secret_offset) {
  return multiply_and_fold(load64(in) ^ secret64(secret_offset),
                           load64(in + 8) ^ secret64(secret_offset + 8));
}

void mix_two(Halves& acc, const uint8_t* one, const uint8_t* two, size_t secret_offset) {
  acc.low = (acc.low + mix(one, secret_offset)) ^ (load64(two) + load64(two + 8));
  acc.high = (acc.high + mix(two, secret_offset + 16)) ^ (load64(one) + load64(one + 8));
}

Halves hash_17_to_240(const uint8_t* in, size_t size) {
  Halves acc = {size * kPrime64_1, 0};
  if (size <= 128) {
    for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
      mix_two(acc, in + 16 * i, in + size - 16 * i - 16, 32 * i);
    }
  } else {
    for (size_t i = 0; i < 4; ++i) mix_two(acc, in + 32 * i, in + 32 * i + 16, 32 * i);
    acc = {avalanche(acc.low), avalanche(acc.high)};
    for (size_t i = 4; i < size / 32; ++i) {
      mix_two(acc, in + 32 * i, in + 32 * i + 16, 32 * (i - 4) + 3);
    }
    mix_two(acc, in + size - 16, in + size - 32, 103);
  }
  return {avalanche(acc.low + acc.high),
          0 - avalanche(acc.low * kPrime64_1 + acc.high * kPrime64_4 + size * kPrime64_2)};
}

// Eight accumulators that take in stripes of 64 bytes.
struct Stripes {
  uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                     kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

  void accumulate(const uint8_t* stripe, size_t secret_offset) {
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t lane = load64(stripe + 8 * i);
      const uint64_t value = lane ^ secret64(secret_offset + 8 * i);
      acc[i ^ 1] += lane;
      acc[i] += (value & 0xffffffff) * (value >> 32);
    }
  }

  void scramble() {
    for (size_t i = 0; i < 8; ++i) {
      acc[i] = (acc[i] ^ acc[i] >> 47 ^ secret64(kSecretBytes - 64 + 8 * i)) * kPrime32_1;
    }
  }

  uint64_t merge(uint64_t start, size_t secret_offset) const {
    for (size_t i = 0; i < 8; i += 2) {
      start += multiply_and_fold(acc[i] ^ secret64(secret_offset + 8 * i),
                                 acc[i + 1] ^ secret64(secret_offset + 8 * i + 8));
    }
    return avalanche(start);
  }
};

Halves hash_241_and_more(const uint8_t* in, size_t size) {
  constexpr size_t kStripeBytes = 64;
  constexpr size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / 8;
  Stripes stripes;
  const size_t num_stripes = (size - 1) / kStripeBytes;  // the last 1 to 64 bytes come extra
  for (size_t i = 0; i < num_stripes; ++i) {
    stripes.accumulate(in + kStripeBytes * i, 8 * (i % kStripesPerBlock));
    if (i % kStripesPerBlock == kStripesPerBlock - 1) stripes.scramble();
  }
  stripes.accumulate(in + size - kStripeBytes, kSecretBytes - 71);
  return {stripes.merge(size * kPrime64_1, 11),
          stripes.merge(~(size * kPrime64_2), kSecretBytes - 75)};
}

Halves hash(const uint8_t* in, size_t size) {
  if (size == 0) {
    return {avalanche_xxh64(secret64(64) ^ secret64(72)),
            avalanche_xxh64(secret64(80) ^ secret64(88))};
  }
  if (size <= 3) return hash_1_to_3(in, size);
  if (size <= 8) return hash_4_to_8(in, size);
  if (size <= 16) return hash_9_to_16(in, size);
  if (size <= 240) return hash_17_to_240(in, size);
  return hash_241_and_more(in, size);
}

}  // namespace

Digest128 xxh3_128(std::span<const uint8_t> data) {
  const Halves halves = hash(data.data(), data.size());
  Digest128 digest;
  for (size_t i = 0; i < 8; ++i) {
    digest[i] = static_cast<uint8_t>(halves.high >> (56 - 8 * i));
    digest[8 + i] = static_cast<uint8_t>(halves.low >> (56 - 8 * i));
  }
  return digest;
}

}  // namespace pagedkv
