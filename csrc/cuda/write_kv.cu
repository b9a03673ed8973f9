// write_kv: a warp for each new token and KV head, for K and for V. Bound by memory traffic.
#include "api.h"
#include "numbers.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kChunk = 8;  // numbers that a lane takes at a time

/// The arguments of one of K and V.
struct Side {
  TokensView tokens;
  PagesView pages;
  ScalesView scales;
};

__device__ float widen(const void* from, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::Float32:
      return static_cast<const float*>(from)[index];
    case DType::BFloat16:
      return BFloat16::widen(static_cast<const uint16_t*>(from)[index]);
    default:
      return Float16::widen(static_cast<const uint16_t*>(from)[index]);
  }
}

/// As torch: NaN beats every number.
__device__ float larger(float a, float b) { return a > b || a != a ? a : b; }

__device__ float largest_magnitude(const void* from, DType dtype, int64_t begin, int num_numbers,
                                   int lane) {
  float largest = 0.0f;
  for (int d = lane; d < num_numbers; d += kWarpThreads) {
    largest = larger(largest, fabsf(widen(from, dtype, begin + d)));
  }
  for (int apart = kWarpThreads / 2; apart > 0; apart /= 2) {
    largest = larger(largest, __shfl_xor_sync(kWholeWarp, largest, apart));
  }
  return largest;
}

/// Moves the bytes of a row, 16 at a time where both ends allow it.
__device__ void copy_row(unsigned char* to, const unsigned char* from, int64_t num_bytes,
                         int lane) {
  const auto ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  const int64_t num_wide = ends % 16 == 0 ? num_bytes / 16 : 0;
  for (int64_t i = lane; i < num_wide; i += kWarpThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = num_wide * 16 + lane; i < num_bytes; i += kWarpThreads) to[i] = from[i];
}

__device__ uint8_t quantise(float x, bool divide, float scale, DType dtype) {
  if (divide) x = scale == 0.0f ? 0.0f : x / scale;
  return dtype == DType::Int8 ? static_cast<uint8_t>(narrow_int8(x)) : narrow_float8(x);
}

__device__ void quantise_row(const WriteKvParams& p, const Side& side, int64_t from, uint8_t* to,
                             int64_t page, int64_t offset, int64_t head, int lane) {
  float scale = 1.0f;
  if (side.scales.data != nullptr) {
    float* place = side.scales.data + page * side.scales.block_stride +
                   offset * side.scales.token_stride + head * side.scales.head_stride;
    if (side.scales.token_stride == 0) {
      scale = *place;
    } else {
      const float most = p.page_dtype == DType::Int8 ? 127.0f : 448.0f;
      scale = largest_magnitude(side.tokens.data, p.token_dtype, from, p.head_dim, lane) / most;
      if (lane == 0) *place = scale;
    }
  }
  const bool divide = side.scales.data != nullptr;
  for (int d = lane * kChunk; d < p.head_dim; d += kWarpThreads * kChunk) {
    uint64_t packed = 0;
    const int rest = p.head_dim - d < kChunk ? p.head_dim - d : kChunk;
    for (int i = 0; i < rest; ++i) {
      const float x = widen(side.tokens.data, p.token_dtype, from + d + i);
      packed |= static_cast<uint64_t>(quantise(x, divide, scale, p.page_dtype)) << (8 * i);
    }
    if (rest == kChunk && reinterpret_cast<uintptr_t>(to + d) % 8 == 0) {
      *reinterpret_cast<uint64_t*>(to + d) = packed;
    } else {
      for (int i = 0; i < rest; ++i) to[d + i] = static_cast<uint8_t>(packed >> (8 * i));
    }
  }
}

/// Grid: tokens times heads, kWarps of them a block; K and V.
__global__ void __launch_bounds__(kWarps* kWarpThreads)
    write_rows(const __grid_constant__ WriteKvParams p) {
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads;
  if (row >= p.num_tokens * p.num_kv_heads) return;
  const int64_t token = row / p.num_kv_heads, head = row % p.num_kv_heads;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return;
  const Side side = blockIdx.y == 0 ? Side{p.key, p.key_pages, p.key_scales}
                                    : Side{p.value, p.value_pages, p.value_scales};
  const int64_t page = slot / p.block_size, offset = slot % p.block_size;
  const int64_t from = token * side.tokens.token_stride + head * side.tokens.head_stride;
  const int64_t to = page * side.pages.block_stride + offset * side.pages.token_stride +
                     head * side.pages.head_stride;
  auto* pages = static_cast<unsigned char*>(side.pages.data);
  if (p.token_dtype != p.page_dtype) {
    quantise_row(p, side, from, pages + to, page, offset, head, lane);
    return;
  }
  const int64_t bytes = p.page_dtype == DType::Float32                                      ? 4
                        : p.page_dtype == DType::BFloat16 || p.page_dtype == DType::Float16 ? 2
                                                                                            : 1;
  copy_row(pages + to * bytes, static_cast<const unsigned char*>(side.tokens.data) + from * bytes,
           p.head_dim * bytes, lane);
}

}  // namespace
}  // namespace pagedkv::cuda

int pagedkv_cuda_write_kv(const pagedkv::WriteKvParams* params, cudaStream_t stream) {
  using namespace pagedkv::cuda;
  const int64_t num_blocks = ceil_div<int64_t>(params->num_tokens * params->num_kv_heads, kWarps);
  if (num_blocks == 0) return 0;
  if (num_blocks > INT32_MAX) return kUnsupported;
  return launch(write_rows, dim3(static_cast<unsigned>(num_blocks), 2), kWarps * kWarpThreads, 0,
                stream, *params);
}
