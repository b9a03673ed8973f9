// Stands in for CUDA's language extensions and what the kernels use of its device library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "threads.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define threadIdx (emulated::thread_index())
#define blockIdx (emulated::block_index())
#define gridDim (emulated::grid_size())

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __syncwarp() {
  emulated::meet_warp("__syncwarp", nullptr, [](void* const*) {});
}

template <class T>
T shuffle(const char* name, T value, int source) {
  struct Lane {
    T value, result;
    int source;
  } lane{value, value, source};
  emulated::meet_warp(name, &lane, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
      auto* self = static_cast<Lane*>(lanes[i]);
      self->result = static_cast<const Lane*>(lanes[self->source & 31])->value;
    }
  });
  return lane.result;
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return shuffle("__shfl_sync", value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int apart) {
  return shuffle("__shfl_xor_sync", value, (emulated::thread_number() & 31) ^ apart);
}

inline bool __any_sync(unsigned, bool value) {
  struct Lane {
    bool value;
  } lane{value};
  emulated::meet_warp("__any_sync", &lane, [](void* const* lanes) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= static_cast<const Lane*>(lanes[i])->value;
    for (int i = 0; i < 32; ++i) static_cast<Lane*>(lanes[i])->value = any;
  });
  return lane.value;
}
