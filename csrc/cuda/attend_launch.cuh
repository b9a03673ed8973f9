// Chooses the instance of the kernel for a call and starts it. Included once for each query type.
#pragma once

#include "attend_kernel.cuh"
#include "launches.h"

namespace pagedkv::cuda {

template <class Products, int kDim, int kWarps>
int start(const AttentionParams& p, const Plan& plan, Job job, size_t shared_limit,
          cudaStream_t stream) {
  using Parts = Shared<Products, kDim, kWarps>;
  const size_t shared_bytes = Parts::bytes(job.spread);
  if (shared_bytes > shared_limit) return kUnsupported;
  job.tile_rows = Parts::kRows;
  const int64_t num_tiles = plan.num_tiles(p, job.tile_rows);
  if (num_tiles > INT32_MAX) return kUnsupported;
  const dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(p.num_kv_heads),
                  job.spread ? static_cast<unsigned>(job.num_splits) : 1);
  return launch(attend<Products, kDim, kWarps>, grid, kWarps * kWarpThreads, shared_bytes, stream,
                p, job);
}

template <class Products, int kDim>
int start_for_dim(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                  cudaStream_t stream) {
  // A device with little shared memory takes narrow tiles; the results are the same.
  const bool fits = Shared<Products, kDim, kWideWarps>::bytes(job.spread) <= shared_limit;
  if (fits && (!job.spread || plan.spread_warps == kWideWarps)) {
    return start<Products, kDim, kWideWarps>(p, plan, job, shared_limit, stream);
  }
  return start<Products, kDim, 1>(p, plan, job, shared_limit, stream);
}

/// Rounds head_dim up to what there are kernels for.
template <class Products>
int start_attend(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                 cudaStream_t stream) {
  if (p.head_dim <= 32) return start_for_dim<Products, 32>(p, plan, job, shared_limit, stream);
  if (p.head_dim <= 64) return start_for_dim<Products, 64>(p, plan, job, shared_limit, stream);
  if (p.head_dim <= 96) return start_for_dim<Products, 96>(p, plan, job, shared_limit, stream);
  if (p.head_dim <= 128) return start_for_dim<Products, 128>(p, plan, job, shared_limit, stream);
  return start_for_dim<Products, 256>(p, plan, job, shared_limit, stream);
}

}  // namespace pagedkv::cuda
