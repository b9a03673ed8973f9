// The states of a tile of query rows (kernel_table.h) from products of bfloat16 in tile registers.
//
// Two forms, for few rows (few_rows.h) and for many (many_rows.h), give the same bits. A logit is
// the same chain of operations whichever of query and key is the left factor. A sum over values
// takes the keys 32 at a time, as two chains over 16 keys each that are added to one another and
// then to the sum: `many` has the tile multiplication pair key i with key i + 16, `few` loads
// values as they lie in the pages, pairs every weight with a zero, and adds up the two chains
// itself. Sums of few rows are therefore added with the flushing of subnormal numbers that tiles
// do.
//
// Weights are rounded to bfloat16 for the sum over values; the sum of the weights is that of the
// unrounded ones.

#pragma once

#include "few_rows.h"
#include "many_rows.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

inline bool suits_tiles(const AttentionParams& p) {
  return p.page_dtype == DType::BFloat16 && p.query_dtype == DType::BFloat16 &&
         p.head_dim % kStepDims == 0;
}

inline void attend_in_one_form(const SplitTile& tile, void* memory) {
  const int32_t rows = tile.num_tokens * (tile.params->num_heads / tile.params->num_kv_heads);
  if (rows <= kFewRows) {
    FewRows(tile, memory).run();
  } else {
    ManyRows(tile, memory).run();
  }
}

inline int64_t states_bytes(const AttentionParams& p, int32_t num_rows) {
  return round_up((int64_t)num_rows * (p.head_dim + kAccPadding) * (int64_t)sizeof(float), 64);
}

/// Whether a row that sees something has a sum that is no finite number.
inline bool has_non_finite(const float* state, int32_t head_dim) {
  if (state[head_dim] == kMinusInfinity) return false;
  Ints found = {};
  for (int32_t d = 0; d < head_dim; d += kLanes) {
    found |= ~(abs(load(state + d)) < __builtin_inff());
  }
  for (int i = 0; i < kLanes; ++i) {
    if (found[i]) return true;
  }
  return false;
}

// Tiles multiply what a row does not see by zero, and a number with its neighbour's zero, which
// makes NaN of infinities and NaN. A token with a row of such sums is computed once more by itself,
// without the values that it does not see; rows that it does not help are computed without tiles.
// So what other tokens see never shows in a row.
inline void attend_in_tiles(const SplitTile& tile, void* scratch) {
  const AttentionParams& p = *tile.params;
  if (!suits_tiles(p)) return attend(tile, scratch);
  const int32_t group = p.num_heads / p.num_kv_heads, stride = p.head_dim + kAccPadding;
  const int32_t num_heads = tile.kv_head_end - tile.kv_head_begin;
  auto* again = static_cast<float*>(scratch);
  char* rest = static_cast<char*>(scratch) + states_bytes(p, num_heads * tile.num_tokens * group);
  attend_in_one_form(tile, rest);
  for (int32_t t = 0; t < tile.num_tokens; ++t) {
    // Calls `use` with each row of the token that is not finite, and the same row among `again`.
    const auto for_non_finite = [&](auto use) {
      for (int32_t head = 0; head < num_heads; ++head) {
        for (int32_t g = 0; g < group; ++g) {
          float* state = tile.states + (((int64_t)head * tile.num_tokens + t) * group + g) * stride;
          if (has_non_finite(state, p.head_dim))
            use(state, again + ((int64_t)head * group + g) * stride);
        }
      }
    };
    SplitTile alone = tile;
    alone.tokens = tile.tokens + t;
    alone.num_tokens = 1;
    alone.states = again;
    const auto replace = [&](auto attend_alone) {
      bool any = false;
      for_non_finite([&](float*, float*) { any = true; });
      if (!any) return;
      attend_alone();
      for_non_finite([&](float* state, const float* found) {
        __builtin_memcpy(state, found, stride * sizeof(float));
      });
    };
    if (tile.num_tokens > 1) replace([&] { attend_in_one_form(alone, rest); });
    replace([&] { attend(alone, rest); });
  }
}

inline int64_t tile_scratch_bytes(const AttentionParams& params, int32_t num_rows) {
  const int64_t plain = scratch_bytes(params, num_rows);
  if (!suits_tiles(params)) return plain;
  TileScratch scratch;
  const int64_t tiled = lay_out_tiles(nullptr, num_rows, params.head_dim, scratch);
  return states_bytes(params, num_rows) + (plain > tiled ? plain : tiled);
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
