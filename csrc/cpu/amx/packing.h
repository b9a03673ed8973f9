// Rows of bfloat16 rearranged into what tiles are loaded from.

#pragma once

#include "../formats.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int64_t kTileKeys = 16;                        // keys of one tile
constexpr int64_t kPairKeys = 2 * kTileKeys;             // of two tiles whose rows are paired
constexpr int64_t kStepDims = 32;                        // of head_dim that one tile row holds
constexpr int64_t kTileNumbers = kTileKeys * kStepDims;  // bfloat16 numbers of a whole tile

constexpr float kSmallestNormal = 0x1p-126f;

/// a + b as `tiles::dot` adds: subnormal results are zero.
PAGEDKV_INLINE Floats add_flushed(Floats a, Floats b) {
  const Floats sum = a + b;
  return choose(abs(sum) < kSmallestNormal, Floats{}, sum);
}

/// Writes the tile that holds in row d, column i the numbers 2d and 2d + 1 of row i: 16 rows of 32
/// numbers as columns of pairs.
PAGEDKV_INLINE void pack_as_columns(const uint16_t* const* rows, int64_t first_number,
                                    uint16_t* to) {
#if defined(PAGEDKV_SIMD_AVX512)
  __m512i a[16], b[16];
  PAGEDKV_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + first_number);
  PAGEDKV_UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  PAGEDKV_UNROLL for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4g + j] holds in quarter q the pairs 4q + j of the rows 4g ... 4g + 3.
  PAGEDKV_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);   // quarters 0, 2
    const __m512i high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);  // quarters 1, 3
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_store_si512(to + 32 * j, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_store_si512(to + 32 * (4 + j), _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_store_si512(to + 32 * (8 + j), _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_store_si512(to + 32 * (12 + j), _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
#else
  for (int i = 0; i < 16; ++i) {
    for (int d = 0; d < 16; ++d) {
      __builtin_memcpy(to + 32 * d + 2 * i, rows[i] + first_number + 2 * d, 4);
    }
  }
#endif
}

/// Writes one row of two tiles: the even and the odd ones of 32 numbers, each number of `a` paired
/// with that of `b`.
PAGEDKV_INLINE void pack_paired(const uint16_t* a, const uint16_t* b, uint16_t* even,
                                uint16_t* odd) {
  PAGEDKV_UNROLL for (int i = 0; i < kStepDims; i += 2 * kLanes) {
    const Words from_a = load<Words>(a + i), from_b = load<Words>(b + i);
    store(even + i, (from_a & 0xffffu) | (from_b << 16));
    store(odd + i, (from_a >> 16) | (from_b & 0xffff0000u));
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
