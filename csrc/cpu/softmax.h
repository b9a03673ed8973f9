// From the products of one query row with the keys of a split to weights, their sum and the largest
// logit.

#pragma once

#include "simd.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

/// Marks a key that the mask hides; any other weight is positive or +0.
constexpr float kExcluded = -0.0f;

struct RowLogits {
  float scale, soft_cap, alibi_slope;
  bool has_soft_cap, has_alibi;
  int64_t position;  // of the query, relative to the split
  // Of the row's token; column k + mask_shift belongs to key k, for k >= mask_begin.
  const bool* bool_mask;
  const float* float_mask;
  int32_t mask_begin;
  int64_t mask_shift;
  const float *key_scales, *value_scales;  // [kSplitTokens], optional
};

struct RowState {
  float max, sum;
};

// Turns a register of products into logits.
PAGEDKV_INLINE Floats logits_of(Floats products, int32_t key, const RowLogits& row) {
  Floats x = products * row.scale;
  if (row.key_scales) x *= load(row.key_scales + key);
  if (row.has_soft_cap) x = row.soft_cap * tanh_of(x / row.soft_cap);
  if (row.has_alibi) {
    const Ints distance = lane_numbers() + (int32_t)(key - row.position);
    x += row.alibi_slope * __builtin_convertvector(distance, Floats);
  }
  return x;
}

inline void apply_mask(float* logits, int32_t begin, int32_t end, const RowLogits& row) {
  begin = begin > row.mask_begin ? begin : row.mask_begin;
  for (int32_t key = begin; key < end; ++key) {
    const int64_t column = key + row.mask_shift;
    if (row.bool_mask && !row.bool_mask[column]) logits[key] = kMinusInfinity;
    // Not by adding, which would make NaN of what is excluded.
    if (row.float_mask) {
      const float added = row.float_mask[column];
      logits[key] = added == kMinusInfinity ? added : logits[key] + added;
    }
  }
}

// Turns the products of the keys [begin, end) into logits; returns the largest. What lies beside
// them in their registers becomes -inf.
template <bool kOnlyScaled>
PAGEDKV_INLINE float replace_by_logits(float* products, int32_t begin, int32_t end,
                                       const RowLogits& row) {
  Floats largest = all(kMinusInfinity);
  const auto logits_at = [&](int32_t key) __attribute__((always_inline)) {
    const Floats x = load(products + key);
    return kOnlyScaled ? x * row.scale : logits_of(x, key, row);
  };
  const auto take_edge = [&](int32_t key) {
    const Ints number = lane_numbers() + key;
    const Ints is_inside = (number >= begin) & (number < end);
    const Floats x = choose(is_inside, logits_at(key), all(kMinusInfinity));
    store(products + key, x);
    largest = max(x, largest);
  };
  int32_t key = begin / kLanes * kLanes;
  if (key < begin) {
    take_edge(key);
    key += kLanes;
  }
  for (; key + kLanes <= end; key += kLanes) {
    const Floats x = logits_at(key);
    store(products + key, x);
    largest = max(x, largest);
  }
  if (key < end) take_edge(key);
  return max_of(largest);
}

constexpr int kWeighedTogether = kHas32Registers ? 4 : 2;  // registers

/// Weights as they come: that of key i in place i.
struct PlainWeights {
  template <typename WeighAt>
  static PAGEDKV_INLINE void replace(float* row, int32_t begin, int32_t end, WeighAt weigh_at) {
    int32_t key = begin / kLanes * kLanes;
    for (; key + (kWeighedTogether - 1) * kLanes < end; key += kWeighedTogether * kLanes) {
      Floats weights[kWeighedTogether];
      weigh_at(key, weights);
      PAGEDKV_UNROLL for (int i = 0; i < kWeighedTogether; ++i) {
        store(row + key + i * kLanes, weights[i]);
      }
    }
    for (; key < end; key += kLanes) {
      Floats weight[1];
      weigh_at(key, weight);
      store(row + key, weight[0]);
    }
  }
  static void fill_with_nan(float* row, int32_t begin, int32_t end) {
    for (int32_t key = begin; key < end; ++key) row[key] = __builtin_nanf("");
  }
};

// Each weight has its place in `Layout` from then on; the sum runs in the order of the keys.
template <class Layout, bool kHasMask, bool kHasScales>
inline float replace_by_weights(float* logits, int32_t begin, int32_t end, float max,
                                const float* scales) {
  Floats sum = {};
  const auto weigh_at = [&]<int kCount>(int32_t key,
                                        Floats(&weights)[kCount]) __attribute__((always_inline)) {
    Floats x[kCount];
    PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) {
      x[i] = load(logits + key + i * kLanes);
      weights[i] = (x[i] - max) * kLog2E;
    }
    exp2_of_negative(weights);
    PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) {
      sum += weights[i];
      if constexpr (kHasScales) weights[i] *= load(scales + key + i * kLanes);
      if constexpr (kHasMask) {
        weights[i] = choose(x[i] == kMinusInfinity, all(kExcluded), weights[i]);
      }
    }
  };
  Layout::replace(logits, begin, end, weigh_at);
  return sum_of(sum);
}

/// Replaces the products of the keys [begin, end) by weights.
template <class Layout = PlainWeights>
__attribute__((noinline)) inline RowState weights_of(float* products, int32_t begin, int32_t end,
                                                     const RowLogits& row) {
  const bool only_scaled = !row.key_scales && !row.has_soft_cap && !row.has_alibi;
  float max = only_scaled ? replace_by_logits<true>(products, begin, end, row)
                          : replace_by_logits<false>(products, begin, end, row);
  const bool has_mask = row.mask_begin < end;
  if (has_mask) {
    apply_mask(products, begin, end, row);
    Floats largest = all(kMinusInfinity);
    for (int32_t key = begin / kLanes * kLanes; key < end; key += kLanes) {
      largest = cpu::PAGEDKV_ISA::max(load(products + key), largest);
    }
    max = max_of(largest);
  }
  if (max == kMinusInfinity) {  // sees nothing, or nothing but NaN
    for (int32_t key = begin; key < end; ++key) {
      if (products[key] != products[key]) {
        Layout::fill_with_nan(products, begin, end);
        return {__builtin_nanf(""), __builtin_nanf("")};
      }
    }
    return {max, 0.0f};
  }
  const float* scales = row.value_scales;
  const auto replace = scales ? (has_mask ? replace_by_weights<Layout, true, true>
                                          : replace_by_weights<Layout, false, true>)
                              : (has_mask ? replace_by_weights<Layout, true, false>
                                          : replace_by_weights<Layout, false, false>);
  return {max, replace(products, begin, end, max, scales)};
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
