// Products of many queries with a block of keys that stands on end: a register holds one pair of
// numbers of 16 keys, so that no sum runs across a register. The sums are those of pair_products.h,
// to the bit: one for every sixteenth pair, and these put together as `sums_of` does.

#pragma once

#include "pair_products.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int kColumnRows = 3;    // queries of one call
constexpr int kColumnGroups = 2;  // of kLanes keys each, of one call
constexpr int64_t kColumnKeys = kColumnGroups * kLanes;

/// How far the pairs of one group of keys lie from those of the next in a block, in words.
PAGEDKV_INLINE int64_t group_words(int64_t head_dim) { return head_dim / 2 * kLanes; }

/// Turns 16 rows of 16 words into columns, 16 words apart.
PAGEDKV_INLINE void transpose_words(const Words (&row)[16], uint32_t* columns) {
  __m512i a[16], b[16];
  PAGEDKV_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)row[i], (__m512i)row[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)row[i], (__m512i)row[i + 1]);
  }
  PAGEDKV_UNROLL for (int i = 0; i < 16; i += 4) {  // b[i + c]: column c of each quarter, 4 rows
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  PAGEDKV_UNROLL for (int c = 0; c < 4; ++c) {
    const __m512i even_top = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88);
    const __m512i odd_top = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
    const __m512i even_low = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    store(columns + c * 16, _mm512_shuffle_i32x4(even_top, even_low, 0x88));
    store(columns + (c + 4) * 16, _mm512_shuffle_i32x4(odd_top, odd_low, 0x88));
    store(columns + (c + 8) * 16, _mm512_shuffle_i32x4(even_top, even_low, 0xdd));
    store(columns + (c + 12) * 16, _mm512_shuffle_i32x4(odd_top, odd_low, 0xdd));
  }
}

/// Multiplies `kRows` queries with kColumnKeys keys.
template <int kRows>
PAGEDKV_INLINE void multiply_columns(const uint16_t* queries, int64_t head_dim,
                                     const uint32_t* columns, float* products,
                                     int64_t product_stride) {
  struct Sums {
    Floats of[kRows][kColumnGroups];
    PAGEDKV_INLINE void add(const Sums& other) {
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
        PAGEDKV_UNROLL for (int g = 0; g < kColumnGroups; ++g) of[r][g] += other.of[r][g];
      }
    }
  };
  const auto every_sixteenth = [&](int64_t pair) __attribute__((always_inline)) {
    Sums sums = {};
    for (; pair < head_dim / 2; pair += kLanes) {
      Words part[kColumnGroups];
      PAGEDKV_UNROLL for (int g = 0; g < kColumnGroups; ++g) {
        part[g] = load<Words>(columns + g * group_words(head_dim) + pair * kLanes);
      }
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
        const Words query = Words{} + load<uint32_t>(queries + r * head_dim + 2 * pair);
        PAGEDKV_UNROLL for (int g = 0; g < kColumnGroups; ++g) {
          sums.of[r][g] = dot(sums.of[r][g], query, part[g]);
        }
      }
    }
    return sums;
  };
  const auto quarter = [&](int64_t i) __attribute__((always_inline)) {
    Sums sums = every_sixteenth(4 * i);
    sums.add(every_sixteenth(4 * i + 1));
    Sums others = every_sixteenth(4 * i + 2);
    others.add(every_sixteenth(4 * i + 3));
    sums.add(others);
    return sums;
  };
  // In an order in which few of them wait for others, in registers.
  Sums sums = quarter(0);
  sums.add(quarter(2));
  Sums others = quarter(1);
  others.add(quarter(3));
  sums.add(others);
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int g = 0; g < kColumnGroups; ++g) {
      store(products + r * product_stride + g * kLanes, sums.of[r][g]);
    }
  }
}

// Not inlined: one loop nest each, with the registers to itself.
template <int kRows>
__attribute__((noinline)) void multiply_many_columns(const uint16_t* queries, int64_t head_dim,
                                                     const uint32_t* columns, int64_t num_keys,
                                                     float* products, int64_t product_stride) {
  for (int64_t key = 0; key < num_keys; key += kColumnKeys) {
    multiply_columns<kRows>(queries, head_dim, columns + key / kLanes * group_words(head_dim),
                            products + key, product_stride);
  }
}

/// Multiplies up to kColumnRows queries with `num_keys` keys, a multiple of kColumnKeys.
PAGEDKV_INLINE void multiply_key_columns(int32_t num_rows, const uint16_t* queries,
                                         int64_t head_dim, const uint32_t* columns,
                                         int64_t num_keys, float* products,
                                         int64_t product_stride) {
  const auto run = [&](auto function) {
    function(queries, head_dim, columns, num_keys, products, product_stride);
  };
  switch (num_rows) {
    case 1:
      return run(multiply_many_columns<1>);
    case 2:
      return run(multiply_many_columns<2>);
    default:
      return run(multiply_many_columns<3>);
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
