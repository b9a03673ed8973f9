// A decoder's products of bfloat16 by vdpbf16ps, which adds to a float32 the products of two pairs.
//
// Lanes are outputs, and weights lie in the order in which they are needed (pack_pairs), so that no
// sum has to be reduced: for few tokens the weights are one stream, and for many a panel of them
// stays in the cache while tile after tile of tokens passes by.

#pragma once

#include "dense_rows.h"
#include "pair_products.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

static_assert(kPanelOutputs == 2 * kLanes);

// Each sum takes its pairs in the order of the inputs, one after the other, whatever the tile: a
// token's result does not depend on how many are there.
template <int kTokens>
__attribute__((noinline)) void multiply_pair_tile(const PairProductParams& p, int64_t panel,
                                                  int64_t token) {
  constexpr int kGroups = (kTokens + 2) / 3;  // of three rows, which share a register for addresses
  const auto* weights = static_cast<const uint16_t*>(p.packed) + panel * kPanelOutputs * p.num_in;
  const char* rows[kGroups];
  const int64_t stride = p.x_stride * static_cast<int64_t>(sizeof(uint16_t));
  PAGEDKV_UNROLL for (int g = 0; g < kGroups; ++g) {
    rows[g] = static_cast<const char*>(p.x) + (token + 3 * g) * stride;
  }
  Floats sums[kTokens][2] = {};
  for (int64_t k = 0; k < p.num_in; k += 2, weights += 2 * kPanelOutputs) {
    const Words first = load<Words>(weights), second = load<Words>(weights + kPanelOutputs);
    PAGEDKV_UNROLL for (int t = 0; t < kTokens; ++t) {
      const Words pair = Words{} + load<uint32_t>(rows[t / 3] + t % 3 * stride);
      sums[t][0] = dot(sums[t][0], first, pair);
      sums[t][1] = dot(sums[t][1], second, pair);
    }
    PAGEDKV_UNROLL for (int g = 0; g < kGroups; ++g) rows[g] += 2 * sizeof(uint16_t);
  }
  const int64_t output = panel * kPanelOutputs;
  PAGEDKV_UNROLL for (int half = 0; half < 2; ++half) {
    const int64_t begin = output + half * kLanes, count = p.num_out - begin;
    if (count <= 0) break;
    const Floats bias = p.bias ? load_up_to<Float32>(p.bias + begin, count) : Floats{};
    auto* out = static_cast<uint16_t*>(p.out) + token * p.num_out + begin;
    PAGEDKV_UNROLL for (int t = 0; t < kTokens; ++t) {
      store_up_to<BFloat16>(out + t * p.num_out, sums[t][half] + bias, count);
    }
  }
}

template <int kTokens>
inline void multiply_pair_tiles(const PairProductParams& p, int64_t panel, int64_t token,
                                int64_t count) {
  if constexpr (kTokens > 0) {
    if (count < kTokens) return multiply_pair_tiles<kTokens - 1>(p, panel, token, count);
    multiply_pair_tile<kTokens>(p, panel, token);
  }
}

/// The tokens [begin, end) by the outputs of one panel, in tiles of about the same size.
inline void multiply_pairs(const PairProductParams& p, int64_t panel, int64_t begin, int64_t end) {
  constexpr int64_t kMost = 12;  // with two registers of sums each, and what they are made of
  for (int64_t num_tiles = (end - begin + kMost - 1) / kMost; num_tiles > 0; --num_tiles) {
    const int64_t count = (end - begin + num_tiles - 1) / num_tiles;
    multiply_pair_tiles<kMost>(p, panel, begin, count);
    begin += count;
  }
}

constexpr DenseKernels kDenseInPairs = {multiply, widen, normalise, rotate, gate, multiply_pairs};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
