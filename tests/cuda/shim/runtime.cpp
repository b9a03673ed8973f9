// The few functions of the CUDA run time that the library calls, for a machine with one device.
#include <cstdint>

#include "cuda_runtime_api.h"

namespace {
int shared_limit = 227 * 1024;  // of an H100
}

/// The shared memory that a block may have, since the choice of tiles depends on it.
extern "C" __attribute__((visibility("default"))) void emulated_shared_limit(int bytes) {
  shared_limit = bytes;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = shared_limit;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "threads wait for others that never come"
         : error == cudaErrorNoDevice    ? "no device"
                                         : "no error";
}
