// The two products of attention for the 16 query rows of one warp, in the fragments of
// mma.m16n8k16: lane i holds the rows i / 4 and i / 4 + 8 and, of every 8 columns, i % 4 * 2 and
// the next one. An element's arithmetic depends on its row and column only, never on who shares
// the tile: this is what makes decode and prefill give the same bits.
//
// Both kinds offer: Element, what a number in shared memory is; narrow, narrow4 and widen between
// it and float32; scores, s += q @ k^T; values, o += p @ v.
#pragma once

#include "device.cuh"

namespace pagedkv::cuda {

/// Elements from one row to the next: rows start at different banks, 16 bytes apart.
template <class Element>
__host__ __device__ constexpr int row_pitch(int dim) {
  return dim + 16 / static_cast<int>(sizeof(Element));
}

constexpr int kTileRows = 16;  // of one warp

}  // namespace pagedkv::cuda
