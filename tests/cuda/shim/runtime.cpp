// The few functions of the CUDA run time that the library calls, for a machine with one device.
#include <cstdint>

#include "cuda_runtime_api.h"

namespace {
int shared_limit = 227 * 1024, capability = 9;  // of an H100
}

extern "C" __attribute__((visibility("default"))) void emulated_capability(int major) {
  capability = major;
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

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 1;  // so that blocks of larger batches take several splits
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_limit;
      break;
  }
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "threads wait for others that never come"
         : error == cudaErrorNoDevice    ? "no device"
                                         : "no error";
}
