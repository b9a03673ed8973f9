// Conversions between float32 and the narrow types. All are exact one way and round to the nearest
// even the other way. bfloat16 and float16 are kept as their bits.
#pragma once

#include "device.cuh"

#ifdef PAGEDKV_CPU_EMU
#include "emulated_numbers.h"
#endif

namespace pagedkv::cuda {

/// bfloat16; `narrow2` packs two, the first in the low half.
struct BFloat16 {
  __device__ static float widen(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  __device__ static uint32_t narrow2(float low, float high) {
#ifdef PAGEDKV_CPU_EMU
    return emulated::to_bfloat16(low) | static_cast<uint32_t>(emulated::to_bfloat16(high)) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
  }
};

struct Float16 {
  __device__ static float widen(uint16_t bits) {
#ifdef PAGEDKV_CPU_EMU
    return emulated::from_float16(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
  }
  __device__ static uint32_t narrow2(float low, float high) {
#ifdef PAGEDKV_CPU_EMU
    return emulated::to_float16(low) | static_cast<uint32_t>(emulated::to_float16(high)) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
  }
};

/// float8 e4m3fn, by integer arithmetic, since only newer devices have instructions for it.
__device__ inline float widen_float8(uint8_t bits) {
  // The same exponent and mantissa in float32's places, whose bias is larger by 120.
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7f) << 20;
  const float value = __uint_as_float(magnitude) * 0x1p120f;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24;
  const uint32_t nan = (bits & 0x7f) == 0x7f ? 0x7fc00000u : 0u;
  return __uint_as_float(__float_as_uint(value) | sign | nan);
}

/// Saturates at 448; NaN stays NaN.
__device__ inline uint8_t narrow_float8(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float magnitude = fabsf(value);
  if (!(magnitude <= 448.0f)) return magnitude > 448.0f ? sign | 0x7e : sign | 0x7f;
  // Below 2^-6 the spacing is 2^-9 throughout; rounding up to 8 of them gives the first normal one.
  if (magnitude < 0x1p-6f) return sign | static_cast<uint8_t>(rintf(magnitude * 0x1p9f));
  const uint32_t whole = bits & 0x7fffffffu;
  const uint32_t rounded = whole + 0x7ffffu + (whole >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120 << 3));
}

__device__ inline int8_t narrow_int8(float value) {
  const float clamped = fminf(fmaxf(rintf(value), -127.0f), 127.0f);
  return static_cast<int8_t>(clamped);
}

}  // namespace pagedkv::cuda
