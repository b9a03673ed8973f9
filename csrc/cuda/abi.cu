// What a caller asks before it calls: whether its structs are ours, whether there is a device, what
// went wrong.
#include <cstddef>

#include "api.h"

#define FIELD(Struct, field) static_cast<int64_t>(offsetof(Struct, field))

int pagedkv_cuda_abi(int64_t* numbers, int capacity) {
  using namespace pagedkv;
  const int64_t all[] = {
      sizeof(PagesView),
      FIELD(PagesView, head_stride),
      sizeof(ScalesView),
      FIELD(ScalesView, head_stride),
      sizeof(TokensView),
      FIELD(TokensView, head_stride),
      sizeof(BlocksView),
      FIELD(BlocksView, data),
      FIELD(BlocksView, num_blocks),
      FIELD(BlocksView, block_stride),
      FIELD(BlocksView, run_bytes),
      FIELD(BlocksView, num_dims),
      FIELD(BlocksView, sizes),
      FIELD(BlocksView, strides),
      sizeof(WriteKvParams),
      FIELD(WriteKvParams, key),
      FIELD(WriteKvParams, value),
      FIELD(WriteKvParams, key_pages),
      FIELD(WriteKvParams, value_pages),
      FIELD(WriteKvParams, key_scales),
      FIELD(WriteKvParams, value_scales),
      FIELD(WriteKvParams, slot_mapping),
      FIELD(WriteKvParams, num_tokens),
      FIELD(WriteKvParams, num_blocks),
      FIELD(WriteKvParams, block_size),
      FIELD(WriteKvParams, num_kv_heads),
      FIELD(WriteKvParams, head_dim),
      FIELD(WriteKvParams, token_dtype),
      FIELD(WriteKvParams, page_dtype),
      sizeof(AttentionParams),
      FIELD(AttentionParams, query),
      FIELD(AttentionParams, out),
      FIELD(AttentionParams, lse),
      FIELD(AttentionParams, lse_token_stride),
      FIELD(AttentionParams, lse_head_stride),
      FIELD(AttentionParams, key_pages),
      FIELD(AttentionParams, value_pages),
      FIELD(AttentionParams, key_scales),
      FIELD(AttentionParams, value_scales),
      FIELD(AttentionParams, block_table),
      FIELD(AttentionParams, block_table_stride),
      FIELD(AttentionParams, seq_lens),
      FIELD(AttentionParams, query_start_loc),
      FIELD(AttentionParams, alibi_slopes),
      FIELD(AttentionParams, sinks),
      FIELD(AttentionParams, bool_mask),
      FIELD(AttentionParams, float_mask),
      FIELD(AttentionParams, mask_stride),
      FIELD(AttentionParams, prefix_groups),
      FIELD(AttentionParams, prefix_rows),
      FIELD(AttentionParams, num_groups),
      FIELD(AttentionParams, num_prefix_rows),
      FIELD(AttentionParams, num_tokens),
      FIELD(AttentionParams, num_seqs),
      FIELD(AttentionParams, max_blocks),
      FIELD(AttentionParams, num_blocks),
      FIELD(AttentionParams, max_new),
      FIELD(AttentionParams, num_heads),
      FIELD(AttentionParams, num_kv_heads),
      FIELD(AttentionParams, head_dim),
      FIELD(AttentionParams, block_size),
      FIELD(AttentionParams, scale),
      FIELD(AttentionParams, soft_cap),
      FIELD(AttentionParams, window),
      FIELD(AttentionParams, causal),
      FIELD(AttentionParams, query_dtype),
      FIELD(AttentionParams, page_dtype),
      sizeof(CopyBlocksParams),
      FIELD(CopyBlocksParams, blocks),
      FIELD(CopyBlocksParams, sources),
      FIELD(CopyBlocksParams, destinations),
      FIELD(CopyBlocksParams, num_copies),
      sizeof(MoveBlocksParams),
      FIELD(MoveBlocksParams, blocks),
      FIELD(MoveBlocksParams, buffer),
      FIELD(MoveBlocksParams, block_ids),
      sizeof(MergeStatesParams),
      FIELD(MergeStatesParams, outs),
      FIELD(MergeStatesParams, outs_state_stride),
      FIELD(MergeStatesParams, outs_token_stride),
      FIELD(MergeStatesParams, outs_head_stride),
      FIELD(MergeStatesParams, lses),
      FIELD(MergeStatesParams, lses_state_stride),
      FIELD(MergeStatesParams, lses_token_stride),
      FIELD(MergeStatesParams, lses_head_stride),
      FIELD(MergeStatesParams, out),
      FIELD(MergeStatesParams, lse),
      FIELD(MergeStatesParams, lse_token_stride),
      FIELD(MergeStatesParams, lse_head_stride),
      FIELD(MergeStatesParams, num_states),
      FIELD(MergeStatesParams, num_tokens),
      FIELD(MergeStatesParams, num_heads),
      FIELD(MergeStatesParams, head_dim),
      FIELD(MergeStatesParams, dtype),
  };
  const int count = static_cast<int>(sizeof(all) / sizeof(all[0]));
  for (int i = 0; i < count && i < capacity; ++i) numbers[i] = all[i];
  return count;
}

int pagedkv_cuda_probe() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count)) return error;
  if (count == 0) return cudaErrorNoDevice;
  for (int device = 0; device < count; ++device) {
    int major = 0;
    const auto attribute = cudaDevAttrComputeCapabilityMajor;
    if (const cudaError_t error = cudaDeviceGetAttribute(&major, attribute, device)) return error;
    if (major >= 8) return cudaSuccess;
  }
  return pagedkv::cuda::kOldDevices;
}

const char* pagedkv_cuda_error(int code) {
  switch (code) {
    case pagedkv::cuda::kUnsupported:
      return "no kernel for these sizes";
    case pagedkv::cuda::kSmallWorkspace:
      return "the workspace is too small";
    case pagedkv::cuda::kOldDevices:
      return "no device of compute capability 8.0 or later";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}
