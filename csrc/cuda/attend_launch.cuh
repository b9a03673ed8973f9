// Chooses the instance of the kernel for a call and starts it. Included once for each query type.
#pragma once

#include "attend_kernel.cuh"
#include "launches.h"

namespace pagedkv::cuda {

template <class Products, int kDim, int kWarps>
int start(const AttentionParams& p, const Plan& plan, Job job, const DeviceLimits& limits,
          cudaStream_t stream) {
  using Parts = Shared<Products, kDim, kWarps>;
  const size_t shared_bytes = Parts::bytes(job.spread);
  if (shared_bytes > limits.shared_bytes) return kUnsupported;
  job.tile_rows = Parts::kRows;
  const int64_t num_tiles = plan.num_tiles(p, job.tile_rows);
  if (num_tiles > INT32_MAX) return kUnsupported;
  // The splits are those of the longest sequence that the table could hold, and most sequences are
  // shorter: blocks without work would cost more than the others.
  const int64_t wanted = kBlocksPerMultiprocessor * limits.num_multiprocessors;
  const int64_t columns = std::max<int64_t>(1, wanted / (num_tiles * p.num_kv_heads));
  const dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(p.num_kv_heads),
                  job.spread ? static_cast<unsigned>(std::min(columns, job.num_splits)) : 1);
  return launch(attend<Products, kDim, kWarps>, grid, kWarps * kWarpThreads, shared_bytes, stream,
                p, job);
}

template <class Products, int kDim>
int start_for_dim(const AttentionParams& p, const Plan& plan, const Job& job,
                  const DeviceLimits& limits, cudaStream_t stream) {
  // A device with little shared memory takes narrow tiles; the results are the same.
  const bool fits = Shared<Products, kDim, kWideWarps>::bytes(job.spread) <= limits.shared_bytes;
  if (fits && (!job.spread || plan.spread_warps == kWideWarps)) {
    return start<Products, kDim, kWideWarps>(p, plan, job, limits, stream);
  }
  return start<Products, kDim, 1>(p, plan, job, limits, stream);
}

/// Rounds head_dim up to what there are kernels for.
template <class Products>
int start_attend(const AttentionParams& p, const Plan& plan, const Job& job,
                 const DeviceLimits& limits, cudaStream_t stream) {
  if (p.head_dim <= 32) return start_for_dim<Products, 32>(p, plan, job, limits, stream);
  if (p.head_dim <= 64) return start_for_dim<Products, 64>(p, plan, job, limits, stream);
  if (p.head_dim <= 96) return start_for_dim<Products, 96>(p, plan, job, limits, stream);
  if (p.head_dim <= 128) return start_for_dim<Products, 128>(p, plan, job, limits, stream);
  return start_for_dim<Products, 256>(p, plan, job, limits, stream);
}

}  // namespace pagedkv::cuda
