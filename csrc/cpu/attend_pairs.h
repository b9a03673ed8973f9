// The states of a tile (kernel_table.h) from products of bfloat16 pairs; all else as in attend.h.
//
// Weights are rounded to bfloat16 before they meet the values; the sum that they are divided by is
// of the unrounded ones. A sum takes the values two keys at a time, those of keys 2i and 2i + 1
// together, whoever sees which of them: a key that a row does not see has a weight of 0, and for
// this row also values of 0, since 0 times infinity would be NaN.

#pragma once

#include "attend.h"
#include "pair_columns.h"
#include "stored_pairs.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

PAGEDKV_INLINE bool suits_pairs(const AttentionParams& p) {
  return p.page_dtype != DType::Float32 && p.page_dtype != DType::Float16 &&
         p.query_dtype == DType::BFloat16 && p.head_dim % kPairDims == 0;
}

/// Keys of a block that many rows share: as many as kBlockBytes holds, since sums are fetched and
/// stored once a block, and at least kBlockKeys.
PAGEDKV_INLINE int64_t keys_of_block(int64_t head_dim) {
  int64_t keys = kAheadKeys;
  while (keys > kBlockKeys && keys * head_dim * (int64_t)sizeof(uint16_t) > kBlockBytes) keys /= 2;
  return keys;
}
static_assert(kSplitTokens % kAheadKeys == 0 && kAheadKeys % kBlockKeys == 0 &&
              kBlockKeys % kColumnKeys == 0);

/// Weights rounded to pairs, in place: pair i stands where weight i was, and what a row does not
/// see of a register weighs nothing. What a mask excludes keeps its sign: no weight is negative.
struct PairedWeights {
  template <typename WeighAt>
  static PAGEDKV_INLINE void replace(float* row, int32_t begin, int32_t end, WeighAt weigh_at) {
    constexpr int32_t kStep = kWeighedTogether * kLanes;
    int32_t key = begin & -2 * kLanes;
    if (key + kLanes <= begin) {
      Floats second[1];
      weigh_at(key + kLanes, second);
      store_pairs(row + key / 2, Floats{}, second[0]);
      key += 2 * kLanes;
    }
    for (; key + kStep - kLanes < end; key += kStep) {
      Floats weights[kWeighedTogether];
      weigh_at(key, weights);
      PAGEDKV_UNROLL for (int i = 0; i < kWeighedTogether; i += 2) {
        store_pairs(row + key / 2 + i * kLanes / 2, weights[i], weights[i + 1]);
      }
    }
    for (; key < end; key += 2 * kLanes) {
      Floats first[1], second[1] = {};
      weigh_at(key, first);
      if (key + kLanes < end) weigh_at(key + kLanes, second);
      store_pairs(row + key / 2, first[0], second[0]);
    }
  }
  static void fill_with_nan(float* row, int32_t begin, int32_t end) {
    const float both = __builtin_bit_cast(float, 0x7fc07fc0u);
    for (int32_t pair = begin / 2; 2 * pair < end; ++pair) row[pair] = both;
  }

 private:
  static PAGEDKV_INLINE void store_pairs(float* to, Floats first, Floats second) {
    store(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }
};

template <typename PageFormat>
class PairStates : TilePages {
  using Stored = typename PageFormat::Stored;
  static constexpr bool kIsNarrow = sizeof(Stored) == 1;

 public:
  PairStates(const SplitTile& tile, void* memory)
      : TilePages(tile, memory, sizeof(Stored)),
        is_many_(rows_ >= kManyRows),
        block_keys_(is_many_ ? keys_of_block(p_.head_dim) : kBlockKeys) {
    queries_ = reinterpret_cast<uint16_t*>(scratch_.queries);
    block_ = reinterpret_cast<uint16_t*>(scratch_.block);
    cut_rows(is_many_ ? kColumnRows : kMaxQueryRows, kMaxWeightRows);
  }

  void run() {
    if (!is_empty()) {
      find_rows();
      copy_queries();
      walk_blocks(p_.key_pages, scratch_.key_rows, block_keys_, scratch_.value_rows + begin_,
                  end_ - begin_, p_.value_pages,
                  [this](int32_t head, int64_t first, int64_t last, int64_t offset, Ahead& ahead) {
                    const BlockRows<PageFormat> keys = {scratch_.key_rows, offset};
                    if (is_many_) return multiply_upright(head, first, last, keys, ahead);
                    if constexpr (kIsNarrow) {
                      widen_block(first, last, keys, ahead);
                      multiply(head, first, last, {scratch_.block_rows, 0}, ahead);
                    } else {
                      multiply(head, first, last, keys, ahead);
                    }
                  });
    }
    weigh<PairedWeights>();
    if (is_empty()) return;
    walk_blocks(p_.value_pages, scratch_.value_rows, block_keys_, scratch_.next_rows, num_next_,
                p_.key_pages,
                [this](int32_t head, int64_t first, int64_t last, int64_t offset, Ahead& ahead) {
                  const BlockRows<PageFormat> values = {scratch_.value_rows, offset};
                  if constexpr (!kIsNarrow) {
                    if (!is_many_) return add(head, first, last, values, ValueRows{values}, ahead);
                  }
                  pair_block(first, last, values, ahead);
                  add(head, first, last, values, PairedRows{block_, first / 2, p_.head_dim}, ahead);
                });
  }

 private:
  void copy_queries() {
    uint16_t* to = queries_;
    for (int64_t kv_head = tile_.kv_head_begin; kv_head < tile_.kv_head_end; ++kv_head) {
      for (int32_t t = 0; t < tile_.num_tokens; ++t) {
        const auto* from = static_cast<const uint16_t*>(p_.query.data) +
                           tile_.tokens[t].token * p_.query.token_stride +
                           kv_head * group_ * p_.query.head_stride;
        for (int32_t g = 0; g < group_; ++g, to += p_.head_dim) {
          __builtin_memcpy(to, from + g * p_.query.head_stride, p_.head_dim * sizeof *to);
        }
      }
    }
  }

  void multiply(int32_t head, int64_t first, int64_t last, BlockRows<BFloat16> keys, Ahead& ahead) {
    for (int32_t i = 0; i < num_query_tiles_; ++i) {
      const RowTile& tile = scratch_.query_tiles[i];
      const int64_t begin = tile.any_begin > first ? tile.any_begin : first;
      const int64_t end = tile.any_end < last ? tile.any_end : last;
      if (begin >= end) continue;
      const int64_t row = (int64_t)head * rows_ + tile.row;
      multiply_key_pairs(tile.count, queries_ + row * p_.head_dim, p_.head_dim, keys, begin, end,
                         scratch_.weights + row * kWeightStride, kWeightStride, ahead);
    }
  }

  // Sets the keys of a block on end, for all rows; keys that nobody sees need not be there.
  void multiply_upright(int32_t head, int64_t first, int64_t last, BlockRows<PageFormat> keys,
                        Ahead& ahead) {
    auto* columns = reinterpret_cast<uint32_t*>(block_);
    const int64_t start = first / block_keys_ * block_keys_;
    const int64_t num_keys = round_up(last - start, kColumnKeys);
    for (int64_t group = 0; group < num_keys / kLanes; ++group) {
      const Stored* row[kLanes];
      PAGEDKV_UNROLL for (int i = 0; i < kLanes; ++i) {
        const int64_t key = start + group * kLanes + i;
        row[i] = keys[key < first ? first : key < last ? key : last - 1];
      }
      for (int64_t d = 0; d < p_.head_dim; d += kPairDims) {
        Words part[kLanes];
        PAGEDKV_UNROLL for (int i = 0; i < kLanes; ++i) part[i] =
            load_words<PageFormat>(row[i] + d);
        transpose_words(part, columns + group * group_words(p_.head_dim) + d / 2 * kLanes);
      }
    }
    for (int32_t i = 0; i < num_query_tiles_; ++i) {
      ahead.fetch(block_keys_ / num_query_tiles_ + 1);
      const RowTile& tile = scratch_.query_tiles[i];
      if (tile.any_begin >= last || tile.any_end <= first) continue;
      const int64_t at = (int64_t)head * rows_ + tile.row;
      multiply_key_columns(tile.count, queries_ + at * p_.head_dim, p_.head_dim, columns, num_keys,
                           scratch_.weights + at * kWeightStride + start, kWeightStride);
    }
  }

  void widen_block(int64_t first, int64_t last, BlockRows<PageFormat> keys, Ahead& ahead) {
    for (int64_t key = first; key < last; ++key) {
      ahead.fetch(1);
      uint16_t* row = block_ + key % kBlockKeys * p_.head_dim;
      for (int64_t d = 0; d < p_.head_dim; d += kPairDims)
        store(row + d, load_words<PageFormat>(keys[key] + d));
      scratch_.block_rows[key] = reinterpret_cast<const char*>(row);
    }
    ahead.next = ahead.last;
  }

  // Pairs the values of a block for all rows. Keys that nobody sees need not be there.
  void pair_block(int64_t first, int64_t last, BlockRows<PageFormat> values, Ahead& ahead) {
    for (int64_t pair = first / 2; 2 * pair < last; ++pair) {
      if (!is_many_) ahead.fetch(2);
      const int64_t a = 2 * pair < first ? first : 2 * pair;
      const int64_t b = 2 * pair + 1 < last ? 2 * pair + 1 : last - 1;
      uint16_t* to = block_ + (pair - first / 2) * 2 * p_.head_dim;
      for (int32_t d = 0; d < p_.head_dim; d += kPairDims, to += 2 * kPairDims) {
        Words both[2];
        load_two<PageFormat>(values[a] + d, values[b] + d, both[0], both[1]);
        store(to, both[0]);
        store(to + kPairDims, both[1]);
      }
    }
  }

  template <class Values>
  void add(int32_t head, int64_t first, int64_t last, BlockRows<PageFormat> rows,
           const Values& values, Ahead& ahead) {
    // Of many rows each tile fetches its share.
    Ahead nothing = {};
    Ahead& by_pairs = is_many_ ? nothing : ahead;
    for (int32_t n = 0; n < num_weight_tiles_; ++n) {
      if (is_many_) ahead.fetch(block_keys_ / num_weight_tiles_ + 1);
      const RowTile& tile = scratch_.weight_tiles[n];
      const int64_t row = (int64_t)head * rows_ + tile.row;
      const float* weights = scratch_.weights + row * kWeightStride;
      float* sums = tile_.states + row * stride_;
      // Pairs that every row sees are added for all of them at once, the rest row by row.
      int64_t begin = tile.all_begin > first ? tile.all_begin : first;
      int64_t end = tile.all_end < last ? tile.all_end : last;
      begin = (begin + 1) / 2, end = end / 2;  // pairs
      if (begin >= end) {
        add_alone(tile, weights, first, last, rows, sums);
        continue;
      }
      add_alone(tile, weights, first, 2 * begin, rows, sums);
      add_value_pairs(tile.count, weights, kWeightStride, values, begin, end, p_.head_dim, sums,
                      stride_, by_pairs);
      add_alone(tile, weights, 2 * end, last, rows, sums);
    }
  }

  // Adds to each row what it sees of [first, last), pair by pair.
  void add_alone(const RowTile& tile, const float* weights, int64_t first, int64_t last,
                 BlockRows<PageFormat> rows, float* sums) {
    for (int32_t i = 0; i < tile.count; ++i, weights += kWeightStride, sums += stride_) {
      const int32_t row = tile.row + i;
      const int64_t begin = first > scratch_.begin[row] ? first : scratch_.begin[row];
      const int64_t end = last < scratch_.end[row] ? last : scratch_.end[row];
      for (int64_t pair = begin / 2; 2 * pair < end; ++pair) {
        const auto both = __builtin_bit_cast(uint32_t, weights[pair]);
        const bool sees_first = 2 * pair >= begin && (both & 0xffffu) != 0x8000u;
        const bool sees_second = 2 * pair + 1 < end && (both >> 16) != 0x8000u;
        if (sees_first || sees_second) add_pair(both, pair, sees_first, sees_second, rows, sums);
      }
    }
  }

  void add_pair(uint32_t weights, int64_t pair, bool sees_first, bool sees_second,
                BlockRows<PageFormat> rows, float* sums) {
    if (!sees_first) weights &= 0xffff0000u;
    if (!sees_second) weights &= 0xffffu;
    const Words weight = Words{} + weights;
    for (int32_t d = 0; d < p_.head_dim; d += kPairDims, sums += kPairDims) {
      // Whose value is not seen lends its place to the other's, and nothing of it is left.
      Words both[2];
      load_two<PageFormat>(rows[sees_first ? 2 * pair : 2 * pair + 1] + d,
                           rows[sees_second ? 2 * pair + 1 : 2 * pair] + d, both[0], both[1]);
      const uint32_t seen = (sees_first ? 0xffffu : 0) | (sees_second ? 0xffff0000u : 0);
      store(sums, dot(load(sums), weight, both[0] & seen));
      store(sums + kLanes, dot(load(sums + kLanes), weight, both[1] & seen));
    }
  }

  const bool is_many_;  // so that a block is worth being brought together
  const int64_t block_keys_;
  uint16_t* queries_;  // [num_rows][head_dim]
  uint16_t* block_;    // keys on end, or [block_keys_][head_dim]; or values as PairedRows has them
};

inline void attend_in_pairs(const SplitTile& tile, void* scratch) {
  if (!suits_pairs(*tile.params)) return attend(tile, scratch);
  switch (tile.params->page_dtype) {
    case DType::Int8:
      return PairStates<Int8>(tile, scratch).run();
    case DType::Float8E4M3:
      return PairStates<Float8>(tile, scratch).run();
    default:
      PairStates<BFloat16>(tile, scratch).run();
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
