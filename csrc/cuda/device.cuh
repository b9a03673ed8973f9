// What kernels ask of the machine besides arithmetic. With PAGEDKV_CPU_EMU the header of a host
// shim takes the place of the CUDA run time, and everything else compiles as it is.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#ifdef PAGEDKV_CPU_EMU
#include "emulated_device.h"
#endif

namespace pagedkv::cuda {

constexpr int kWarpThreads = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

#ifdef PAGEDKV_CPU_EMU
using emulated::dynamic_shared;
using emulated::launch;
#else
/// The block's dynamic shared memory.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char pagedkv_dynamic_shared[];
  return pagedkv_dynamic_shared;
}

/// Starts a kernel; returns a cudaError.
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes,
           cudaStream_t stream, const Args&... args) {
  if (shared_bytes > 48 * 1024) {
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, most, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}
#endif

/// Waits for all threads of a block of so many warps; their writes to shared memory are seen.
template <int kWarps>
__device__ inline void block_barrier() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

template <class T>
__host__ __device__ constexpr T ceil_div(T dividend, T divisor) {
  return (dividend + divisor - 1) / divisor;
}

}  // namespace pagedkv::cuda
