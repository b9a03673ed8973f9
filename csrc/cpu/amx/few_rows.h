// Attention in tile registers for few rows of a KV head, which reads keys and values where they
// lie. The pages are walked on the outside and the heads on the inside, so that a page is read as
// it lies in memory.

#pragma once

#include "tiled_rows.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

class FewRows : TiledRows {
 public:
  FewRows(const SplitTile& tile, void* memory) : TiledRows(tile, memory) {}

  void run() {
    if (is_empty()) return;
    const int64_t first = begin_ / kFewStepKeys * kFewStepKeys;
    tiles::Shapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, kTileKeys, 4 * rows_);
    shapes.set(4, kTileKeys, tiles::kRowBytes);
    shapes.set(6, kTileKeys, tiles::kRowBytes);
    tiles::configure(shapes);
    for (int32_t head = 0; head < num_heads_; ++head) pack_queries(head);
    for (int64_t key = first; key < end_; key += kFewStepKeys) {
      for (int32_t head = 0; head < num_heads_; ++head) {
        const bool is_last = key + kFewStepKeys >= end_;
        if (is_last) {
          fetch(scratch_.value_rows, p_.value_pages, head, first, first + kFewStepKeys);
        } else {
          fetch(scratch_.key_rows, p_.key_pages, head, key + kFewStepKeys, key + 2 * kFewStepKeys);
        }
        multiply(head, key);
      }
    }
    for (int32_t head = 0; head < num_heads_; ++head) {
      for (int32_t row = 0; row < rows_; ++row) {
        weigh(head, row, scratch_.weights + ((int64_t)head * rows_ + row) * kWeightStride);
      }
    }
    shapes = {};
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, 2 * rows_, tiles::kRowBytes);
    shapes.set(6, kTileKeys, tiles::kRowBytes);
    shapes.set(7, kTileKeys, tiles::kRowBytes);
    tiles::configure(shapes);
    // Sums are added while the next ones are being stored.
    int32_t stored_head = -1, turn = 0;
    float* stored = nullptr;
    for (int64_t key = begin_ / kPairKeys * kPairKeys; key < end_; key += kPairKeys) {
      for (int32_t head = 0; head < num_heads_; ++head) {
        fetch(scratch_.value_rows, p_.value_pages, head, key + kFewStepKeys,
              key + kFewStepKeys + kPairKeys);
        float* sums = scratch_.sums + turn * (int64_t)steps_ * kTileNumbers / 2;
        sum_values(head, key, sums);
        if (stored) add_sums(stored_head, stored);
        stored = sums;
        stored_head = head;
        turn ^= 1;
      }
    }
    add_sums(stored_head, stored);
    tiles::release();
    finish_sums();
  }

 private:
  /// 16 rows as a tile is loaded from.
  struct TileRows {
    const uint16_t* first;
    int64_t stride_bytes;
  };

  /// Those of 16 keys, where they lie, or copied when a row is missing or the rows are in two
  /// pages.
  TileRows rows_of(const uint16_t* const* rows, const PagesView& pages, int32_t head, int64_t first,
                   uint16_t* copy) {
    const int64_t offset = (int64_t)(tile_.kv_head_begin + head) * pages.head_stride;
    bool is_whole = p_.block_size % kTileKeys == 0;
    for (int i = 0; i < kTileKeys; ++i) is_whole &= rows[first + i] != nullptr;
    if (is_whole) return {rows[first] + offset, pages.token_stride * 2};
    const int64_t num_bytes = p_.head_dim * (int64_t)sizeof(uint16_t);
    for (int i = 0; i < kTileKeys; ++i) {
      const uint16_t* row = rows[first + i];
      __builtin_memcpy(copy + i * p_.head_dim, row ? row + offset : scratch_.zeros, num_bytes);
    }
    return {copy, num_bytes};
  }

  void fetch(const uint16_t* const* rows, const PagesView& pages, int32_t head, int64_t first,
             int64_t last) {
    const int64_t offset = (int64_t)(tile_.kv_head_begin + head) * pages.head_stride;
    first = first > begin_ ? first : begin_;
    for (int64_t key = first; key < last && key < end_; ++key) {
      if (rows[key] == nullptr) continue;
      for (int64_t d = 0; d < p_.head_dim; d += kStepDims)
        __builtin_prefetch(rows[key] + offset + d, 0, 2);
    }
  }

  /// The queries of one head as tiles: in row d of step s, column i the numbers 32s + 2d and the
  /// next.
  void pack_queries(int32_t head) {
    for (int32_t row = 0; row < rows_; ++row) {
      const uint16_t* query = query_of(head, row);
      uint16_t* to = head_queries(head) + 2 * row;
      for (int32_t d = 0; d < p_.head_dim; d += 2, to += 2 * rows_)
        __builtin_memcpy(to, query + d, 4);
    }
  }

  uint16_t* head_queries(int32_t head) {
    return scratch_.queries + (int64_t)head * rows_ * p_.head_dim;
  }

  void multiply(int32_t head, int64_t first) {
    TileRows keys[4];
    for (int i = 0; i < 4; ++i) {
      // What nobody sees is multiplied with zeros; its logits are not looked at.
      keys[i] = rows_of(scratch_.key_rows, p_.key_pages, head, first + i * kTileKeys,
                        scratch_.copies + i * kTileKeys * p_.head_dim);
    }
    const uint16_t* queries = head_queries(head);
    const int64_t query_bytes = 4 * rows_;
    tiles::zero<0>();
    tiles::zero<1>();
    tiles::zero<2>();
    tiles::zero<3>();
    for (int64_t d = 0; d < p_.head_dim; d += kStepDims) {
      tiles::load<5>(queries + d * rows_, query_bytes);
      tiles::load<4>(keys[0].first + d, keys[0].stride_bytes);
      tiles::dot<0, 4, 5>();
      tiles::load<6>(keys[1].first + d, keys[1].stride_bytes);
      tiles::dot<1, 6, 5>();
      tiles::load<4>(keys[2].first + d, keys[2].stride_bytes);
      tiles::dot<2, 4, 5>();
      tiles::load<6>(keys[3].first + d, keys[3].stride_bytes);
      tiles::dot<3, 6, 5>();
    }
    float* products = scratch_.products;
    const int64_t tile_floats = kTileKeys * rows_;
    tiles::store<0>(products, query_bytes);
    tiles::store<1>(products + tile_floats, query_bytes);
    tiles::store<2>(products + 2 * tile_floats, query_bytes);
    tiles::store<3>(products + 3 * tile_floats, query_bytes);
    for (int32_t row = 0; row < rows_; ++row) {
      float* weights = scratch_.weights + ((int64_t)head * rows_ + row) * kWeightStride + first;
      for (int i = 0; i < kFewStepKeys; i += kLanes)
        store(weights + i, column(products + i * rows_ + row));
    }
  }

  /// Every rows_-th number.
  PAGEDKV_INLINE Floats column(const float* from) const {
#if defined(PAGEDKV_SIMD_AVX512)
    return (Floats)_mm512_i32gather_ps((__m512i)(lane_numbers() * rows_), from, 4);
#else
    Floats numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = from[i * rows_];
    return numbers;
#endif
  }

  /// Multiplies the weights of 32 keys with their values: of the even dimensions in the first rows_
  /// rows of a tile, of the odd ones in the next.
  void sum_values(int32_t head, int64_t first, float* sums) {
    pack_weights(head, first, scratch_.packed_weights);
    pack_weights(head, first + kTileKeys, scratch_.packed_weights + kTileNumbers);
    TileRows values[2];
    for (int i = 0; i < 2; ++i) {
      values[i] = rows_of(scratch_.value_rows, p_.value_pages, head, first + i * kTileKeys,
                          scratch_.copies + i * kTileKeys * p_.head_dim);
    }
    tiles::load<4>(scratch_.packed_weights, tiles::kRowBytes);
    tiles::load<5>(scratch_.packed_weights + kTileNumbers, tiles::kRowBytes);
    for (int32_t step = 0; step < steps_; step += 4) {
      sum_step<0>(values, step, sums);
      if (step + 1 < steps_) sum_step<1>(values, step + 1, sums);
      if (step + 2 < steps_) sum_step<2>(values, step + 2, sums);
      if (step + 3 < steps_) sum_step<3>(values, step + 3, sums);
    }
  }

  template <int kTile>
  PAGEDKV_INLINE void sum_step(const TileRows* values, int32_t step, float* sums) {
    tiles::zero<kTile>();
    tiles::load<6>(values[0].first + step * kStepDims, values[0].stride_bytes);
    tiles::dot<kTile, 4, 6>();
    tiles::load<7>(values[1].first + step * kStepDims, values[1].stride_bytes);
    tiles::dot<kTile, 5, 7>();
    tiles::store<kTile>(sums + step * kTileNumbers / 2, tiles::kRowBytes);
  }

  void pack_weights(int32_t head, int64_t first, uint16_t* to) {
    for (int32_t row = 0; row < rows_; ++row) {
      const float* weights =
          scratch_.weights + ((int64_t)head * rows_ + row) * kWeightStride + first;
      uint16_t *even = to + row * kStepDims, *odd = to + (rows_ + row) * kStepDims;
      const bool is_seen = sees(token_of(row), first);
      for (int i = 0; i < kTileKeys; i += kLanes) {
        const Words rounded = is_seen ? BFloat16::round(load(weights + i)) : Words{};
        store(even + 2 * i, rounded >> 16);
        store(odd + 2 * i, rounded & 0xffff0000u);
      }
    }
  }

  void add_sums(int32_t head, const float* sums) {
    for (int32_t row = 0; row < rows_; ++row) {
      float* state = state_of((int64_t)head * rows_ + row);
      for (int32_t step = 0; step < steps_; ++step, state += kStepDims) {
        const float* even = sums + step * kTileNumbers / 2 + row * 16;
        const float* odd = even + rows_ * 16;
        PAGEDKV_UNROLL for (int i = 0; i < 16; i += kLanes) {
          store(state + i, add_flushed(load(state + i), load(even + i)));
          store(state + 16 + i, add_flushed(load(state + 16 + i), load(odd + i)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
