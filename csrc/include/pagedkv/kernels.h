// What every kernel over pages is given: raw pointers, sizes and strides. No Python, no torch, no
// CUDA header; the CPU and the CUDA kernels share these structs.
//
// Strides count elements and are 64-bit. head_dim always has stride 1. A null pointer in an
// optional field means that the option is off.
#pragma once

#include <cstdint>

namespace pagedkv {

enum class DType : int32_t { Float32 = 0, BFloat16 = 1, Float16 = 2, Float8E4M3 = 3, Int8 = 4 };

/// K or V pages of one layer: [num_blocks, block_size, num_kv_heads, head_dim].
struct PagesView {
  void* data;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
};

/// Scales of 8-bit pages: [num_blocks, block_size, num_kv_heads] float32; value = stored * scale.
/// A stride of 0 repeats one scale over that dimension. Null data: every scale is 1.
struct ScalesView {
  float* data;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
};

/// New tokens: [num_tokens, num_heads, head_dim].
struct TokensView {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct WriteKvParams {
  TokensView key, value;  // of token_dtype
  PagesView key_pages, value_pages;
  // With token_stride 0 the scales are given and only read; else they are computed for each token
  // and head, and written.
  ScalesView key_scales, value_scales;
  const int64_t* slot_mapping;  // [num_tokens]; -1 skips the token
  int64_t num_tokens;
  int64_t num_blocks;
  int32_t block_size, num_kv_heads, head_dim;
  DType token_dtype, page_dtype;
};

struct AttentionParams {
  TokensView query;  // of query_dtype
  TokensView out;    // of query_dtype
  float* lse;        // [num_tokens, num_heads], optional
  int64_t lse_token_stride, lse_head_stride;
  PagesView key_pages, value_pages;     // of page_dtype
  ScalesView key_scales, value_scales;  // only for 8-bit pages
  const int32_t* block_table;           // [num_seqs, max_blocks]
  int64_t block_table_stride;
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const float* alibi_slopes;       // [num_heads], optional
  const float* sinks;              // [num_heads], optional
  const bool* bool_mask;  // [num_tokens, max_new], optional: whether a query sees a new key
  const float*
      float_mask;  // [num_tokens, max_new], optional: added to the logit; not with bool_mask
  int64_t mask_stride;
  const int32_t*
      prefix_groups;  // [num_groups, 4]: rows begin, rows end, first block, last block; optional
  const int32_t* prefix_rows;  // [num_prefix_rows] rows of the block table
  int64_t num_groups, num_prefix_rows;
  int64_t num_tokens, num_seqs, max_blocks, num_blocks, max_new;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  float soft_cap;  // 0: off
  int32_t window;  // 0: off; w: a query sees w positions, itself included
  bool causal;
  DType query_dtype, page_dtype;
};

/// Blocks of any element type: [num_blocks, ...]. Sizes count what the strides step over; strides
/// and `run_bytes` count bytes. A block is the runs of `run_bytes` at every index of its
/// dimensions.
struct BlocksView {
  static constexpr int kMaxDims = 8;
  void* data;
  int64_t num_blocks;
  int64_t block_stride;
  int64_t run_bytes;
  int32_t num_dims;  // outermost first; contiguous ones are merged into the run
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
};

struct CopyBlocksParams {
  BlocksView blocks;
  const int64_t *sources, *destinations;  // [num_copies]
  int64_t num_copies;
};

/// gather_blocks and scatter_blocks: row i of `buffer` is block block_ids[i].
struct MoveBlocksParams {
  BlocksView blocks, buffer;  // whose blocks have one shape
  const int64_t* block_ids;   // [num_blocks of the buffer]
};

struct MergeStatesParams {
  const void* outs;  // [num_states, num_tokens, num_heads, head_dim] of dtype
  int64_t outs_state_stride, outs_token_stride, outs_head_stride;
  const float* lses;  // [num_states, num_tokens, num_heads]
  int64_t lses_state_stride, lses_token_stride, lses_head_stride;
  TokensView out;  // of dtype
  float* lse;      // [num_tokens, num_heads], optional
  int64_t lse_token_stride, lse_head_stride;
  int64_t num_states, num_tokens;
  int32_t num_heads, head_dim;
  DType dtype;
};

/// Keys are attended in splits at absolute multiples of this many positions. Each split is computed
/// from nothing and folded into the next in order, so a result never depends on who computed what.
constexpr int64_t kSplitTokens = 512;

}  // namespace pagedkv
