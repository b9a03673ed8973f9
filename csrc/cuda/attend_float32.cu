#include "attend_launch.cuh"
#include "products_float32.cuh"

namespace pagedkv::cuda {

int attend_float32(const AttentionParams& p, const Plan& plan, const Job& job, size_t shared_limit,
                   cudaStream_t stream) {
  return start_attend<Float32Products>(p, plan, job, shared_limit, stream);
}

}  // namespace pagedkv::cuda
