// Registers of float32 and how they are reduced, for whichever instruction set the including file
// is compiled. Everything has internal linkage, and no standard header is included: see
// kernel_table.h.
//
// PAGEDKV_ISA names the namespace. No product and sum are contracted behind our back
// (-ffp-contract=off), so every tile shape rounds alike.

#pragma once

#include <stdint.h>

#if defined(PAGEDKV_SIMD_AVX512) || defined(PAGEDKV_SIMD_AVX2)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(PAGEDKV_SIMD_NEON)
#include <arm_neon.h>
#endif

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

#if defined(PAGEDKV_SIMD_AVX512)
constexpr int kLanes = 16;
#elif defined(PAGEDKV_SIMD_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(PAGEDKV_SIMD_AVX512) || defined(__aarch64__)
constexpr bool kHas32Registers = true;
#else
constexpr bool kHas32Registers = false;
#endif

#define PAGEDKV_INLINE __attribute__((always_inline)) inline
#define PAGEDKV_UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef float Floats4 __attribute__((vector_size(16)));

constexpr float kMinusInfinity = -__builtin_inff();

template <typename Vector>
PAGEDKV_INLINE Vector load(const void* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
template <typename Vector>
PAGEDKV_INLINE void store(void* to, Vector value) {
  __builtin_memcpy(to, &value, sizeof value);
}
PAGEDKV_INLINE Floats load(const float* from) { return load<Floats>(from); }

PAGEDKV_INLINE Floats all(float value) { return value - Floats{}; }
PAGEDKV_INLINE Ints all(int32_t value) { return value - Ints{}; }
PAGEDKV_INLINE Ints bits(Floats value) { return (Ints)value; }
PAGEDKV_INLINE Floats floats(Ints value) { return (Floats)value; }
PAGEDKV_INLINE Floats choose(Ints mask, Floats yes, Floats no) {
  return floats((bits(yes) & mask) | (bits(no) & ~mask));
}
// NaN in `b` wins; NaN in `a` loses.
PAGEDKV_INLINE Floats max(Floats a, Floats b) {
#if defined(PAGEDKV_SIMD_AVX512)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(PAGEDKV_SIMD_AVX2)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
PAGEDKV_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
PAGEDKV_INLINE Floats abs(Floats value) { return floats(bits(value) & 0x7fffffff); }

/// a * b + c, rounded once where the hardware can, twice where it can't.
PAGEDKV_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(PAGEDKV_SIMD_AVX512)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PAGEDKV_SIMD_AVX2)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(PAGEDKV_SIMD_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Makes the compiler load a number into a register once, rather than from memory at every use.
PAGEDKV_INLINE void keep(Floats& value) {
#if defined(PAGEDKV_SIMD_AVX512)
  asm("" : "+v"(value));
#elif defined(__SSE2__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  (void)value;
#endif
}

PAGEDKV_INLINE Ints lane_numbers() {
  Ints lanes;
  PAGEDKV_UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// The sums of four registers, each by the same tree: neighbours within 128 bits, then the quarters
// or halves of the register.
PAGEDKV_INLINE Floats4 sums_of(Floats a, Floats b, Floats c, Floats d) {
#if defined(PAGEDKV_SIMD_AVX512)
  const auto neighbours = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  };
  const __m512 quads =
      neighbours(neighbours((__m512)a, (__m512)b), neighbours((__m512)c, (__m512)d));
  const __m256 pairs =
      _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return (Floats4)_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
#elif defined(PAGEDKV_SIMD_AVX2)
  const auto neighbours = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  };
  const __m256 quads =
      neighbours(neighbours((__m256)a, (__m256)b), neighbours((__m256)c, (__m256)d));
  return (Floats4)_mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
#elif defined(PAGEDKV_SIMD_NEON)
  const float32x4_t low = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
  return (Floats4)vpaddq_f32(low, vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#elif defined(__SSE2__)
  const auto neighbours = [](__m128 x, __m128 y) {
    return _mm_add_ps(_mm_shuffle_ps(x, y, 0x88), _mm_shuffle_ps(x, y, 0xdd));
  };
  return (Floats4)neighbours(neighbours((__m128)a, (__m128)b), neighbours((__m128)c, (__m128)d));
#else
  return Floats4{(a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]),
                 (c[0] + c[1]) + (c[2] + c[3]), (d[0] + d[1]) + (d[2] + d[3])};
#endif
}

PAGEDKV_INLINE float sum_of(Floats value) { return sums_of(value, value, value, value)[0]; }

PAGEDKV_INLINE float max_of(Floats value) {
  float largest = value[0];
  PAGEDKV_UNROLL for (int i = 1; i < kLanes; ++i) {
    largest = value[i] > largest ? value[i] : largest;
  }
  return largest;
}

constexpr float kLog2E = 1.44269504088896340736f;

/// 2^x of some registers for x <= 0, within two units of the last place; 0 below -126.5; NaN stays
/// NaN; 2^0 is 1. Several side by side, since each is a chain of which every step waits for the
/// last.
template <int kCount>
PAGEDKV_INLINE void exp2_of_negative(Floats (&x)[kCount]) {
  constexpr float kFactors[] = {0.0013398873852565885f, 0.00961843691766262f, 0.055503323674201965f,
                                0.24022647738456726f,   0.6931471824645996f,  1.0f};
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  Floats shifted[kCount], p[kCount];
  PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) x[i] = max(all(-127.0f), x[i]);
  PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) shifted[i] = x[i] + magic;
  PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) x[i] = x[i] - (shifted[i] - magic);
  PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) p[i] = all(0.00015353361959569156f);
  PAGEDKV_UNROLL for (int k = 0; k < 6; ++k) {
    PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) p[i] = fma(p[i], x[i], all(kFactors[k]));
  }
  PAGEDKV_UNROLL for (int i = 0; i < kCount; ++i) {
    const Ints exponent = bits(shifted[i]) - bits(magic) + 127;
    x[i] = p[i] * floats(exponent << 23);
  }
}
PAGEDKV_INLINE Floats exp2_of_negative(Floats x) {
  Floats one[] = {x};
  exp2_of_negative(one);
  return one[0];
}

PAGEDKV_INLINE float exp_of_negative(float x) { return exp2_of_negative(all(x * kLog2E))[0]; }

PAGEDKV_INLINE Floats tanh_of(Floats x) {
  const Floats size = abs(x);
  const Floats square = x * x;
  Floats p = all(-0.005717045161873102f);
  p = fma(p, square, all(0.02065058797597885f));
  p = fma(p, square, all(-0.05374349653720856f));
  p = fma(p, square, all(0.13331490755081177f));
  p = fma(p, square, all(-0.3333328366279602f));
  const Floats near_zero = fma(p * square, size, size);
  const Floats decayed = exp2_of_negative(size * all(-2.0f * kLog2E));
  const Floats far = (1.0f - decayed) / (1.0f + decayed);
  const Floats magnitude = choose(size < 0.625f, near_zero, far);
  return floats(bits(magnitude) | (bits(x) & (int32_t)0x80000000));
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
