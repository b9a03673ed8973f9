// paged_attention: the waves of splits, and the kernel that folds them.
#include "api.h"
#include "launches.h"
#include "numbers.cuh"
#include "rows.cuh"
#include "state.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kFoldWarps = 4;
constexpr int kMaxHeadDim = 256;
constexpr int kLaneValues = kMaxHeadDim / kWarpThreads;

__device__ void store(void* out, DType dtype, int64_t index, float value) {
  if (dtype == DType::Float32) {
    static_cast<float*>(out)[index] = value;
  } else {
    const uint32_t pair =
        dtype == DType::BFloat16 ? BFloat16::narrow2(value, 0.0f) : Float16::narrow2(value, 0.0f);
    static_cast<uint16_t*>(out)[index] = static_cast<uint16_t>(pair);
  }
}

__device__ void finish_row(const AttentionParams& p, int64_t token, int64_t head, int lane,
                           const float (&sums)[kLaneValues], Finished finished) {
  const int64_t row = token * p.out.token_stride + head * p.out.head_stride;
  for (int i = 0; i < kLaneValues; ++i) {
    const int d = lane + i * kWarpThreads;
    if (d < p.head_dim) store(p.out.data, p.query_dtype, row + d, finish_value(sums[i], finished));
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = finished.lse;
  }
}

/// Folds the states of a wave in order, a warp for each query and head, and ends the rows with the
/// last one. Queries that belong to nobody become zeros here.
__global__ void __launch_bounds__(kFoldWarps* kWarpThreads)
    fold_splits(const __grid_constant__ AttentionParams p, const __grid_constant__ Job job) {
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t row = int64_t{blockIdx.x} * kFoldWarps + threadIdx.x / kWarpThreads;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads;
  float sums[kLaneValues] = {};
  SoftmaxState state = {minus_infinity(), 0.0f};

  const auto first_token = [&](int64_t i) { return int64_t{p.query_start_loc[i]}; };
  const int64_t found = p.num_seqs > 0 ? find_last(p.num_seqs, token, first_token) : -1;
  const bool is_padding = found < 0 || found >= p.num_seqs || p.seq_lens[found] <= 0;
  if (is_padding) {
    if (job.is_last_wave) finish_row(p, token, head, lane, sums, finish(state, nullptr));
    return;
  }
  const SequenceView seq = view_sequence(p, found);
  if (seq.num_queries * (p.num_heads / p.num_kv_heads) > job.few_rows) return;

  const int64_t query = token - seq.first_token, position = seq.first_position + query;
  const int64_t slot = find_slot(p, job, seq, query, head);
  if (job.first_split > 0) {
    state = {job.running_states[2 * slot], job.running_states[2 * slot + 1]};
    for (int i = 0; i < kLaneValues; ++i) {
      const int d = lane + i * kWarpThreads;
      if (d < p.head_dim) sums[i] = job.running_values[slot * p.head_dim + d];
    }
  }
  const KeyRange keys = key_range(p, seq, position, position);
  const int64_t wave_end = job.first_split + job.num_splits;
  const int64_t own_end = keys.end > 0 ? ceil_div(keys.end, kSplitTokens) : 0;
  int64_t split = keys.begin / kSplitTokens;
  if (split < job.first_split) split = job.first_split;
  for (; split < own_end && split < wave_end; ++split) {
    const int64_t place = slot * job.num_splits + split - job.first_split;
    const FoldWeights weights = fold(state, {job.states[2 * place], job.states[2 * place + 1]});
    for (int i = 0; i < kLaneValues; ++i) {
      const int d = lane + i * kWarpThreads;
      if (d < p.head_dim) {
        sums[i] = fold_value(sums[i], job.values[place * p.head_dim + d], weights);
      }
    }
  }
  if (job.is_last_wave) {
    finish_row(p, token, head, lane, sums, finish(state, p.sinks ? p.sinks + head : nullptr));
    return;
  }
  __syncwarp();  // all have read what comes now
  if (lane == 0) {
    job.running_states[2 * slot] = state.top;
    job.running_states[2 * slot + 1] = state.sum;
  }
  for (int i = 0; i < kLaneValues; ++i) {
    const int d = lane + i * kWarpThreads;
    if (d < p.head_dim) job.running_values[slot * p.head_dim + d] = sums[i];
  }
}

int attend_any(const AttentionParams& p, const Plan& plan, const Job& job,
               const DeviceLimits& limits, cudaStream_t stream) {
  switch (p.query_dtype) {
    case DType::Float32:
      return attend_float32(p, plan, job, limits, stream);
    case DType::BFloat16:
      return attend_bfloat16(p, plan, job, limits, stream);
    case DType::Float16:
      return attend_float16(p, plan, job, limits, stream);
    default:
      return kUnsupported;
  }
}

int64_t size_of(DType dtype) {
  return dtype == DType::Float32 ? 4 : dtype == DType::BFloat16 || dtype == DType::Float16 ? 2 : 1;
}

/// Whether rows of head_dim numbers at these strides can be read 16 bytes at a time.
template <class View>
bool is_aligned(const View& view, std::initializer_list<int64_t> strides, int64_t head_dim,
                DType dtype) {
  int64_t bits = reinterpret_cast<int64_t>(view.data) | head_dim * size_of(dtype);
  for (const int64_t stride : strides) bits |= stride * size_of(dtype);
  return bits % 16 == 0;
}

bool is_aligned(const PagesView& v, const AttentionParams& p) {
  const std::initializer_list<int64_t> strides = {v.block_stride, v.token_stride, v.head_stride};
  return is_aligned(v, strides, p.head_dim, p.page_dtype);
}

Job make_job(const AttentionParams& p, const Plan& plan, float* scratch) {
  Job job{};
  job.few_rows = plan.few_rows;
  job.tokens_per_seq = plan.tokens_per_seq;
  job.has_aligned_pages = is_aligned(p.key_pages, p) && is_aligned(p.value_pages, p);
  job.has_aligned_queries =
      is_aligned(p.query, {p.query.token_stride, p.query.head_stride}, p.head_dim, p.query_dtype);
  const int64_t places = plan.num_slots * plan.wave_splits;
  job.values = scratch;
  job.states = job.values + places * p.head_dim;
  job.running_values = job.states + places * 2;
  job.running_states = job.running_values + plan.num_slots * p.head_dim;
  return job;
}

int find_limits(DeviceLimits& limits) {
  int device = 0, shared_bytes = 0, num_multiprocessors = 0;
  if (const int error = cudaGetDevice(&device)) return error;
  const auto find = [&](int& value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(&value, attribute, device);
  };
  if (const int error = find(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin)) return error;
  if (const int error = find(num_multiprocessors, cudaDevAttrMultiProcessorCount)) return error;
  limits = {static_cast<size_t>(shared_bytes), num_multiprocessors};
  return 0;
}

int paged_attention(const AttentionParams& p, float* scratch, cudaStream_t stream) {
  DeviceLimits limits;
  if (const int error = find_limits(limits)) return error;
  const Plan plan = make_plan(p);
  Job job = make_job(p, plan, scratch);
  if (plan.may_have_many_rows && p.num_seqs > 0) {
    if (const int error = attend_any(p, plan, job, limits, stream)) return error;
  }
  job.spread = true;
  const int64_t fold_blocks = ceil_div<int64_t>(p.num_tokens * p.num_heads, kFoldWarps);
  if (fold_blocks > INT32_MAX) return kUnsupported;
  for (int64_t wave = 0; wave < plan.num_waves(); ++wave) {
    job.first_split = wave * plan.wave_splits;
    job.num_splits = std::min(plan.wave_splits, plan.num_splits - job.first_split);
    job.is_last_wave = wave + 1 == plan.num_waves();
    if (p.num_seqs > 0) {
      if (const int error = attend_any(p, plan, job, limits, stream)) return error;
    }
    if (const int error = launch(fold_splits, dim3(static_cast<unsigned>(fold_blocks)),
                                 kFoldWarps * kWarpThreads, 0, stream, p, job)) {
      return error;
    }
  }
  return 0;
}

}  // namespace
}  // namespace pagedkv::cuda

int64_t pagedkv_cuda_paged_attention_workspace_bytes(const pagedkv::AttentionParams* params) {
  return pagedkv::cuda::make_plan(*params).num_floats(*params) * 4;
}

int pagedkv_cuda_paged_attention(const pagedkv::AttentionParams* params, void* workspace,
                                 int64_t workspace_bytes, cudaStream_t stream) {
  using namespace pagedkv::cuda;
  if (params->head_dim > kMaxHeadDim || params->num_kv_heads > 65535) return kUnsupported;
  if (workspace_bytes < pagedkv_cuda_paged_attention_workspace_bytes(params)) {
    return kSmallWorkspace;
  }
  if (params->num_tokens == 0) return 0;
  return paged_attention(*params, static_cast<float*>(workspace), stream);
}
