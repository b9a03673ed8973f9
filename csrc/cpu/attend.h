// The states of a tile (kernel_table.h): products with the keys, weights, sums of the values.
//
// Pages are walked on the outside and heads on the inside, so that a page is read as it lies in
// memory. A block of keys that many rows share is turned into float32 once; for few rows each
// number is converted where it is used.

#pragma once

#include "products.h"
#include "softmax.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

constexpr int64_t kBlockKeys = 32;         // of a converted block: 16 KiB at a head_dim of 128
constexpr int64_t kFewRowsBlockKeys = 16;  // read where they lie
constexpr int64_t kAheadKeys = 32;
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
  float* block;           // [kBlockKeys][padded head_dim]
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
  take(scratch.block, kBlockKeys * dim);
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

/// Reads one row into float32 in the order of the format's pairs; zeros up to the padding.
template <typename Format>
PAGEDKV_INLINE void load_row(const typename Format::Stored* from, int32_t head_dim, int32_t padded,
                             bool in_pairs, float* to) {
  int32_t d = 0;
  if (in_pairs) {
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      Floats a, b;
      Format::load_pair(from + d, a, b);
      store(to + d, a);
      store(to + d + kLanes, b);
    }
  }
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, Format::load_one(from + d));
  for (; d < head_dim; ++d) to[d] = Format::load_scalar(from[d]);
  for (; d < padded; ++d) to[d] = 0.0f;
}

template <typename Format>
inline void load_queries(const SplitTile& tile, bool in_pairs, float* to) {
  const AttentionParams& p = *tile.params;
  const int32_t group = p.num_heads / p.num_kv_heads, padded = padded_head_dim(p.head_dim);
  for (int64_t kv_head = tile.kv_head_begin; kv_head < tile.kv_head_end; ++kv_head) {
    for (int32_t t = 0; t < tile.num_tokens; ++t) {
      const auto* query = static_cast<const typename Format::Stored*>(p.query.data) +
                          tile.tokens[t].token * p.query.token_stride +
                          kv_head * group * p.query.head_stride;
      for (int32_t g = 0; g < group; ++g, to += padded) {
        load_row<Format>(query + g * p.query.head_stride, p.head_dim, padded, in_pairs, to);
      }
    }
  }
}

template <typename PageFormat>
class TileStates {
  using Stored = typename PageFormat::Stored;

 public:
  TileStates(const SplitTile& tile, void* memory)
      : tile_(tile),
        p_(*tile.params),
        group_(p_.num_heads / p_.num_kv_heads),
        rows_(tile.num_tokens * group_),
        padded_(padded_head_dim(p_.head_dim)),
        stride_(padded_ + kAccPadding) {
    const int32_t num_heads = tile.kv_head_end - tile.kv_head_begin;
    lay_out(static_cast<char*>(memory), num_heads * rows_, p_.head_dim, scratch_);
    registers_.num_pairs = p_.head_dim / (2 * kLanes);
    const int32_t left = p_.head_dim - registers_.num_pairs * 2 * kLanes;
    registers_.has_one = left > 0 && left <= kLanes;
    if (left > kLanes) ++registers_.num_pairs;  // of which the last is padded
    converts_ = rows_ >= kManyRows || p_.head_dim % kLanes != 0;
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
    const int32_t query_rows = kHas32Registers ? kMaxQueryRows : converts_ ? 3 : kMaxQueryRows;
    num_query_tiles_ = cut_rows(query_rows, scratch_.query_tiles);
    num_weight_tiles_ = cut_rows(kMaxWeightRows, scratch_.weight_tiles);
  }

  void run() {
    if (begin_ < end_) {
      find_rows();
      load_queries_of(p_.query_dtype);
      walk(p_.key_pages, scratch_.key_rows, scratch_.value_rows + begin_, end_ - begin_,
           p_.value_pages,
           [this](int32_t head, int64_t first, int64_t last, auto keys, Ahead& ahead) {
             multiply(head, first, last, keys, ahead);
           });
    }
    weigh();
    if (begin_ < end_) {
      walk(p_.value_pages, scratch_.value_rows, scratch_.next_rows, num_next_, p_.key_pages,
           [this](int32_t head, int64_t first, int64_t last, auto values, Ahead& ahead) {
             add(head, first, last, values, ahead);
           });
    }
  }

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

  void load_queries_of(DType dtype) {
    // Pages of the queries' own format come in its pairs; 8-bit pages in order.
    const bool in_pairs = p_.page_dtype == dtype;
    if (dtype == DType::BFloat16) return load_queries<BFloat16>(tile_, in_pairs, scratch_.queries);
    if (dtype == DType::Float16) return load_queries<Float16>(tile_, in_pairs, scratch_.queries);
    load_queries<Float32>(tile_, in_pairs, scratch_.queries);
  }

  // Sets where each key and value lies, but for its head.
  void find_rows() {
    const int64_t size = sizeof(Stored), block_size = p_.block_size;
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

  // Calls `use(head, first, last, rows, ahead)` for every block of keys and every head of the tile.
  // Behind the last block the first of the `num_after` rows `after` are fetched.
  template <typename Use>
  void walk(const PagesView& pages, const char** rows, const char** after, int64_t num_after,
            const PagesView& after_pages, Use use) {
    const int64_t step = converts_ ? kBlockKeys : kFewRowsBlockKeys, size = sizeof(Stored);
    num_after = num_after < step ? num_after : step;
    for (int64_t first = begin_ / step * step; first < end_; first += step) {
      const int64_t last = first + step < end_ ? first + step : end_;
      const int64_t start = first > begin_ ? first : begin_;
      for (int32_t head = 0; head < tile_.kv_head_end - tile_.kv_head_begin; ++head) {
        const int64_t kv_head = tile_.kv_head_begin + head;
        const int64_t offset = kv_head * pages.head_stride * size;
        Ahead ahead =
            last < end_ ? ahead_of(rows, last, last + step < end_ ? last + step : end_, pages, head)
                        : ahead_of(after, 0, num_after, after_pages, head);
        if (converts_) {
          for (int64_t key = start; key < last; ++key) {
            ahead.fetch(1);
            float* row = scratch_.block + (key - first) * padded_;
            load_row<PageFormat>(reinterpret_cast<const Stored*>(rows[key] + offset), p_.head_dim,
                                 padded_, true, row);
            scratch_.block_rows[key] = reinterpret_cast<const char*>(row);
          }
          ahead.next = ahead.last;
          use(head, start, last, BlockRows<Float32>{scratch_.block_rows, 0}, ahead);
        } else {
          use(head, start, last, BlockRows<PageFormat>{rows, offset}, ahead);
        }
      }
    }
  }

  // What to fetch while one head's block is computed. Heads that lie side by side are fetched
  // together, a share of the rows by each, so that memory is read in order.
  Ahead ahead_of(const char** rows, int64_t first, int64_t last, const PagesView& pages,
                 int32_t head) const {
    const int32_t num_heads = tile_.kv_head_end - tile_.kv_head_begin;
    const int64_t size = sizeof(Stored), head_bytes = p_.head_dim * size;
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

  template <typename Format>
  void multiply(int32_t head, int64_t first, int64_t last, BlockRows<Format> keys, Ahead& ahead) {
    for (int32_t i = 0; i < num_query_tiles_; ++i) {
      const RowTile& tile = scratch_.query_tiles[i];
      const int64_t begin = tile.any_begin > first ? tile.any_begin : first;
      const int64_t end = tile.any_end < last ? tile.any_end : last;
      if (begin >= end) continue;
      const int64_t row = (int64_t)head * rows_ + tile.row;
      multiply_keys<Format>(tile.count, scratch_.queries + row * padded_, padded_, keys, begin, end,
                            registers_, scratch_.weights + row * kWeightStride, kWeightStride,
                            ahead);
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

  // Turns products into weights; starts the states.
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
            found = weights_of(weights, token.begin, token.end, logits);
          }
          state[padded_] = found.max;
          state[padded_ + 1] = found.sum;
          for (int32_t d = 0; d < padded_; d += kLanes) store(state + d, Floats{});
        }
      }
    }
  }

  template <typename Format>
  void add(int32_t head, int64_t first, int64_t last, BlockRows<Format> values, Ahead& ahead) {
    for (int32_t n = 0; n < num_weight_tiles_; ++n) {
      const RowTile& tile = scratch_.weight_tiles[n];
      const int64_t row = (int64_t)head * rows_ + tile.row;
      const float* weights = scratch_.weights + row * kWeightStride;
      float* sums = tile_.states + row * stride_;
      // What every row sees is added for all of them at once, the rest row by row: a row must not
      // even multiply what it does not see by zero.
      int64_t begin = tile.all_begin > first ? tile.all_begin : first;
      int64_t end = tile.all_end < last ? tile.all_end : last;
      if (begin > end) begin = end = first;
      if (begin > first) add_alone(tile, weights, first, begin, values, sums, ahead);
      if (begin < end) {
        add_values<Format>(tile.count, weights, kWeightStride, values, begin, end, registers_, sums,
                           stride_, ahead);
      }
      if (end < last) add_alone(tile, weights, end, last, values, sums, ahead);
    }
  }

  template <typename Format>
  void add_alone(const RowTile& tile, const float* weights, int64_t first, int64_t last,
                 BlockRows<Format> values, float* sums, Ahead& ahead) {
    for (int32_t i = 0; i < tile.count; ++i) {
      add_one(tile.row + i, weights + i * kWeightStride, first, last, values, sums + i * stride_,
              ahead);
    }
  }

  // Adds to one row what it sees of [first, last).
  template <typename Format>
  void add_one(int32_t row, const float* weights, int64_t first, int64_t last,
               BlockRows<Format> values, float* sums, Ahead& ahead) {
    const auto add_range = [&](int64_t begin, int64_t end) {
      add_values<Format>(1, weights, 0, values, begin, end, registers_, sums, 0, ahead);
    };
    first = first > scratch_.begin[row] ? first : scratch_.begin[row];
    last = last < scratch_.end[row] ? last : scratch_.end[row];
    if (first >= last) return;
    int64_t plain_end = last < scratch_.plain_end[row] ? last : scratch_.plain_end[row];
    if (plain_end > first) {
      add_range(first, plain_end);
      first = plain_end;
    }
    // Where a mask may hide keys, runs of visible ones.
    const auto is_excluded = [&](int64_t key) {
      return __builtin_bit_cast(uint32_t, weights[key]) == 0x80000000u;
    };
    while (first < last) {
      while (first < last && is_excluded(first)) ++first;
      int64_t end = first;
      while (end < last && !is_excluded(end)) ++end;
      if (first < end) add_range(first, end);
      first = end;
    }
  }

  const SplitTile& tile_;
  const AttentionParams& p_;
  int32_t group_, rows_, padded_, stride_;
  Registers registers_;
  bool converts_;
  int32_t num_query_tiles_, num_weight_tiles_;
  int64_t num_next_ = 0;
  int32_t begin_ = (int32_t)kSplitTokens, end_ = 0;
  Scratch scratch_;
};

inline int64_t scratch_bytes(const AttentionParams& params, int32_t num_rows) {
  Scratch scratch;
  return lay_out(nullptr, num_rows, params.head_dim, scratch);
}

inline void attend(const SplitTile& tile, void* scratch) {
  switch (tile.params->page_dtype) {
    case DType::Float32:
      return TileStates<Float32>(tile, scratch).run();
    case DType::BFloat16:
      return TileStates<BFloat16>(tile, scratch).run();
    case DType::Float16:
      return TileStates<Float16>(tile, scratch).run();
    case DType::Float8E4M3:
      return TileStates<Float8>(tile, scratch).run();
    case DType::Int8:
      return TileStates<Int8>(tile, scratch).run();
  }
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
