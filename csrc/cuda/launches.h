// Starts the kernel of paged_attention for one query type; each is compiled in a file of its own.
#pragma once

#include "api.h"
#include "plan.h"

namespace pagedkv::cuda {

int attend_float32(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                   cudaStream_t stream);
int attend_bfloat16(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                    cudaStream_t stream);
int attend_float16(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                   cudaStream_t stream);

}  // namespace pagedkv::cuda
