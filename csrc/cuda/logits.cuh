// From dot products to logits in units of log 2, with everything that a user can ask for in
// between: scales, soft cap, ALiBi, masks, window.
#pragma once

#include "rows.cuh"
#include "state.cuh"

namespace pagedkv::cuda {

/// One of the two query rows of a thread.
struct QueryRow {
  bool is_real;
  int64_t query;  // of its sequence
  int32_t position;
  int32_t head;
  float slope;
  const bool* bool_mask;  // of the new keys; null: none
  const float* float_mask;
};

__device__ inline QueryRow make_query_row(const AttentionParams& p, const Tile& tile,
                                          int32_t kv_head, int32_t index) {
  QueryRow row{};
  row.is_real = index < tile.num_rows;
  const RowPlace place = tile.row(row.is_real ? index : 0);
  row.query = place.query;
  row.position = static_cast<int32_t>(tile.seq.first_position + row.query);
  row.head = kv_head * tile.group + place.head_in_group;
  if (p.alibi_slopes != nullptr) row.slope = p.alibi_slopes[row.head];
  const int64_t mask_start = (tile.seq.first_token + row.query) * p.mask_stride;
  if (p.bool_mask != nullptr) row.bool_mask = p.bool_mask + mask_start;
  if (p.float_mask != nullptr) row.float_mask = p.float_mask + mask_start;
  return row;
}

/// Whether a whole block of keys [first, last] is seen by every row of the tile, so that no key has
/// to be looked at by itself.
__device__ inline bool is_seen_by_all(const AttentionParams& p, const Tile& tile, KeyRange keys,
                                      int64_t first, int64_t last) {
  if (first < keys.begin || last >= keys.end) return false;
  if (p.causal && last > tile.first_query_position) return false;
  if (p.window > 0 && (tile.last_query_position - first >= p.window ||
                       (!p.causal && last - tile.first_query_position >= p.window))) {
    return false;
  }
  const bool has_mask = p.bool_mask != nullptr || p.float_mask != nullptr;
  return !has_mask || last < tile.seq.first_position;
}

__device__ inline bool is_seen(const AttentionParams& p, const Tile& tile, KeyRange keys,
                               const QueryRow& row, int32_t key) {
  if (key >= keys.end) return false;
  if (p.causal && key > row.position) return false;
  if (p.window > 0) {
    if (row.position - key >= p.window) return false;
    if (!p.causal && key - row.position >= p.window) return false;
  }
  const int64_t column = key - tile.seq.first_position;
  if (column < 0 || column >= p.max_new) return true;
  if (row.bool_mask != nullptr) return row.bool_mask[column];
  return row.float_mask == nullptr || row.float_mask[column] != minus_infinity();
}

__device__ inline float added_mask(const AttentionParams& p, const Tile& tile, const QueryRow& row,
                                   int32_t key) {
  const int64_t column = key - tile.seq.first_position;
  return column >= 0 && column < p.max_new ? row.float_mask[column] : 0.0f;
}

/// Calls `change(logit, key in the block, row)` for the thread's logits, which stay in registers.
template <int kColumns, class Change>
__device__ void for_each_logit(float (&s)[kColumns][4], const QueryRow (&rows)[2], int lane,
                               Change change) {
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      change(s[column][i], column * 8 + lane % 4 * 2 + i % 2, rows[i / 2]);
    }
  }
}

/// Turns the dot products of a key block that begins at `first_key` into logits. `key_scales` are
/// of the block's keys; null: none. One pass for each option, since a call uses few of them.
template <int kColumns>
__device__ void make_logits(float (&s)[kColumns][4], const AttentionParams& p, const Tile& tile,
                            KeyRange keys, const QueryRow (&rows)[2], int32_t first_key,
                            const float* key_scales, bool seen_by_all, int lane) {
  const bool is_plain = p.soft_cap == 0.0f && p.alibi_slopes == nullptr && p.float_mask == nullptr;
  const float scale = is_plain ? p.scale * kLog2e : p.scale;
  for_each_logit(s, rows, lane, [&](float& x, int, const QueryRow&) { x *= scale; });
  if (key_scales != nullptr) {
    for_each_logit(s, rows, lane,
                   [&](float& x, int key, const QueryRow&) { x *= key_scales[key]; });
  }
  if (!is_plain) {
    if (p.soft_cap != 0.0f) {
      for_each_logit(s, rows, lane, [&](float& x, int, const QueryRow&) {
        x = p.soft_cap * tanhf(x / p.soft_cap);
      });
    }
    if (p.alibi_slopes != nullptr) {
      for_each_logit(s, rows, lane, [&](float& x, int key, const QueryRow& row) {
        x = fmaf(row.slope, static_cast<float>(first_key + key - row.position), x);
      });
    }
    if (p.float_mask != nullptr) {
      for_each_logit(s, rows, lane, [&](float& x, int key, const QueryRow& row) {
        x += added_mask(p, tile, row, first_key + key);
      });
    }
    for_each_logit(s, rows, lane, [&](float& x, int, const QueryRow&) { x *= kLog2e; });
  }
  if (seen_by_all) return;
  for_each_logit(s, rows, lane, [&](float& x, int key, const QueryRow& row) {
    // Chosen, not added: what was read for a key that nobody sees may be NaN.
    if (!is_seen(p, tile, keys, row, first_key + key)) x = minus_infinity();
  });
}

}  // namespace pagedkv::cuda
