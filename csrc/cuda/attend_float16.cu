#include "attend_launch.cuh"
#include "products_16.cuh"

namespace pagedkv::cuda {

int attend_float16(const AttentionParams& p, const Plan& plan, const Job& job,
                   const DeviceLimits& limits, cudaStream_t stream) {
  return start_attend<TensorCoreProducts<Float16>>(p, plan, job, limits, stream);
}

}  // namespace pagedkv::cuda
