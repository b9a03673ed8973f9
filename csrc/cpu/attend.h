// The states of a tile (kernel_table.h): products with the keys, weights, sums of the values.
//
// Pages are walked on the outside and heads on the inside, so that a page is read as it lies in
// memory. A block of keys that many rows share is turned into float32 once; for few rows each
// number is converted where it is used.

#pragma once

#include "tile_pages.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

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
class TileStates : TilePages {
  using Stored = typename PageFormat::Stored;

 public:
  TileStates(const SplitTile& tile, void* memory) : TilePages(tile, memory, sizeof(Stored)) {
    registers_.num_pairs = p_.head_dim / (2 * kLanes);
    const int32_t left = p_.head_dim - registers_.num_pairs * 2 * kLanes;
    registers_.has_one = left > 0 && left <= kLanes;
    if (left > kLanes) ++registers_.num_pairs;  // of which the last is padded
    converts_ = rows_ >= kManyRows || p_.head_dim % kLanes != 0;
    cut_rows(kHas32Registers || !converts_ ? kMaxQueryRows : 3, kMaxWeightRows);
  }

  void run() {
    if (!is_empty()) {
      find_rows();
      load_queries_of(p_.query_dtype);
      walk(p_.key_pages, scratch_.key_rows, scratch_.value_rows + begin_, end_ - begin_,
           p_.value_pages,
           [this](int32_t head, int64_t first, int64_t last, auto keys, Ahead& ahead) {
             multiply(head, first, last, keys, ahead);
           });
    }
    weigh();
    if (!is_empty()) {
      walk(p_.value_pages, scratch_.value_rows, scratch_.next_rows, num_next_, p_.key_pages,
           [this](int32_t head, int64_t first, int64_t last, auto values, Ahead& ahead) {
             add(head, first, last, values, ahead);
           });
    }
  }

 private:
  void load_queries_of(DType dtype) {
    // Pages of the queries' own format come in its pairs; 8-bit pages in order.
    const bool in_pairs = p_.page_dtype == dtype;
    if (dtype == DType::BFloat16) return load_queries<BFloat16>(tile_, in_pairs, scratch_.queries);
    if (dtype == DType::Float16) return load_queries<Float16>(tile_, in_pairs, scratch_.queries);
    load_queries<Float32>(tile_, in_pairs, scratch_.queries);
  }

  // Calls `use(head, first, last, rows, ahead)` for every block of keys and every head.
  template <typename Use>
  void walk(const PagesView& pages, const char** rows, const char** after, int64_t num_after,
            const PagesView& after_pages, Use use) {
    const int64_t step = converts_ ? kBlockKeys : kFewRowsBlockKeys;
    walk_blocks(pages, rows, step, after, num_after, after_pages,
                [&](int32_t head, int64_t first, int64_t last, int64_t offset, Ahead& ahead) {
                  if (!converts_) {
                    return use(head, first, last, BlockRows<PageFormat>{rows, offset}, ahead);
                  }
                  for (int64_t key = first; key < last; ++key) {
                    ahead.fetch(1);
                    float* row = scratch_.block + key % kBlockKeys * padded_;
                    load_row<PageFormat>(reinterpret_cast<const Stored*>(rows[key] + offset),
                                         p_.head_dim, padded_, true, row);
                    scratch_.block_rows[key] = reinterpret_cast<const char*>(row);
                  }
                  ahead.next = ahead.last;
                  use(head, first, last, BlockRows<Float32>{scratch_.block_rows, 0}, ahead);
                });
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
    while (first < last) {
      while (first < last && is_excluded(weights[first])) ++first;
      int64_t end = first;
      while (end < last && !is_excluded(weights[end])) ++end;
      if (first < end) add_range(first, end);
      first = end;
    }
  }

  Registers registers_;
  bool converts_;
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
