// The two matrix products of attention by vdpbf16ps, which adds to a float32 the products of two
// pairs of bfloat16. Queries and keys are paired along head_dim; weights and values by keys, key 2i
// with key 2i + 1. As in products.h the shape of a block of results never changes a bit.

#pragma once

#include "products.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int64_t kPairDims = 2 * kLanes;  // bfloat16 numbers of one register

PAGEDKV_INLINE Floats dot(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

PAGEDKV_INLINE Words load_pairs(const uint16_t* from) { return load<Words>(from); }

template <int kRows, int kKeys>
__attribute__((noinline)) void multiply_pair_rows(const uint16_t* queries, int64_t head_dim,
                                                  BlockRows<BFloat16> keys, int64_t first,
                                                  int64_t last, float* products,
                                                  int64_t product_stride, Ahead& ahead) {
  for (; first < last; first += kKeys) {
    ahead.fetch(kKeys);
    const uint16_t* key[kKeys];
    PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) {
      key[k] = keys[first + k < last ? first + k : last - 1];  // surplus products are never read
    }
    Floats sums[kRows][kKeys];
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) sums[r][k] = Floats{};
    }
    for (int64_t d = 0; d < head_dim; d += kPairDims) {
      Words part[kKeys];
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) part[k] = load_pairs(key[k] + d);
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
        const Words query = load_pairs(queries + r * head_dim + d);
        PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) sums[r][k] = dot(sums[r][k], query, part[k]);
      }
    }
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; k += 4) {
        store(products + r * product_stride + first + k,
              sums_of(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3]));
      }
    }
  }
}

/// Multiplies `num_rows` queries with the keys [first, last); may also write the seven products
/// after.
PAGEDKV_INLINE void multiply_key_pairs(int32_t num_rows, const uint16_t* queries, int64_t head_dim,
                                       BlockRows<BFloat16> keys, int64_t first, int64_t last,
                                       float* products, int64_t product_stride, Ahead& ahead) {
  const auto run = [&](auto function) {
    function(queries, head_dim, keys, first, last, products, product_stride, ahead);
  };
  switch (num_rows) {
    case 1:
      return run(multiply_pair_rows<1, 8>);
    case 2:
      return run(multiply_pair_rows<2, 8>);
    case 3:
      return run(multiply_pair_rows<3, 4>);
    case 4:
      return run(multiply_pair_rows<4, 4>);
    case 5:
      return run(multiply_pair_rows<5, 4>);
    default:
      return run(multiply_pair_rows<6, 4>);
  }
}

/// Values of two keys, each number of one beside that of the other: the even and the odd ones of
/// kPairDims numbers.
PAGEDKV_INLINE void pair_values(const uint16_t* first, const uint16_t* second, Words& even,
                                Words& odd) {
  const Words a = load_pairs(first), b = load_pairs(second);
  even = (a & 0xffffu) | (b << 16);
  odd = (a >> 16) | (b & 0xffff0000u);
}

/// Where paired values come from: the pages, or a block in which they were paired before.
struct ValueRows {
  BlockRows<BFloat16> rows;
  PAGEDKV_INLINE void load(int64_t pair, int64_t d, Words& even, Words& odd) const {
    pair_values(rows[2 * pair] + d, rows[2 * pair + 1] + d, even, odd);
  }
};
struct PairedRows {
  const uint16_t* block;  // [pairs][head_dim / kPairDims][even, odd][kPairDims]
  int64_t first_pair, head_dim;
  PAGEDKV_INLINE void load(int64_t pair, int64_t d, Words& even, Words& odd) const {
    const uint16_t* from = block + (pair - first_pair) * 2 * head_dim + 2 * d;
    even = load_pairs(from);
    odd = load_pairs(from + kPairDims);
  }
};

template <class Values, int kRows, int kWide>
PAGEDKV_INLINE void add_pair_columns(const float* weights, int64_t weight_stride,
                                     const Values& values, int64_t first, int64_t last, int64_t d,
                                     float* sums, int64_t sum_stride) {
  Floats sum[kRows][2 * kWide];
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int i = 0; i < 2 * kWide; ++i) {
      sum[r][i] = load(sums + r * sum_stride + d + i * kLanes);
    }
  }
  for (int64_t pair = first; pair < last; ++pair) {
    Words part[2 * kWide];
    PAGEDKV_UNROLL for (int i = 0; i < kWide; ++i) {
      values.load(pair, d + i * kPairDims, part[2 * i], part[2 * i + 1]);
    }
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      const Words weight = (Words)all(weights[r * weight_stride + pair]);
      PAGEDKV_UNROLL for (int i = 0; i < 2 * kWide; ++i) sum[r][i] =
          dot(sum[r][i], weight, part[i]);
    }
  }
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int i = 0; i < 2 * kWide; ++i) {
      store(sums + r * sum_stride + d + i * kLanes, sum[r][i]);
    }
  }
}

template <class Values, int kRows>
__attribute__((noinline)) void add_pair_rows(const float* weights, int64_t weight_stride,
                                             const Values& values, int64_t first, int64_t last,
                                             int64_t head_dim, float* sums, int64_t sum_stride,
                                             Ahead& ahead) {
  constexpr int kWide = kRows <= 2 ? 4 : 2;
  int64_t d = 0;
  const int64_t fetched = 2 * (last - first) * kWide * kPairDims / head_dim + 1;
  for (; d + kWide * kPairDims <= head_dim; d += kWide * kPairDims) {
    ahead.fetch(fetched);
    add_pair_columns<Values, kRows, kWide>(weights, weight_stride, values, first, last, d, sums,
                                           sum_stride);
  }
  for (; d < head_dim; d += kPairDims) {
    add_pair_columns<Values, kRows, 1>(weights, weight_stride, values, first, last, d, sums,
                                       sum_stride);
  }
}

/// Adds the values of the pairs [first, last), weighted, to the sums of `num_rows` rows. Each of
/// `weights` is two numbers of bfloat16.
template <class Values>
PAGEDKV_INLINE void add_value_pairs(int32_t num_rows, const float* weights, int64_t weight_stride,
                                    const Values& values, int64_t first, int64_t last,
                                    int64_t head_dim, float* sums, int64_t sum_stride,
                                    Ahead& ahead) {
  const auto run = [&](auto function) {
    function(weights, weight_stride, values, first, last, head_dim, sums, sum_stride, ahead);
  };
  switch (num_rows) {
    case 1:
      return run(add_pair_rows<Values, 1>);
    case 2:
      return run(add_pair_rows<Values, 2>);
    case 3:
      return run(add_pair_rows<Values, 3>);
    case 4:
      return run(add_pair_rows<Values, 4>);
    case 5:
      return run(add_pair_rows<Values, 5>);
    default:
      return run(add_pair_rows<Values, 6>);
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
