// Starts the kernel of paged_attention for one query type; each is compiled in a file of its own.
#pragma once

#include "api.h"
#include "plan.h"

namespace pagedkv::cuda {

struct DeviceLimits {
  size_t shared_bytes;  // that a block may have
  int64_t num_multiprocessors;
};

int attend_float32(const AttentionParams& p, const Plan& plan, const Job& job,
                   const DeviceLimits& limits, cudaStream_t stream);
int attend_bfloat16(const AttentionParams& p, const Plan& plan, const Job& job,
                    const DeviceLimits& limits, cudaStream_t stream);
int attend_float16(const AttentionParams& p, const Plan& plan, const Job& job,
                   const DeviceLimits& limits, cudaStream_t stream);

}  // namespace pagedkv::cuda
