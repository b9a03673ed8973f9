// Which rows a block of threads works on, and which keys they need.
#pragma once

#include "device.cuh"
#include "plan.h"

namespace pagedkv::cuda {

/// A sequence of the batch as its metadata tells it.
struct SequenceView {
  int64_t index;
  int64_t first_token;  // of its queries in the batch
  int64_t num_queries;
  int64_t seq_len;
  int64_t first_position;  // of its first query; the new keys begin here
};

struct KeyRange {
  int64_t begin, end;  // [begin, end)
};

/// A query of a sequence, and one of the heads that share a KV head.
struct RowPlace {
  int64_t query;
  int32_t head_in_group;
};

struct Tile {
  SequenceView seq;
  int32_t num_rows;  // 0: nothing to do
  int32_t group;
  RowPlace first;
  int64_t first_query_position, last_query_position;

  __device__ RowPlace row(int32_t index) const {
    const int32_t from_first_query = first.head_in_group + index;
    return {first.query + from_first_query / group, from_first_query % group};
  }
};

__device__ inline SequenceView view_sequence(const AttentionParams& p, int64_t index) {
  SequenceView seq;
  seq.index = index;
  seq.first_token = p.query_start_loc[index];
  seq.num_queries = p.query_start_loc[index + 1] - seq.first_token;
  seq.seq_len = p.seq_lens[index];
  seq.first_position = seq.seq_len - seq.num_queries;
  return seq;
}

/// The last of num_seqs + 1 ascending numbers `at(i)` that is not larger than `wanted`; -1: none.
template <class At>
__device__ int64_t find_last(int64_t num_seqs, int64_t wanted, At at) {
  int64_t low = -1, high = num_seqs + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (at(middle) <= wanted ? low : high) = middle;
  }
  return low;
}

/// Sequence i gets the tiles from i + (rows before it) / tile_rows on. These are enough for its
/// rows, whatever the rows before it leave over, and no table of tiles has to be made.
__device__ inline Tile find_tile(const AttentionParams& p, const Job& job, int64_t index) {
  Tile tile{};
  tile.group = p.num_heads / p.num_kv_heads;
  const auto first_tile = [&](int64_t i) {
    return int64_t{p.query_start_loc[i]} * tile.group / job.tile_rows + i;
  };
  const int64_t found = find_last(p.num_seqs, index, first_tile);
  if (found < 0 || found >= p.num_seqs) return tile;
  tile.seq = view_sequence(p, found);
  const int64_t seq_rows = tile.seq.num_queries * tile.group;
  const int64_t first_row = (index - first_tile(found)) * job.tile_rows;
  const bool is_ours = (seq_rows <= job.few_rows) == job.spread;
  // Nobody checked the numbers on the device: they must not lead outside of the tensors.
  if (tile.seq.first_token < 0 || tile.seq.first_token + tile.seq.num_queries > p.num_tokens) {
    return tile;
  }
  if (!is_ours || first_row >= seq_rows || tile.seq.seq_len <= 0) return tile;
  const int64_t rest = seq_rows - first_row;
  tile.num_rows = static_cast<int32_t>(rest < job.tile_rows ? rest : job.tile_rows);
  tile.first = {first_row / tile.group, static_cast<int32_t>(first_row % tile.group)};
  tile.first_query_position = tile.seq.first_position + tile.first.query;
  tile.last_query_position = tile.seq.first_position + tile.row(tile.num_rows - 1).query;
  return tile;
}

/// The keys that the queries at positions [first, last] may see, as far as the table reaches.
__device__ inline KeyRange key_range(const AttentionParams& p, const SequenceView& seq,
                                     int64_t first, int64_t last) {
  KeyRange keys = {0, seq.seq_len};
  const auto lower_end = [&](int64_t end) { keys.end = end < keys.end ? end : keys.end; };
  lower_end(p.max_blocks * p.block_size);
  if (p.causal) lower_end(last + 1);
  if (p.window > 0) {
    if (!p.causal) lower_end(last + p.window);
    if (first - p.window + 1 > 0) keys.begin = first - p.window + 1;
  }
  return keys;
}

/// Where the state of a query and head lies between the two kernels.
__device__ inline int64_t find_slot(const AttentionParams& p, const Job& job,
                                    const SequenceView& seq, int64_t query, int64_t head) {
  const int64_t place =
      job.tokens_per_seq == 0 ? seq.first_token + query : seq.index * job.tokens_per_seq + query;
  return place * p.num_heads + head;
}

}  // namespace pagedkv::cuda
