// The kernel of paged_attention: one tile of query rows of one KV head over the keys of one split,
// or of all splits in turn. Each warp has 16 rows; keys come in blocks that all warps share.
//
// A split is computed from nothing and then folded, in order, into what came before it, whether
// here or by fold_splits, so a row's bits depend neither on its tile nor on who computed which
// split.
#pragma once

#include "key_tiles.cuh"
#include "logits.cuh"

namespace pagedkv::cuda {

/// Shared memory of a block of threads, and how it is laid out.
template <class Products, int kDim, int kWarps>
struct Shared {
  using Element = typename Products::Element;
  static constexpr int kRows = kTileRows * kWarps;
  static constexpr int kKeys = block_keys<Element>(kDim);
  static constexpr int kPitch = row_pitch<Element>(kDim);
  static constexpr size_t kQueryBytes = size_t{kRows} * kPitch * sizeof(Element);
  static constexpr size_t kTileBytes = size_t{kKeys} * kPitch * sizeof(Element);
  static constexpr size_t kPlacesBytes = 2 * sizeof(KeyPlaces<kKeys>);
  static constexpr size_t kTotalBytes = size_t{kRows} * kDim * sizeof(float);
  static_assert(2 * kKeys * kDim <= kTileBytes, "8-bit K and V have to fit where V would be");

  /// What a launch needs: the running total only where a block goes through several splits.
  static constexpr size_t bytes(bool spread) {
    return kQueryBytes + 2 * kTileBytes + kPlacesBytes + (spread ? 0 : kTotalBytes);
  }

  unsigned char* base;

  __device__ Element* query() const { return reinterpret_cast<Element*>(base); }
  /// K, or with 8-bit pages whichever of K and V was widened last.
  __device__ unsigned char* first_tile() const { return base + kQueryBytes; }
  /// V, or with 8-bit pages the bytes of K and behind them those of V.
  __device__ unsigned char* second_tile() const { return first_tile() + kTileBytes; }
  __device__ KeyPlaces<kKeys>& places(int block) const {
    return reinterpret_cast<KeyPlaces<kKeys>*>(second_tile() + kTileBytes)[block & 1];
  }
  /// Values of the splits so far; thread t owns element t of every kThreads.
  __device__ float4* total() const {
    return reinterpret_cast<float4*>(second_tile() + kTileBytes + kPlacesBytes);
  }
};

/// Values and softmax of a thread's two rows; the sums are partial, over the thread's columns.
template <int kDim>
struct Accumulator {
  float values[kDim / 8][4];
  SoftmaxState states[2];

  __device__ void clear() {
#pragma unroll
    for (auto& column : values) column[0] = column[1] = column[2] = column[3] = 0.0f;
    states[0] = states[1] = {minus_infinity(), 0.0f};
  }

  /// Turns logits into weights and brings what is there to the new maximum.
  template <int kColumns>
  __device__ void take_logits(float (&s)[kColumns][4]) {
    float shrink[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = states[row].top;
#pragma unroll
      for (const auto& column : s) top = fmaxf(top, fmaxf(column[2 * row], column[2 * row + 1]));
      top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 2));
      const float base = top == minus_infinity() ? 0.0f : top;
      float sum = 0.0f;
#pragma unroll
      for (auto& column : s) {
#pragma unroll
        for (int i = 2 * row; i < 2 * row + 2; ++i) {
          column[i] = exp2_approximately(column[i] - base);
          sum += column[i];
        }
      }
      shrink[row] = exp2_approximately(states[row].top - base);
      states[row] = {top, fmaf(states[row].sum, shrink[row], sum)};
    }
    if (shrink[0] == 1.0f && shrink[1] == 1.0f) return;
#pragma unroll
    for (auto& column : values) {
      column[0] *= shrink[0];
      column[1] *= shrink[0];
      column[2] *= shrink[1];
      column[3] *= shrink[1];
    }
  }

  /// Makes the sums those of whole rows, in all four threads that share a row.
  __device__ void close_split() {
#pragma unroll
    for (auto& state : states) {
      state.sum += __shfl_xor_sync(kWholeWarp, state.sum, 1);
      state.sum += __shfl_xor_sync(kWholeWarp, state.sum, 2);
    }
  }
};

/// Writes the state of a split for fold_splits.
template <int kDim>
__device__ void store_split(const Accumulator<kDim>& split, const AttentionParams& p,
                            const Job& job, const Tile& tile, const QueryRow (&rows)[2],
                            int64_t split_in_wave, int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (!rows[row].is_real) continue;
    const int64_t slot = find_slot(p, job, tile.seq, rows[row].query, rows[row].head);
    const int64_t place = slot * job.num_splits + split_in_wave;
    float* values = job.values + place * p.head_dim;
#pragma unroll
    for (int d = 0; d < kDim; d += 8) {
      const int column = d + lane % 4 * 2;
      if (column < p.head_dim) values[column] = split.values[d / 8][2 * row];
      if (column + 1 < p.head_dim) values[column + 1] = split.values[d / 8][2 * row + 1];
    }
    if (lane % 4 == 0) {
      job.states[2 * place] = split.states[row].top;
      job.states[2 * place + 1] = split.states[row].sum;
    }
  }
}

/// Folds a split into the running total, which lies in shared memory, where a register is scarce.
template <int kDim, int kThreads>
__device__ void fold_split(const Accumulator<kDim>& split, SoftmaxState (&total)[2],
                           float4* total_values) {
  const FoldWeights upper = fold(total[0], split.states[0]);
  const FoldWeights lower = fold(total[1], split.states[1]);
#pragma unroll
  for (int column = 0; column < kDim / 8; ++column) {
    float4& sum = total_values[column * kThreads + threadIdx.x];
    const auto& next = split.values[column];
    sum.x = fold_value(sum.x, next[0], upper);
    sum.y = fold_value(sum.y, next[1], upper);
    sum.z = fold_value(sum.z, next[2], lower);
    sum.w = fold_value(sum.w, next[3], lower);
  }
}

/// Writes the output of a tile from its running total.
template <class Products, int kDim, int kThreads>
__device__ void store_tile(const SoftmaxState (&total)[2], const float4* total_values,
                           const AttentionParams& p, const Tile& tile, const QueryRow (&rows)[2],
                           int lane) {
  using Element = typename Products::Element;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (!rows[row].is_real) continue;
    const float* sink = p.sinks != nullptr ? p.sinks + rows[row].head : nullptr;
    const Finished finished = finish(total[row], sink);
    const int64_t token = tile.seq.first_token + rows[row].query;
    Element* out = static_cast<Element*>(p.out.data) + token * p.out.token_stride +
                   rows[row].head * p.out.head_stride;
#pragma unroll
    for (int column = 0; column < kDim / 8; ++column) {
      const float4 sum = total_values[column * kThreads + threadIdx.x];
      const float first = row == 0 ? sum.x : sum.z, second = row == 0 ? sum.y : sum.w;
      const int d = column * 8 + lane % 4 * 2;
      if (d < p.head_dim) out[d] = Products::narrow(finish_value(first, finished));
      if (d + 1 < p.head_dim) out[d + 1] = Products::narrow(finish_value(second, finished));
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      p.lse[token * p.lse_token_stride + rows[row].head * p.lse_head_stride] = finished.lse;
    }
  }
}

}  // namespace pagedkv::cuda
