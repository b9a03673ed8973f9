// The loop of paged_attention over key blocks: while one of K and V is used, the other is fetched.
#pragma once

#include "attend.cuh"
#include "odd_values.cuh"

namespace pagedkv::cuda {

/// Copies the tile's queries into shared memory, zeros behind head_dim and behind the last row.
template <class Products, int kDim, int kWarps>
__device__ void fetch_queries(typename Products::Element* to, const AttentionParams& p,
                              const Tile& tile, int32_t kv_head, bool is_aligned) {
  using Element = typename Products::Element;
  constexpr int kThreads = kWarps * kWarpThreads, kPitch = row_pitch<Element>(kDim);
  constexpr int kInChunk = 16 / static_cast<int>(sizeof(Element)), kChunks = kDim / kInChunk;
  for (int i = threadIdx.x; i < kTileRows * kWarps * kChunks; i += kThreads) {
    const int index = i / kChunks, d = i % kChunks * kInChunk;
    Element* chunk = to + index * kPitch + d;
    const int num_elements = index < tile.num_rows ? p.head_dim - d : 0;
    const RowPlace row = tile.row(index);
    const Element* from =
        static_cast<const Element*>(p.query.data) +
        (tile.seq.first_token + row.query) * p.query.token_stride +
        (int64_t{kv_head} * tile.group + row.head_in_group) * p.query.head_stride + d;
    if (num_elements >= kInChunk && is_aligned) {
      copy_async_16(chunk, from);
      continue;
    }
    for (int part = 0; part < kInChunk; ++part) {
      chunk[part] = part < num_elements ? from[part] : Element{};
    }
  }
}

/// The keys of a tile that a block takes in one turn.
__device__ inline KeyRange turn_keys(const AttentionParams& p, const Job& job, const Tile& tile,
                                     int turn) {
  KeyRange keys = key_range(p, tile.seq, tile.first_query_position, tile.last_query_position);
  if (!job.spread) return keys;
  const int64_t split_begin = (job.first_split + turn) * kSplitTokens;
  keys.begin = keys.begin > split_begin ? keys.begin : split_begin;
  keys.end = keys.end < split_begin + kSplitTokens ? keys.end : split_begin + kSplitTokens;
  return keys;
}

/// The turns [begin, end) of a block, gridDim.z apart: one for each of its splits that the tile
/// sees, or one for all splits of the tile.
struct Turns {
  int begin, end;
};
__device__ inline Turns find_turns(const AttentionParams& p, const Job& job, const Tile& tile) {
  if (!job.spread) return {0, 1};
  const KeyRange keys = key_range(p, tile.seq, tile.first_query_position, tile.last_query_position);
  if (keys.begin >= keys.end) return {0, 0};
  const int64_t first = keys.begin / kSplitTokens - job.first_split - blockIdx.z;
  const int64_t last = ceil_div<int64_t>(keys.end, kSplitTokens) - job.first_split;
  const int skipped = first > 0 ? static_cast<int>(ceil_div<int64_t>(first, gridDim.z)) : 0;
  return {static_cast<int>(blockIdx.z + skipped * gridDim.z),
          static_cast<int>(last < job.num_splits ? last : job.num_splits)};
}

/// Grid: tiles, KV heads, and if job.spread as many blocks as the wave's splits are dealt to.
template <class Products, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpThreads,
                                  1)  // one is enough: registers rather than room for more
    attend(const __grid_constant__ AttentionParams p, const __grid_constant__ Job job) {
  using Parts = Shared<Products, kDim, kWarps>;
  using Element = typename Products::Element;
  constexpr int kThreads = kWarps * kWarpThreads, kKeys = Parts::kKeys;
  constexpr int kTilePitchBytes = Parts::kPitch * static_cast<int>(sizeof(Element));

  // The last tiles of a causal prefill have the most keys: they go first.
  const int64_t tile_index = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
  const int32_t kv_head = blockIdx.y;
  const Tile tile = find_tile(p, job, tile_index);
  if (tile.num_rows == 0) return;
  const Turns turns = find_turns(p, job, tile);
  if (turns.begin >= turns.end) return;

  const Parts shared = {dynamic_shared()};
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const bool is_narrow = p.page_dtype == DType::Float8E4M3 || p.page_dtype == DType::Int8;
  const bool has_key_scales = is_narrow && p.key_scales.data != nullptr;
  const bool has_value_scales = is_narrow && p.value_scales.data != nullptr;
  const bool is_aligned = job.has_aligned_pages;
  unsigned char* const narrow_keys = shared.second_tile();
  unsigned char* const narrow_values = narrow_keys + kKeys * kDim;
  auto* const key_tile = reinterpret_cast<Element*>(shared.first_tile());
  auto* const value_tile = is_narrow ? key_tile : reinterpret_cast<Element*>(shared.second_tile());

  const auto fetch_keys = [&](int block) {
    const auto& offsets = shared.places(block).key_offset;
    if (is_narrow) {
      fetch_rows<kThreads, kKeys, kDim, 1>(narrow_keys, kDim, p.key_pages.data, offsets, p.head_dim,
                                           is_aligned);
    } else {
      fetch_rows<kThreads, kKeys, kDim, sizeof(Element)>(
          shared.first_tile(), kTilePitchBytes, p.key_pages.data, offsets, p.head_dim, is_aligned);
    }
  };
  const auto fetch_values = [&](int block) {
    const auto& offsets = shared.places(block).value_offset;
    if (is_narrow) {
      fetch_rows<kThreads, kKeys, kDim, 1>(narrow_values, kDim, p.value_pages.data, offsets,
                                           p.head_dim, is_aligned);
    } else {
      fetch_rows<kThreads, kKeys, kDim, sizeof(Element)>(shared.second_tile(), kTilePitchBytes,
                                                         p.value_pages.data, offsets, p.head_dim,
                                                         is_aligned);
    }
  };

  QueryRow rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows[i] = make_query_row(p, tile, kv_head, warp * kTileRows + i * 8 + lane / 4);
  }
  SoftmaxState total[2] = {{minus_infinity(), 0.0f}, {minus_infinity(), 0.0f}};
  Accumulator<kDim> split;
  split.clear();

  static_assert(kSplitTokens / kKeys % 2 == 0, "a split's first places may still be in use");
  fetch_queries<Products, kDim, kWarps>(shared.query(), p, tile, kv_head, job.has_aligned_queries);
  for (int turn = turns.begin; turn < turns.end; turn += gridDim.z) {
    const KeyRange keys = turn_keys(p, job, tile, turn);
    const int first_block = static_cast<int>(keys.begin / kKeys);
    const int last_block = static_cast<int>(ceil_div<int64_t>(keys.end, kKeys));
    if (first_block >= last_block) break;
    find_places<kThreads>(shared.places(first_block), p, tile, keys, kv_head, first_block * kKeys);
    block_barrier<kWarps>();  // places
    fetch_keys(first_block);
    for (int block = first_block; block < last_block; ++block) {
      const KeyPlaces<kKeys>& places = shared.places(block);
      wait_for_copies();
      block_barrier<kWarps>();  // keys have come, values of the last block are used up
      fetch_values(block);
      if (block + 1 < last_block) {
        find_places<kThreads>(shared.places(block + 1), p, tile, keys, kv_head,
                              (block + 1) * kKeys);
      }
      if (is_narrow) {
        widen_rows<Products, kThreads, kKeys, kDim>(key_tile, narrow_keys, nullptr, p.page_dtype);
        block_barrier<kWarps>();  // widened keys
      }
      float s[kKeys / 8][4] = {};
      Products::template scores<kDim, kKeys>(s, shared.query() + warp * kTileRows * Parts::kPitch,
                                             key_tile, lane);
      const int first_key = block * kKeys;
      const bool seen_by_all =
          is_seen_by_all(p, tile, keys, first_key, int64_t{first_key} + kKeys - 1);
      make_logits(s, p, tile, keys, rows, first_key, has_key_scales ? places.key_scale : nullptr,
                  seen_by_all, lane);
      split.take_logits(s);

      wait_for_copies();
      block_barrier<kWarps>();  // values and the next places have come, keys are used up
      if (block + 1 < last_block) fetch_keys(block + 1);
      if (is_narrow) {
        widen_rows<Products, kThreads, kKeys, kDim>(value_tile, narrow_values,
                                                    has_value_scales ? places.value_scale : nullptr,
                                                    p.page_dtype);
        block_barrier<kWarps>();  // widened values
      }
      if (!seen_by_all && has_odd_values<Products, kKeys, kDim>(value_tile, lane)) {
        add_odd_values<Products, kKeys, kDim>(
            split.values, value_tile, lane,
            [&](int row, int key) { return is_seen(p, tile, keys, rows[row], first_key + key); });
        block_barrier<kWarps>();  // all have added them
        clear_odd_values<Products, kThreads, kKeys, kDim>(value_tile);
        block_barrier<kWarps>();  // the rest is left
      }
      Products::template values<kDim, kKeys>(split.values, s, value_tile, lane);

      const bool ends_split = (block + 1) % (kSplitTokens / kKeys) == 0 || block + 1 == last_block;
      if (!ends_split) continue;
      split.close_split();
      if (job.spread) {
        store_split(split, p, job, tile, rows, turn, lane);
      } else {
        fold_split<kDim, kThreads>(split, total, shared.total());
      }
      split.clear();
    }
  }
  if (!job.spread) {
    store_tile<Products, kDim, kThreads>(total, shared.total(), p, tile, rows, lane);
  }
}

}  // namespace pagedkv::cuda
