// The two matrix products of attention over one block of keys: queries with keys, and weights with
// values. Both keep a block of results in registers. The shape of that block never changes a bit: a
// query and a key are multiplied along head_dim in one order and reduced by one tree, and weighted
// values are added key after key.

#pragma once

#include "formats.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int kMaxQueryRows = kHas32Registers ? 6 : 4;  // of one call of multiply_keys
constexpr int kMaxWeightRows = 6;                       // of one call of add_values

/// Where the keys or values of a block lie: rows[i] + offset is the i-th.
template <typename Format>
struct BlockRows {
  using Stored = typename Format::Stored;
  const char* const* rows;
  int64_t offset;
  PAGEDKV_INLINE const Stored* operator[](int64_t i) const {
    return reinterpret_cast<const Stored*>(rows[i] + offset);
  }
};

/// Memory that is needed next, fetched little by little: all at once it would hold up the loads
/// that are needed now.
struct Ahead {
  const char* const* rows;
  int64_t next, last;     // rows [next, last) are still to be fetched
  int64_t offset;         // of what is needed of a row
  int32_t bytes, at;      // of that, and how much of the first row has been fetched
  int32_t lines_per_key;  // to fetch for a key that is computed
  PAGEDKV_INLINE void fetch(int64_t num_keys) {
    for (int64_t lines = num_keys * lines_per_key; lines > 0 && next < last; --lines) {
      __builtin_prefetch(rows[next] + offset + at, 0, 2);
      at += 64;
      if (at >= bytes) {
        at = 0;
        ++next;
      }
    }
  }
};

/// head_dim as registers: pairs, then perhaps one more.
struct Registers {
  int32_t num_pairs;
  bool has_one;
};

template <typename Format>
constexpr bool kIsFloat32 = false;
template <>
constexpr bool kIsFloat32<Float32> = true;

template <typename Format, int kRows, int kKeys>
PAGEDKV_INLINE void multiply_block(const float* queries, int64_t query_stride,
                                   const BlockRows<Format>& keys, int64_t first, int64_t last,
                                   Registers registers, float* products, int64_t product_stride) {
  const typename Format::Stored* key[kKeys];
  PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) {
    key[k] = keys[first + k < last ? first + k : last - 1];  // the surplus products are never read
  }
  Floats sums[kRows][kKeys];
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) sums[r][k] = Floats{};
  }
  // A register of every query and key at a time.
  const auto multiply = [&](const Floats* key_part, int64_t d) __attribute__((always_inline)) {
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      Floats query = load(queries + r * query_stride + d);
      keep(query);
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) sums[r][k] =
          fma(query, key_part[k], sums[r][k]);
    }
  };
  int64_t d = 0;
  for (int32_t i = 0; i < registers.num_pairs; ++i, d += 2 * kLanes) {
    if constexpr (kRows * kKeys <= 8 || kHas32Registers) {
      Floats a[kKeys], b[kKeys];
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) Format::load_pair(key[k] + d, a[k], b[k]);
      multiply(a, d);
      multiply(b, d + kLanes);
    } else if constexpr (kIsFloat32<Format>) {
      // Key by key, or the registers run out.
      PAGEDKV_UNROLL for (int half = 0; half < 2; ++half) {
        Floats query[kRows];
        PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
          query[r] = load(queries + r * query_stride + d + half * kLanes);
          keep(query[r]);
        }
        PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) {
          Floats a = load(key[k] + d + half * kLanes);
          keep(a);
          PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) sums[r][k] = fma(query[r], a, sums[r][k]);
        }
      }
    } else {
      Floats query[kRows];
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) query[r] =
          load(queries + r * query_stride + d);
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) {
        Floats a, b;
        Format::load_pair(key[k] + d, a, b);
        PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
          sums[r][k] = fma(query[r], a, sums[r][k]);
          sums[r][k] = fma(load(queries + r * query_stride + d + kLanes), b, sums[r][k]);
        }
      }
    }
  }
  if (registers.has_one) {
    PAGEDKV_UNROLL for (int k = 0; k < kKeys; ++k) {
      const Floats a = Format::load_one(key[k] + d);
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][k] = fma(load(queries + r * query_stride + d), a, sums[r][k]);
      }
    }
  }
  if constexpr (kKeys == 2) {
    static_assert(kRows % 2 == 0);
    PAGEDKV_UNROLL for (int r = 0; r < kRows; r += 2) {
      const Floats4 four = sums_of(sums[r][0], sums[r][1], sums[r + 1][0], sums[r + 1][1]);
      __builtin_memcpy(products + r * product_stride + first, &four, 8);
      __builtin_memcpy(products + (r + 1) * product_stride + first,
                       reinterpret_cast<const char*>(&four) + 8, 8);
    }
  } else {
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PAGEDKV_UNROLL for (int k = 0; k < kKeys; k += 4) {
        store(products + r * product_stride + first + k,
              sums_of(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3]));
      }
    }
  }
}

// Not inlined: one loop nest each, with the registers to itself.
template <typename Format, int kRows, int kKeys>
__attribute__((noinline)) void multiply_rows(const float* queries, int64_t query_stride,
                                             BlockRows<Format> keys, int64_t first, int64_t last,
                                             Registers registers, float* products,
                                             int64_t product_stride, Ahead& ahead) {
  for (; first < last; first += kKeys) {
    ahead.fetch(kKeys);
    multiply_block<Format, kRows, kKeys>(queries, query_stride, keys, first, last, registers,
                                         products, product_stride);
  }
}

/// Multiplies `num_rows` queries with the keys [first, last); may also write the seven products
/// after.
template <typename Format>
PAGEDKV_INLINE void multiply_keys(int32_t num_rows, const float* queries, int64_t query_stride,
                                  BlockRows<Format> keys, int64_t first, int64_t last,
                                  Registers registers, float* products, int64_t product_stride,
                                  Ahead& ahead) {
  const auto run = [&](auto function) {
    function(queries, query_stride, keys, first, last, registers, products, product_stride, ahead);
  };
  switch (num_rows) {
    case 1:
      return run(multiply_rows<Format, 1, 8>);
    case 2:
      return run(multiply_rows<Format, 2, 4>);
    case 3:
      return run(multiply_rows<Format, 3, 4>);
    case 4:
      return run(multiply_rows < Format, 4, kHas32Registers ? 4 : 2 >);
    default:
      if constexpr (kHas32Registers) {
        if (num_rows == 5) return run(multiply_rows<Format, 5, 4>);
        return run(multiply_rows<Format, 6, 4>);
      }
  }
}

template <typename Format, int kRows, int kPairs>
PAGEDKV_INLINE void add_columns(const float* weights, int64_t weight_stride,
                                const BlockRows<Format>& values, int64_t first, int64_t last,
                                int64_t d, float* sums, int64_t sum_stride) {
  Floats sum[kRows][2 * kPairs];
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int i = 0; i < 2 * kPairs; ++i) {
      sum[r][i] = load(sums + r * sum_stride + d + i * kLanes);
    }
  }
  for (int64_t key = first; key < last; ++key) {
    const typename Format::Stored* value = values[key] + d;
    Floats a[2 * kPairs];
    PAGEDKV_UNROLL for (int i = 0; i < kPairs; ++i) {
      Format::load_pair(value + 2 * i * kLanes, a[2 * i], a[2 * i + 1]);
    }
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      const Floats weight = all(weights[r * weight_stride + key]);
      PAGEDKV_UNROLL for (int i = 0; i < 2 * kPairs; ++i) sum[r][i] = fma(weight, a[i], sum[r][i]);
    }
  }
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGEDKV_UNROLL for (int i = 0; i < 2 * kPairs; ++i) {
      store(sums + r * sum_stride + d + i * kLanes, sum[r][i]);
    }
  }
}

template <typename Format, int kRows>
__attribute__((noinline)) void add_rows(const float* weights, int64_t weight_stride,
                                        BlockRows<Format> values, int64_t first, int64_t last,
                                        Registers registers, float* sums, int64_t sum_stride,
                                        Ahead& ahead) {
  constexpr int kWide = kRows == 1   ? 4
                        : kRows == 2 ? 2
                                     : 1;  // pairs, so that sums hide the latency
  int64_t d = 0;
  int32_t pairs_left = registers.num_pairs;
  const int64_t fetched = (last - first) * kWide / (registers.num_pairs + 1) + 1;
  for (; pairs_left >= kWide; pairs_left -= kWide, d += 2 * kWide * kLanes) {
    ahead.fetch(fetched);
    add_columns<Format, kRows, kWide>(weights, weight_stride, values, first, last, d, sums,
                                      sum_stride);
  }
  if constexpr (kWide > 1) {
    for (; pairs_left > 0; --pairs_left, d += 2 * kLanes) {
      add_columns<Format, kRows, 1>(weights, weight_stride, values, first, last, d, sums,
                                    sum_stride);
    }
  }
  if (!registers.has_one) return;
  Floats sum[kRows];
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) sum[r] = load(sums + r * sum_stride + d);
  for (int64_t key = first; key < last; ++key) {
    const Floats value = Format::load_one(values[key] + d);
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      sum[r] = fma(all(weights[r * weight_stride + key]), value, sum[r]);
    }
  }
  PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) store(sums + r * sum_stride + d, sum[r]);
}

/// Adds the values of the keys [first, last), weighted, to the sums of `num_rows` rows.
template <typename Format>
PAGEDKV_INLINE void add_values(int32_t num_rows, const float* weights, int64_t weight_stride,
                               BlockRows<Format> values, int64_t first, int64_t last,
                               Registers registers, float* sums, int64_t sum_stride, Ahead& ahead) {
  const auto run = [&](auto function) {
    function(weights, weight_stride, values, first, last, registers, sums, sum_stride, ahead);
  };
  switch (num_rows) {
    case 1:
      return run(add_rows<Format, 1>);
    case 2:
      return run(add_rows<Format, 2>);
    case 3:
      return run(add_rows<Format, 3>);
    case 4:
      return run(add_rows<Format, 4>);
    case 5:
      return run(add_rows<Format, 5>);
    default:
      return run(add_rows<Format, 6>);
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
