// How a call of paged_attention is cut into blocks of threads. It knows only what the host knows:
// sizes, but no length of any sequence. None of its choices changes a result.
//
// The rows of a sequence and one KV head are its queries times the query heads of the KV head.
// Sequences of few rows are spread over blocks by splits of the context, whose states a second
// kernel folds; of the others a block takes a tile of rows through all splits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pagedkv/kernels.h"
#include "products.cuh"

namespace pagedkv::cuda {

constexpr int kWideWarps = 4;
/// Scratch memory above which the splits are computed in waves.
constexpr int64_t kMaxWaveBytes = int64_t{256} << 20;
constexpr int64_t kMaxWaveSplits = 32768;  // the grid's limit is 65535
/// Of a launch that is spread over splits: enough to even out sequences of different lengths.
constexpr int64_t kBlocksPerMultiprocessor = 32;

/// What one launch works on; a kernel's argument.
struct Job {
  int32_t few_rows;   // a sequence with at most so many rows is spread over splits
  int32_t tile_rows;  // rows of a block
  bool spread;        // whether this launch is for the sequences of few rows
  bool is_last_wave;  // whether it finishes the rows
  // Whether every row of a page, and of the queries, begins at a multiple of 16 bytes.
  bool has_aligned_pages, has_aligned_queries;
  int64_t first_split, num_splits;  // of the wave
  // A state's place: by token, or (when few of the tokens can be in sequences of few rows) by
  // sequence and the query's number in it.
  int32_t tokens_per_seq;  // 0: by token
  float* values;           // [slots, num_splits, head_dim]
  float* states;           // [slots, num_splits, 2]: top, sum
  float* running_values;   // [slots, head_dim]; between waves
  float* running_states;   // [slots, 2]
};

struct Plan {
  int32_t group;
  int32_t few_rows, spread_warps;
  int32_t tokens_per_seq;
  int64_t num_slots;
  int64_t num_splits;  // of the longest sequence that the block table could hold
  int64_t wave_splits;
  bool may_have_many_rows;

  int64_t num_waves() const { return (num_splits + wave_splits - 1) / wave_splits; }
  int64_t num_tiles(const AttentionParams& p, int32_t tile_rows) const {
    return p.num_tokens * group / tile_rows + p.num_seqs;  // see find_tile
  }
  /// Floats of scratch memory: values and states of a wave, and what goes on to the next.
  int64_t num_floats(const AttentionParams& p) const {
    const int64_t places = num_slots * (wave_splits + (num_waves() > 1 ? 1 : 0));
    return places * (p.head_dim + 2);
  }
};

inline Plan make_plan(const AttentionParams& p) {
  Plan plan{};
  plan.group = p.num_heads / p.num_kv_heads;
  const int64_t rows = p.num_tokens * plan.group;
  const int32_t wide_rows = kTileRows * kWideWarps;
  // Mostly decoding or verification: everything of up to 64 rows is spread. Otherwise decoding
  // only, so that scratch memory for queries that are prefilled stays small.
  const bool is_decoding = rows <= p.num_seqs * std::max(wide_rows, plan.group);
  plan.few_rows = std::max(is_decoding ? wide_rows : kTileRows, plan.group);
  plan.spread_warps = rows <= p.num_seqs * kTileRows || !is_decoding ? 1 : kWideWarps;
  if (plan.group > kTileRows) plan.spread_warps = kWideWarps;
  const int64_t tokens_per_seq = plan.few_rows / plan.group;
  const bool by_token = p.num_tokens <= p.num_seqs * tokens_per_seq;
  plan.tokens_per_seq = by_token ? 0 : static_cast<int32_t>(tokens_per_seq);
  plan.num_slots = (by_token ? p.num_tokens : p.num_seqs * tokens_per_seq) * p.num_heads;
  plan.num_splits =
      std::max<int64_t>(1, (p.max_blocks * p.block_size + kSplitTokens - 1) / kSplitTokens);
  const int64_t split_bytes = std::max<int64_t>(1, plan.num_slots * (p.head_dim + 2) * 4);
  const int64_t most = std::clamp<int64_t>(kMaxWaveBytes / split_bytes, 1, kMaxWaveSplits);
  plan.wave_splits = std::min(plan.num_splits, most);
  plan.may_have_many_rows = rows > plan.few_rows;
  return plan;
}

}  // namespace pagedkv::cuda
