// What the two forms of attention in tile registers (attend_tiles.h) share: the working memory,
// where keys and values lie, and the way from products to weights.

#pragma once

#include "../rows.h"
#include "packing.h"
#include "tiles.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int32_t kFewRows = 8;       // of a KV head; twice as many rows fill a tile register
constexpr int64_t kFewStepKeys = 64;  // multiplied side by side in the form for few rows
constexpr int32_t kBlockRows = 32;    // multiplied side by side in the form for many
constexpr int64_t kSplitTiles = kSplitTokens / kTileKeys;
static_assert(kSplitTokens % kFewStepKeys == 0);

/// The parts of the working memory.
struct TileScratch {
  const uint16_t** key_rows;    // [kSplitTokens], of KV head 0; null where no row sees the key
  const uint16_t** value_rows;  // the same; null also for what the only token's mask excludes
  uint16_t* zeros;              // [head_dim]
  uint16_t* queries;            // as tiles, of all heads (few), or as rows of one head (many)
  float* weights;               // [rows of all heads (few) or kBlockRows (many)][kWeightStride]
  uint16_t* packed_weights;     // two tiles (few) or [kBlockRows][kSplitTokens] (many)
  // few:
  uint16_t* copies;  // [kFewStepKeys][head_dim], of keys or values with rows that nobody sees
  float* products;   // [kFewStepKeys][kFewRows]
  float* sums;       // [2][head_dim / 32] tiles
  // many, of one head:
  uint16_t* keys;     // [kSplitTiles][head_dim / 32] tiles
  uint16_t* values;   // [kSplitTiles / 2][head_dim / 32][even, odd] tiles
  float* block_sums;  // [kBlockRows][head_dim]
};

inline int64_t lay_out_tiles(char* base, int32_t num_rows, int32_t head_dim, TileScratch& scratch) {
  int64_t used = 0;
  const auto take = [&]<typename Part>(Part*& part, int64_t count) {
    part = reinterpret_cast<Part*>(base + used);
    used += round_up(count * (int64_t)sizeof(Part), 64);
  };
  const int64_t dim = head_dim, rows = round_up(num_rows, kBlockRows);
  take(scratch.key_rows, kSplitTokens);
  take(scratch.value_rows, kSplitTokens);
  take(scratch.zeros, dim);
  take(scratch.queries, rows * dim);
  take(scratch.weights, rows * kWeightStride);
  take(scratch.packed_weights, kBlockRows * kSplitTokens);
  take(scratch.copies, kFewStepKeys * dim);
  take(scratch.products, kFewStepKeys * kFewRows);
  take(scratch.sums, 2 * dim / kStepDims * kTileNumbers / 2);
  take(scratch.keys, kSplitTokens * dim);
  take(scratch.values, kSplitTokens * dim);
  take(scratch.block_sums, kBlockRows * dim);
  return used;
}

class TiledRows {
 protected:
  TiledRows(const SplitTile& tile, void* memory)
      : tile_(tile),
        p_(*tile.params),
        num_heads_(tile.kv_head_end - tile.kv_head_begin),
        group_(p_.num_heads / p_.num_kv_heads),
        rows_(tile.num_tokens * group_),
        steps_(p_.head_dim / (int32_t)kStepDims),
        stride_(p_.head_dim + kAccPadding) {
    lay_out_tiles(static_cast<char*>(memory), num_heads_ * rows_, p_.head_dim, scratch_);
    logits_.scale = p_.scale;
    logits_.soft_cap = p_.soft_cap;
    logits_.has_soft_cap = p_.soft_cap != 0.0f;
    logits_.has_alibi = p_.alibi_slopes != nullptr;
    logits_.key_scales = logits_.value_scales = nullptr;
    for (int32_t t = 0; t < tile.num_tokens; ++t) {
      const TileToken& token = tile.tokens[t];
      if (token.begin >= token.end) continue;
      begin_ = token.begin < begin_ ? token.begin : begin_;
      end_ = token.end > end_ ? token.end : end_;
    }
    for (int64_t row = 0; row < (int64_t)num_heads_ * rows_; ++row) {
      __builtin_memset(state_of(row), 0, p_.head_dim * sizeof(float));
      set_row_state(row, {kMinusInfinity, 0.0f});
    }
    if (begin_ < end_) find_rows();
  }

  bool is_empty() const { return begin_ >= end_; }

  float* state_of(int64_t row) { return tile_.states + row * stride_; }

  void set_row_state(int64_t row, const RowState& found) {
    float* state = state_of(row) + p_.head_dim;
    state[0] = found.max;
    state[1] = found.sum;
  }

  bool is_excluded(const TileToken& token, int64_t key) const {
    if (key < token.mask_begin) return false;
    const int64_t at = token.token * p_.mask_stride + key + token.mask_shift;
    return (p_.bool_mask && !p_.bool_mask[at]) ||
           (p_.float_mask && p_.float_mask[at] == kMinusInfinity);
  }

  void find_rows() {
    const int64_t block_size = p_.block_size;
    __builtin_memset(scratch_.zeros, 0, p_.head_dim * sizeof(uint16_t));
    const int64_t first = begin_ / kFewStepKeys * kFewStepKeys, last = round_up(end_, kFewStepKeys);
    for (int64_t key = first; key < last; ++key) {
      scratch_.key_rows[key] = scratch_.value_rows[key] = nullptr;
      if (key < begin_ || key >= end_) continue;
      const int64_t position = tile_.split_begin + key;
      const int64_t page = tile_.pages[position / block_size], offset = position % block_size;
      scratch_.key_rows[key] = static_cast<const uint16_t*>(p_.key_pages.data) +
                               page * p_.key_pages.block_stride +
                               offset * p_.key_pages.token_stride;
      if (tile_.num_tokens == 1 && is_excluded(tile_.tokens[0], key)) continue;
      scratch_.value_rows[key] = static_cast<const uint16_t*>(p_.value_pages.data) +
                                 page * p_.value_pages.block_stride +
                                 offset * p_.value_pages.token_stride;
    }
  }

  const uint16_t* query_of(int32_t head, int32_t row) const {
    const int64_t query_head = (int64_t)(tile_.kv_head_begin + head) * group_ + row % group_;
    return static_cast<const uint16_t*>(p_.query.data) +
           token_of(row).token * p_.query.token_stride + query_head * p_.query.head_stride;
  }

  /// Turns the products of one row into weights, with zeros up to the ends of tiles.
  void weigh(int32_t head, int32_t row, float* weights) {
    const TileToken& token = token_of(row);
    if (token.begin >= token.end) return;
    logits_.position = token.position - tile_.split_begin;
    logits_.mask_begin = token.mask_begin;
    logits_.mask_shift = token.mask_shift;
    logits_.bool_mask = p_.bool_mask ? p_.bool_mask + token.token * p_.mask_stride : nullptr;
    logits_.float_mask = p_.float_mask ? p_.float_mask + token.token * p_.mask_stride : nullptr;
    if (logits_.has_alibi) {
      logits_.alibi_slope = p_.alibi_slopes[(tile_.kv_head_begin + head) * group_ + row % group_];
    }
    set_row_state((int64_t)head * rows_ + row,
                  weights_of(weights, token.begin, token.end, logits_));
    for (int64_t key = token.begin / kTileKeys * kTileKeys; key < token.begin; ++key)
      weights[key] = 0.0f;
    for (int64_t key = token.end; key < round_up(token.end, kTileKeys); ++key) weights[key] = 0.0f;
  }

  const TileToken& token_of(int32_t row) const { return tile_.tokens[row / group_]; }

  /// Whether the token sees any of the 16 keys from `first`: else no weights were written there.
  static bool sees(const TileToken& token, int64_t first) {
    return token.begin < first + kTileKeys && token.end > first && token.begin < token.end;
  }

  /// Makes zeros positive, whose sign the two forms do not agree on, and brings the numbers into
  /// the order of the other kernels (formats.h): even before odd, by pairs of registers rather than
  /// by 32.
  void finish_sums() {
    for (int64_t row = 0; row < (int64_t)num_heads_ * rows_; ++row) {
      float* sums = state_of(row);
      for (int32_t step = 0; step < steps_; ++step, sums += kStepDims) {
        float found[kStepDims];
        __builtin_memcpy(found, sums, sizeof found);
        for (int pair = 0; pair < 16 / kLanes; ++pair) {
          float* to = sums + 2 * pair * kLanes;
          store(to, load(found + pair * kLanes) + 0.0f);
          store(to + kLanes, load(found + 16 + pair * kLanes) + 0.0f);
        }
      }
    }
  }

  const SplitTile& tile_;
  const AttentionParams& p_;
  const int32_t num_heads_, group_, rows_, steps_, stride_;
  int32_t begin_ = (int32_t)kSplitTokens, end_ = 0;  // what any row sees
  RowLogits logits_;
  TileScratch scratch_;
};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
