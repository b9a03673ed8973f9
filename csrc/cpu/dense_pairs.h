// A decoder's products of bfloat16 by vdpbf16ps, which adds to a float32 the products of two pairs.
//
// Lanes are outputs, and weights lie in the order in which they are needed (pack_pairs), so that no
// sum has to be reduced: for few tokens the weights are one stream, and for many a panel of them
// stays in the cache while tile after tile of tokens passes by, and the next one is fetched.

#pragma once

#include "dense_rows.h"
#include "pair_products.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

static_assert(kPanelOutputs == 2 * kLanes);

/// How a tile fetches its part of the panel after its own: at every so manieth step, what lies
/// `distance` numbers on. Fetched all at once, it would hold up what is needed now.
struct Fetching {
  int64_t steps_left, every, distance;
};

// Each sum takes its pairs in the order of the inputs, one after the other, whatever the tile: a
// token's result does not depend on how many are there.
template <int kTokens>
__attribute__((noinline)) void multiply_pair_tile(const PairProductParams& p, int64_t panel,
                                                  int64_t token, Fetching fetching) {
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
    if (--fetching.steps_left == 0) {
      fetching.steps_left = fetching.every;
      __builtin_prefetch(weights + fetching.distance, 0, 2);
      __builtin_prefetch(weights + fetching.distance + kPanelOutputs, 0, 2);
    }
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
                                int64_t count, Fetching fetching) {
  if constexpr (kTokens > 0) {
    if (count < kTokens) return multiply_pair_tiles<kTokens - 1>(p, panel, token, count, fetching);
    multiply_pair_tile<kTokens>(p, panel, token, fetching);
  }
}

/// The tokens [begin, end) by the panels [first, last), in tiles of about the same size.
inline void multiply_pairs(const PairProductParams& p, int64_t first, int64_t last, int64_t begin,
                           int64_t end) {
  constexpr int64_t kMost = 12;  // with two registers of sums each, and what they are made of
  const int64_t num_tiles = (end - begin + kMost - 1) / kMost;
  for (int64_t panel = first; panel < last; ++panel) {
    // Of a single tile the weights are a stream, which the processor fetches by itself.
    const bool fetches = num_tiles > 1 && panel + 1 < last;
    for (int64_t tile = 0, token = begin; tile < num_tiles; ++tile) {
      const int64_t tiles_left = num_tiles - tile;
      const int64_t count = (end - token + tiles_left - 1) / tiles_left;
      multiply_pair_tiles<kMost>(p, panel, token, count,
                                 {.steps_left = fetches ? tile + 1 : 0,
                                  .every = num_tiles,
                                  .distance = kPanelOutputs * p.num_in});
      token += count;
    }
  }
}

constexpr DenseKernels kDenseInPairs = {multiply, widen, normalise, rotate, gate, multiply_pairs};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
