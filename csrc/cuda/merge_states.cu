// merge_attention_states: a warp for each token and head folds the states in their order.
#include "api.h"
#include "numbers.cuh"
#include "state.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kWarps = 4;

struct Float32 {
  using Element = float;
  __device__ static float widen(float value) { return value; }
  __device__ static float narrow(float value) { return value; }
};

template <class Number>
struct Narrow {
  using Element = uint16_t;
  __device__ static float widen(uint16_t bits) { return Number::widen(bits); }
  __device__ static uint16_t narrow(float value) {
    return static_cast<uint16_t>(Number::narrow2(value, 0.0f));
  }
};

template <class Number>
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    merge_states(const __grid_constant__ MergeStatesParams p) {
  using Element = typename Number::Element;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads;
  const float* lses = p.lses + token * p.lses_token_stride + head * p.lses_head_stride;
  const Element* outs =
      static_cast<const Element*>(p.outs) + token * p.outs_token_stride + head * p.outs_head_stride;
  Element* out =
      static_cast<Element*>(p.out.data) + token * p.out.token_stride + head * p.out.head_stride;
  for (int d = lane; d < p.head_dim; d += kWarpThreads) {
    SoftmaxState state = {minus_infinity(), 0.0f};
    float sum = 0.0f;
    for (int64_t i = 0; i < p.num_states; ++i) {
      const float lse = lses[i * p.lses_state_stride];
      const FoldWeights weights = fold(state, {lse * kLog2e, 1.0f});
      sum = fold_value(sum, Number::widen(outs[i * p.outs_state_stride + d]), weights);
    }
    const Finished finished = finish(state, nullptr);
    out[d] = Number::narrow(finish_value(sum, finished));
    if (d == 0 && p.lse != nullptr) {
      p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = finished.lse;
    }
  }
}

}  // namespace
}  // namespace pagedkv::cuda

int pagedkv_cuda_merge_attention_states(const pagedkv::MergeStatesParams* params,
                                        cudaStream_t stream) {
  using namespace pagedkv::cuda;
  using pagedkv::DType;
  const int64_t num_blocks = ceil_div<int64_t>(params->num_tokens * params->num_heads, kWarps);
  if (num_blocks == 0) return 0;
  if (num_blocks > INT32_MAX) return kUnsupported;
  const dim3 grid(static_cast<unsigned>(num_blocks));
  constexpr int kThreads = kWarps * kWarpThreads;
  switch (params->dtype) {
    case DType::Float32:
      return launch(merge_states<Float32>, grid, kThreads, 0, stream, *params);
    case DType::BFloat16:
      return launch(merge_states<Narrow<BFloat16>>, grid, kThreads, 0, stream, *params);
    case DType::Float16:
      return launch(merge_states<Narrow<Float16>>, grid, kThreads, 0, stream, *params);
    default:
      return kUnsupported;
  }
}
