#include "attend_launch.cuh"
#include "products_float32.cuh"

namespace pagedkv::cuda {

int attend_float32(const AttentionParams& p, const Plan& plan, const Job& job,
                   const DeviceLimits& limits, cudaStream_t stream) {
  return start_attend<Float32Products>(p, plan, job, limits, stream);
}

}  // namespace pagedkv::cuda
