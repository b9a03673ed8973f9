// Attention in tile registers for many rows of a KV head, for which keys and values are rearranged
// once.

#pragma once

#include "tiled_rows.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

class ManyRows : TiledRows {
 public:
  ManyRows(const SplitTile& tile, void* memory) : TiledRows(tile, memory) {}

  void run() {
    if (is_empty()) return;
    tiles::Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tiles::kRows, tiles::kRowBytes);
    tiles::configure(shapes);
    for (int32_t head = 0; head < num_heads_; ++head) {
      copy_queries(head);
      pack_keys(head);
      pack_values(head);
      for (int32_t row = 0; row < rows_; row += kBlockRows) attend_block(head, row);
    }
    tiles::release();
    finish_sums();
  }

 private:
  void copy_queries(int32_t head) {
    const int64_t num_bytes = p_.head_dim * (int64_t)sizeof(uint16_t);
    for (int32_t row = 0; row < (int32_t)round_up(rows_, kBlockRows); ++row) {
      const uint16_t* query = row < rows_ ? query_of(head, row) : scratch_.zeros;
      __builtin_memcpy(scratch_.queries + (int64_t)row * p_.head_dim, query, num_bytes);
    }
  }

  const uint16_t* row_or_zeros(const uint16_t* row, int64_t offset) const {
    return row ? row + offset : scratch_.zeros;
  }

  void pack_keys(int32_t head) {
    const int64_t offset = (tile_.kv_head_begin + head) * p_.key_pages.head_stride;
    for (int64_t first = begin_ / kPairKeys * kPairKeys; first < round_up(end_, kPairKeys);
         first += kTileKeys) {
      const uint16_t* rows[kTileKeys];
      for (int i = 0; i < kTileKeys; ++i)
        rows[i] = row_or_zeros(scratch_.key_rows[first + i], offset);
      for (int32_t step = 0; step < steps_; ++step) {
        pack_as_columns(rows, step * kStepDims, key_tile(first, step));
      }
    }
  }

  void pack_values(int32_t head) {
    const int64_t offset = (tile_.kv_head_begin + head) * p_.value_pages.head_stride;
    for (int64_t first = begin_ / kPairKeys * kPairKeys; first < end_; first += kPairKeys) {
      for (int i = 0; i < kTileKeys; ++i) {
        const uint16_t* a = row_or_zeros(scratch_.value_rows[first + i], offset);
        const uint16_t* b = row_or_zeros(scratch_.value_rows[first + kTileKeys + i], offset);
        for (int32_t step = 0; step < steps_; ++step) {
          uint16_t* to = value_tile(first, step) + i * kStepDims;
          pack_paired(a + step * kStepDims, b + step * kStepDims, to, to + kTileNumbers);
        }
      }
    }
  }

  uint16_t* key_tile(int64_t first, int32_t step) {
    return scratch_.keys + (first / kTileKeys * steps_ + step) * kTileNumbers;
  }
  /// The tile of the even dimensions, which that of the odd ones follows.
  uint16_t* value_tile(int64_t first, int32_t step) {
    return scratch_.values + (first / kPairKeys * steps_ + step) * 2 * kTileNumbers;
  }

  void attend_block(int32_t head, int32_t first_row) {
    const int32_t count = rows_ - first_row < kBlockRows ? rows_ - first_row : kBlockRows;
    int64_t begin = end_, end = begin_;
    for (int32_t row = first_row; row < first_row + count; ++row) {
      const TileToken& token = token_of(row);
      if (token.begin >= token.end) continue;
      begin = token.begin < begin ? token.begin : begin;
      end = token.end > end ? token.end : end;
    }
    if (begin >= end) return;
    begin = begin / kPairKeys * kPairKeys;
    const bool is_full = count > tiles::kRows;
    for (int64_t key = begin; key < end; key += kPairKeys) {
      is_full ? multiply<true>(first_row, key) : multiply<false>(first_row, key);
    }
    for (int32_t i = 0; i < count; ++i) {
      weigh(head, first_row + i, scratch_.weights + i * kWeightStride);
      pack_weights(first_row + i, i, begin, end);
    }
    float* states = state_of((int64_t)head * rows_ + first_row);
    const bool is_whole = count == kBlockRows;
    float* sums = is_whole ? states : scratch_.block_sums;
    const int64_t stride = is_whole ? stride_ : p_.head_dim;
    for (int32_t step = 0; step < steps_; ++step) {
      is_full ? sum_values<true>(step, begin, end, sums + step * kStepDims, stride)
              : sum_values<false>(step, begin, end, sums + step * kStepDims, stride);
    }
    if (is_whole) return;
    for (int32_t i = 0; i < count; ++i) {
      __builtin_memcpy(states + (int64_t)i * stride_, sums + i * stride,
                       p_.head_dim * sizeof(float));
    }
  }

  template <bool kIsFull>
  void multiply(int32_t first_row, int64_t key) {
    const uint16_t* queries = scratch_.queries + (int64_t)first_row * p_.head_dim;
    const int64_t query_bytes = p_.head_dim * 2;
    tiles::zero<0>();
    tiles::zero<1>();
    if (kIsFull) tiles::zero<2>();
    if (kIsFull) tiles::zero<3>();
    for (int32_t step = 0; step < steps_; ++step) {
      tiles::load<6>(key_tile(key, step), tiles::kRowBytes);
      tiles::load<7>(key_tile(key + kTileKeys, step), tiles::kRowBytes);
      tiles::load<4>(queries + step * kStepDims, query_bytes);
      tiles::dot<0, 4, 6>();
      tiles::dot<1, 4, 7>();
      if (kIsFull) {
        tiles::load<5>(queries + tiles::kRows * p_.head_dim + step * kStepDims, query_bytes);
        tiles::dot<2, 5, 6>();
        tiles::dot<3, 5, 7>();
      }
    }
    float* products = scratch_.weights + key;
    const int64_t stride_bytes = kWeightStride * (int64_t)sizeof(float);
    tiles::store<0>(products, stride_bytes);
    tiles::store<1>(products + kTileKeys, stride_bytes);
    if (kIsFull) {
      products += tiles::kRows * kWeightStride;
      tiles::store<2>(products, stride_bytes);
      tiles::store<3>(products + kTileKeys, stride_bytes);
    }
  }

  /// Rounds the weights of a row, key i of 32 beside key i + 16.
  void pack_weights(int32_t row, int32_t row_of_block, int64_t begin, int64_t end) {
    const float* weights = scratch_.weights + row_of_block * kWeightStride;
    uint16_t* to = scratch_.packed_weights + row_of_block * kSplitTokens;
    const TileToken& token = token_of(row);
    for (int64_t key = begin; key < end; key += kPairKeys) {
      const bool sees_first = sees(token, key), sees_second = sees(token, key + kTileKeys);
      PAGEDKV_UNROLL for (int i = 0; i < kTileKeys; i += kLanes) {
        const Floats first = sees_first ? load(weights + key + i) : Floats{};
        const Floats second = sees_second ? load(weights + key + kTileKeys + i) : Floats{};
        BFloat16::store_pair(to + key + 2 * i, first, second);
      }
    }
  }

  template <bool kIsFull>
  void sum_values(int32_t step, int64_t begin, int64_t end, float* sums, int64_t stride) {
    const uint16_t* weights = scratch_.packed_weights;
    const int64_t weight_bytes = kSplitTokens * 2, stride_bytes = stride * (int64_t)sizeof(float);
    tiles::zero<0>();
    tiles::zero<1>();
    if (kIsFull) tiles::zero<2>();
    if (kIsFull) tiles::zero<3>();
    for (int64_t key = begin; key < end; key += kPairKeys) {
      tiles::load<6>(value_tile(key, step), tiles::kRowBytes);
      tiles::load<7>(value_tile(key, step) + kTileNumbers, tiles::kRowBytes);
      tiles::load<4>(weights + key, weight_bytes);
      tiles::dot<0, 4, 6>();
      tiles::dot<1, 4, 7>();
      if (kIsFull) {
        tiles::load<5>(weights + tiles::kRows * kSplitTokens + key, weight_bytes);
        tiles::dot<2, 5, 6>();
        tiles::dot<3, 5, 7>();
      }
    }
    tiles::store<0>(sums, stride_bytes);
    tiles::store<1>(sums + 16, stride_bytes);
    if (kIsFull) {
      sums += tiles::kRows * stride;
      tiles::store<2>(sums, stride_bytes);
      tiles::store<3>(sums + 16, stride_bytes);
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
