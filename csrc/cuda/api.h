// What libpagedkv_cuda.so offers: plain C functions on the structs of kernels.h.
//
// All pointers inside the structs are the device's. A function starts its kernels on the given
// stream and returns at once: it allocates nothing and waits for nothing, so that it can be
// captured into a CUDA graph. It answers 0 or a code that pagedkv_cuda_error explains; it never
// throws.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "pagedkv/kernels.h"

namespace pagedkv::cuda {

/// Our own codes, apart from those of cudaError.
enum Code : int { kUnsupported = -1, kSmallWorkspace = -2, kOldDevices = -3 };

}  // namespace pagedkv::cuda

#define PAGEDKV_API extern "C" __attribute__((visibility("default")))

/// Sizes of the structs and offsets of their fields, struct after struct, so that a caller that
/// mirrors them can compare. Writes at most `capacity` numbers and returns how many there are.
PAGEDKV_API int pagedkv_cuda_abi(int64_t* numbers, int capacity);
/// 0 when there is a device that can be used: one of compute capability 8.0 or later.
PAGEDKV_API int pagedkv_cuda_probe();
PAGEDKV_API const char* pagedkv_cuda_error(int code);

PAGEDKV_API int pagedkv_cuda_write_kv(const pagedkv::WriteKvParams* params, cudaStream_t stream);

/// Bytes of scratch memory, aligned to 16, that the call of the same name has to be given.
PAGEDKV_API int64_t
pagedkv_cuda_paged_attention_workspace_bytes(const pagedkv::AttentionParams* params);
PAGEDKV_API int pagedkv_cuda_paged_attention(const pagedkv::AttentionParams* params,
                                             void* workspace, int64_t workspace_bytes,
                                             cudaStream_t stream);

PAGEDKV_API int64_t
pagedkv_cuda_copy_blocks_workspace_bytes(const pagedkv::CopyBlocksParams* params);
PAGEDKV_API int pagedkv_cuda_copy_blocks(const pagedkv::CopyBlocksParams* params, void* workspace,
                                         int64_t workspace_bytes, cudaStream_t stream);
PAGEDKV_API int pagedkv_cuda_gather_blocks(const pagedkv::MoveBlocksParams* params,
                                           cudaStream_t stream);
PAGEDKV_API int pagedkv_cuda_scatter_blocks(const pagedkv::MoveBlocksParams* params,
                                            cudaStream_t stream);
PAGEDKV_API int pagedkv_cuda_merge_attention_states(const pagedkv::MergeStatesParams* params,
                                                    cudaStream_t stream);
