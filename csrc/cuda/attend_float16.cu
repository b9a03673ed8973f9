#include "attend_launch.cuh"
#include "products_16.cuh"

namespace pagedkv::cuda {

int attend_float16(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                   cudaStream_t stream) {
  return start_attend<TensorCoreProducts<Float16>>(p, plan, job, shared_limit, stream);
}

}  // namespace pagedkv::cuda
