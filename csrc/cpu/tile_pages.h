// What the kernels of attention share that walk over pages (attend.h, attend_pairs.h): the parts of
// the working memory, where keys and values lie, the order in which they are read, and the way from
// products to weights.

#pragma once

#include "products.h"
#include "softmax.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int64_t kBlockKeys = 32;         // of a converted block: 16 KiB at a head_dim of 128
constexpr int64_t kFewRowsBlockKeys = 16;  // read where they lie
constexpr int64_t kBlockBytes = 16384;     // of a converted block at least, whatever the head_dim
constexpr int64_t kAheadKeys = 128;
constexpr int32_t kManyRows = 9;  // from here on converting once is worth it
// More than a split, so that rows do not all fall into the same sets of the cache.
constexpr int64_t kWeightStride = kSplitTokens + 16;
constexpr int64_t kScaleFloats = kSplitTokens + 16;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

PAGEDKV_INLINE int32_t padded_head_dim(int32_t head_dim) { return (int32_t)round_up(head_dim, 16); }

/// Some rows that go through the products together, and the keys that all or any of them see.
struct RowTile {
  int32_t row, count;
  int32_t any_begin, any_end;
  int32_t all_begin, all_end;  // and that no mask may hide
};

/// The parts of the working memory.
struct Scratch {
  float* queries;         // [num_rows][padded head_dim]
  float* weights;         // [num_rows][kWeightStride]
  float* block;           // [kBlockKeys][padded head_dim], or kBlockBytes
  const char** key_rows;  // [kSplitTokens]
  const char** value_rows;
  const char** block_rows;  // [kSplitTokens]; only those of one block are set
  const char** next_rows;   // [kAheadKeys]: the first keys of the next split
  float *key_scales, *value_scales;
  int32_t *begin, *plain_end, *end;  // [rows of one kv head]
  RowTile *query_tiles, *weight_tiles;
};

/// Lays the parts out from `base`; returns the bytes that they take.
inline int64_t lay_out(char* base, int32_t num_rows, int32_t head_dim, Scratch& scratch) {
  int64_t used = 0;
  const auto take = [&]<typename Part>(Part*& part, int64_t count) {
    part = reinterpret_cast<Part*>(reinterpret_cast<uintptr_t>(base) + used);
    used += round_up(count * (int64_t)sizeof(Part), 64);
  };
  const int64_t dim = padded_head_dim(head_dim);
  take(scratch.queries, num_rows * dim);
  take(scratch.weights, num_rows * kWeightStride);
  const int64_t least = kBlockBytes / (int64_t)sizeof(float);
  take(scratch.block, kBlockKeys * dim > least ? kBlockKeys * dim : least);
  take(scratch.key_rows, kSplitTokens);
  take(scratch.value_rows, kSplitTokens);
  take(scratch.block_rows, kSplitTokens);
  take(scratch.next_rows, kAheadKeys);
  take(scratch.key_scales, kScaleFloats);
  take(scratch.value_scales, kScaleFloats);
  take(scratch.begin, num_rows);
  take(scratch.plain_end, num_rows);
  take(scratch.end, num_rows);
  take(scratch.query_tiles, num_rows);
  take(scratch.weight_tiles, num_rows);
  return used;
}

class TilePages {
 protected:
  /// For pages whose numbers take `number_bytes`.
  TilePages(const SplitTile& tile, void* memory, int64_t number_bytes)
      : tile_(tile),
        p_(*tile.params),
        group_(p_.num_heads / p_.num_kv_heads),
        rows_(tile.num_tokens * group_),
        padded_(padded_head_dim(p_.head_dim)),
        stride_(padded_ + kAccPadding),
        number_bytes_(number_bytes) {
    const int32_t num_heads = tile.kv_head_end - tile.kv_head_begin;
    lay_out(static_cast<char*>(memory), num_heads * rows_, p_.head_dim, scratch_);
    for (int32_t t = 0; t < tile.num_tokens; ++t) {
      const TileToken& token = tile.tokens[t];
      const int32_t plain_end = token.end < token.mask_begin ? token.end : token.mask_begin;
      for (int32_t g = 0; g < group_; ++g) {
        scratch_.begin[t * group_ + g] = token.begin;
        scratch_.plain_end[t * group_ + g] = plain_end;
        scratch_.end[t * group_ + g] = token.end;
      }
      if (token.begin >= token.end) continue;
      begin_ = token.begin < begin_ ? token.begin : begin_;
      end_ = token.end > end_ ? token.end : end_;
    }
  }

  bool is_empty() const { return begin_ >= end_; }

  void cut_rows(int32_t query_rows, int32_t weight_rows) {
    num_query_tiles_ = cut_rows(query_rows, scratch_.query_tiles);
    num_weight_tiles_ = cut_rows(weight_rows, scratch_.weight_tiles);
  }

  // Sets where each key and value lies, but for its head.
  void find_rows() {
    const int64_t size = number_bytes_, block_size = p_.block_size;
    for (int64_t key = begin_; key < end_;) {
      const int64_t position = tile_.split_begin + key;
      const int64_t page = tile_.pages[position / block_size], offset = position % block_size;
      const int64_t left = end_ - key;
      const int64_t count = block_size - offset < left ? block_size - offset : left;
      const char* keys =
          static_cast<const char*>(p_.key_pages.data) +
          (page * p_.key_pages.block_stride + offset * p_.key_pages.token_stride) * size;
      const char* values =
          static_cast<const char*>(p_.value_pages.data) +
          (page * p_.value_pages.block_stride + offset * p_.value_pages.token_stride) * size;
      for (int64_t i = 0; i < count; ++i, ++key) {
        scratch_.key_rows[key] = keys + i * p_.key_pages.token_stride * size;
        scratch_.value_rows[key] = values + i * p_.value_pages.token_stride * size;
      }
    }
    const int64_t next = tile_.split_begin + kSplitTokens;
    for (; num_next_ < kAheadKeys && next + num_next_ < tile_.prefetch_end; ++num_next_) {
      const int64_t position = next + num_next_;
      scratch_.next_rows[num_next_] =
          static_cast<const char*>(p_.key_pages.data) +
          (tile_.pages[position / block_size] * p_.key_pages.block_stride +
           position % block_size * p_.key_pages.token_stride) *
              size;
    }
  }

  /// Calls `use(head, first, last, offset, ahead)` for every block of `step` keys and every head of
  /// the tile, `offset` being that of the head in a row. Meanwhile a later block is fetched, or
  /// behind the last one the first of the `num_after` rows `after`.
  template <typename Use>
  void walk_blocks(const PagesView& pages, const char** rows, int64_t step, const char** after,
                   int64_t num_after, const PagesView& after_pages, Use use) {
    // Numbers of one byte are used up so fast that the next block would come too late.
    const int64_t distance = number_bytes_ == 1 ? 2 * step : step;
    const int64_t after_begin = round_up(end_, step);
    const auto rest = [&](int64_t count) { return count < num_after ? count : num_after; };
    for (int64_t first = begin_ / step * step; first < end_; first += step) {
      const int64_t last = first + step < end_ ? first + step : end_;
      const int64_t start = first > begin_ ? first : begin_;
      for (int32_t head = 0; head < tile_.kv_head_end - tile_.kv_head_begin; ++head) {
        const int64_t kv_head = tile_.kv_head_begin + head;
        const int64_t next = first + distance, behind = next - after_begin;
        Ahead ahead =
            next < end_ ? ahead_of(rows, next, next + step < end_ ? next + step : end_, pages, head)
                        : ahead_of(after, rest(behind), rest(behind + step), after_pages, head);
        use(head, start, last, kv_head * pages.head_stride * number_bytes_, ahead);
      }
    }
  }

  // Fetches the scales of one head's keys or values; null when there are none.
  const float* scales_of(const ScalesView& scales, int32_t kv_head, float* to) {
    if (scales.data == nullptr) return nullptr;
    const int64_t block_size = p_.block_size;
    for (int64_t key = begin_; key < end_;) {
      const int64_t position = tile_.split_begin + key;
      const int64_t page = tile_.pages[position / block_size], offset = position % block_size;
      const float* from = scales.data + page * scales.block_stride + offset * scales.token_stride +
                          kv_head * scales.head_stride;
      const int64_t left = end_ - key;
      const int64_t count = block_size - offset < left ? block_size - offset : left;
      for (int64_t i = 0; i < count; ++i) to[key + i] = from[i * scales.token_stride];
      key += count;
    }
    return to;
  }

  // Turns products into weights, laid out as `Layout` does (softmax.h); starts the states.
  template <class Layout = PlainWeights>
  void weigh() {
    RowLogits logits;
    logits.scale = p_.scale;
    logits.soft_cap = p_.soft_cap;
    logits.has_soft_cap = p_.soft_cap != 0.0f;
    logits.has_alibi = p_.alibi_slopes != nullptr;
    float* state = tile_.states;
    float* weights = scratch_.weights;
    for (int32_t kv_head = tile_.kv_head_begin; kv_head < tile_.kv_head_end; ++kv_head) {
      logits.key_scales = scales_of(p_.key_scales, kv_head, scratch_.key_scales);
      logits.value_scales = scales_of(p_.value_scales, kv_head, scratch_.value_scales);
      for (int32_t t = 0; t < tile_.num_tokens; ++t) {
        const TileToken& token = tile_.tokens[t];
        logits.position = token.position - tile_.split_begin;
        logits.mask_begin = token.mask_begin;
        logits.mask_shift = token.mask_shift;
        logits.bool_mask = p_.bool_mask ? p_.bool_mask + token.token * p_.mask_stride : nullptr;
        logits.float_mask = p_.float_mask ? p_.float_mask + token.token * p_.mask_stride : nullptr;
        for (int32_t g = 0; g < group_; ++g, state += stride_, weights += kWeightStride) {
          RowState found = {kMinusInfinity, 0.0f};
          if (token.begin < token.end) {
            if (logits.has_alibi) logits.alibi_slope = p_.alibi_slopes[kv_head * group_ + g];
            found = weights_of<Layout>(weights, token.begin, token.end, logits);
          }
          state[padded_] = found.max;
          state[padded_ + 1] = found.sum;
          for (int32_t d = 0; d < padded_; d += kLanes) store(state + d, Floats{});
        }
      }
    }
  }

  /// Whether a weight stands for a key that a mask excludes.
  static bool is_excluded(float weight) {
    return __builtin_bit_cast(uint32_t, weight) == 0x80000000u;
  }

  const SplitTile& tile_;
  const AttentionParams& p_;
  int32_t group_, rows_, padded_, stride_;
  int64_t number_bytes_;
  int32_t num_query_tiles_, num_weight_tiles_;
  int64_t num_next_ = 0;
  int32_t begin_ = (int32_t)kSplitTokens, end_ = 0;
  Scratch scratch_;

 private:
  int32_t cut_rows(int32_t most, RowTile* tiles) const {
    int32_t num_tiles = 0;
    for (int32_t row = 0; row < rows_; row += most) {
      RowTile tile = {row,
                      rows_ - row < most ? rows_ - row : most,
                      (int32_t)kSplitTokens,
                      0,
                      0,
                      (int32_t)kSplitTokens};
      for (int32_t i = row; i < row + tile.count; ++i) {
        const int32_t begin = scratch_.begin[i], end = scratch_.end[i];
        const int32_t plain_end = scratch_.plain_end[i];
        if (begin < end) {
          tile.any_begin = begin < tile.any_begin ? begin : tile.any_begin;
          tile.any_end = end > tile.any_end ? end : tile.any_end;
        }
        tile.all_begin = begin > tile.all_begin ? begin : tile.all_begin;
        tile.all_end = plain_end < tile.all_end ? plain_end : tile.all_end;
      }
      tiles[num_tiles++] = tile;
    }
    return num_tiles;
  }

  // What to fetch while one head's block is computed. Heads that lie side by side are fetched
  // together, a share of the rows by each, so that memory is read in order.
  Ahead ahead_of(const char** rows, int64_t first, int64_t last, const PagesView& pages,
                 int32_t head) const {
    const int32_t num_heads = tile_.kv_head_end - tile_.kv_head_begin;
    const int64_t size = number_bytes_, head_bytes = p_.head_dim * size;
    Ahead ahead = {rows, first, last, 0, (int32_t)head_bytes, 0, (int32_t)((head_bytes + 63) / 64)};
    if (pages.head_stride == p_.head_dim && num_heads <= last - first) {
      ahead.next = first + (last - first) * head / num_heads;
      ahead.last = first + (last - first) * (head + 1) / num_heads;
      ahead.offset = tile_.kv_head_begin * head_bytes;
      ahead.bytes = (int32_t)(num_heads * head_bytes);
    } else {
      ahead.offset = (tile_.kv_head_begin + head) * pages.head_stride * size;
    }
    return ahead;
  }
};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
