// Values that are infinite or NaN, in a block of keys that not every row of the tile sees: in the
// product of all rows at once the rows that do not see them would get 0 times infinity. So they are
// added to the rows that do, and then taken out of the block. The other rows keep their bits.
#pragma once

#include "device.cuh"
#include "products.cuh"

namespace pagedkv::cuda {

__device__ inline bool is_odd(float x) { return !(fabsf(x) < __uint_as_float(0x7f800000u)); }

/// Whether there is one; the same answer in every warp.
template <class Products, int kKeys, int kDim>
__device__ bool has_odd_values(const typename Products::Element* tile, int lane) {
  bool found = false;
  for (int i = lane; i < kKeys * kDim; i += kWarpThreads) {
    constexpr int kPitch = row_pitch<typename Products::Element>(kDim);
    found |= is_odd(Products::widen(tile[i / kDim * kPitch + i % kDim]));
  }
  return __any_sync(kWholeWarp, found);
}

/// Adds them to the thread's sums of values; `is_seen(row, key)` says to which of its two rows.
/// Their weights do not matter: no weight makes a number of them.
template <class Products, int kKeys, int kDim, class IsSeen>
__device__ void add_odd_values(float (&sums)[kDim / 8][4], const typename Products::Element* tile,
                               int lane, IsSeen is_seen) {
#pragma unroll 1
  for (int key = 0; key < kKeys; ++key) {
    const auto* row = tile + key * row_pitch<typename Products::Element>(kDim) + lane % 4 * 2;
    const bool seen[2] = {is_seen(0, key), is_seen(1, key)};
#pragma unroll
    for (int column = 0; column < kDim / 8; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = Products::widen(row[column * 8 + i % 2]);
        if (seen[i / 2] && is_odd(x)) sums[column][i] += x;
      }
    }
  }
}

/// Takes them out.
template <class Products, int kThreads, int kKeys, int kDim>
__device__ void clear_odd_values(typename Products::Element* tile) {
  for (int i = threadIdx.x; i < kKeys * kDim; i += kThreads) {
    constexpr int kPitch = row_pitch<typename Products::Element>(kDim);
    auto& element = tile[i / kDim * kPitch + i % kDim];
    if (is_odd(Products::widen(element))) element = {};
  }
}

}  // namespace pagedkv::cuda
