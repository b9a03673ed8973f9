// The number formats of queries and pages: into float32, exactly, and back, to the nearest even.
//
// `load_pair` gives two registers of consecutive elements in an order of the format's own, that of
// the cheapest instructions: bfloat16 comes as the even and the odd elements. Queries, keys, values
// and sums are kept in that order from beginning to end; `store_pair` undoes it.

#pragma once

#include "simd.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

struct Float32 {
  using Stored = float;
  static PAGEDKV_INLINE Floats load_one(const float* from) { return load(from); }
  static PAGEDKV_INLINE void load_pair(const float* from, Floats& a, Floats& b) {
    a = load(from);
    b = load(from + kLanes);
  }
  static PAGEDKV_INLINE float load_scalar(float stored) { return stored; }
  static PAGEDKV_INLINE void store_one(float* to, Floats value) { store(to, value); }
  static PAGEDKV_INLINE void store_pair(float* to, Floats a, Floats b) {
    store(to, a);
    store(to + kLanes, b);
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  static PAGEDKV_INLINE Floats load_one(const uint16_t* from) {
#if defined(PAGEDKV_SIMD_AVX2)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#else
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
  }
  static PAGEDKV_INLINE void load_pair(const uint16_t* from, Floats& even, Floats& odd) {
    const Words both = load<Words>(from);
    even = (Floats)(both << 16);
    odd = (Floats)(both & 0xffff0000u);
  }
  static PAGEDKV_INLINE float load_scalar(uint16_t stored) {
    const uint32_t word = (uint32_t)stored << 16;
    return __builtin_bit_cast(float, word);
  }
  // The upper halves hold the result.
  static PAGEDKV_INLINE Words round(Floats value) {
    const Words word = (Words)value;
    const Words rounded = word + 0x7fff + ((word >> 16) & 1);
    const Words is_nan = (Words)(value != value);
    return (rounded & ~is_nan) | ((word | 0x00400000) & is_nan);
  }
  static PAGEDKV_INLINE void store_one(uint16_t* to, Floats value) {
    store(to, __builtin_convertvector(round(value) >> 16, Halves));
  }
  static PAGEDKV_INLINE void store_pair(uint16_t* to, Floats even, Floats odd) {
    store(to, (round(even) >> 16) | (round(odd) & 0xffff0000u));
  }
};

struct Float16 {
  using Stored = uint16_t;
  static PAGEDKV_INLINE Floats load_one(const uint16_t* from) {
#if defined(PAGEDKV_SIMD_AVX512)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(PAGEDKV_SIMD_AVX2)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(PAGEDKV_SIMD_NEON)
    return (Floats)vcvt_f32_f16(load<float16x4_t>(from));
#else
    // Shifted into float32's place the number is 2^112 times too small, subnormals included; only
    // infinities and NaN need their exponent set.
    const Words stored = __builtin_convertvector(load<Halves>(from), Words);
    const Words magnitude = (stored & 0x7fff) << 13;
    const Floats scaled = (Floats)magnitude * 0x1p112f;
    const Words special = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (Floats)((Words)scaled | special | ((stored & 0x8000) << 16));
#endif
  }
  static PAGEDKV_INLINE void load_pair(const uint16_t* from, Floats& a, Floats& b) {
    a = load_one(from);
    b = load_one(from + kLanes);
  }
  static PAGEDKV_INLINE float load_scalar(uint16_t stored) {
    uint16_t several[kLanes] = {stored};
    return load_one(several)[0];
  }
  static PAGEDKV_INLINE void store_one(uint16_t* to, Floats value) {
#if defined(PAGEDKV_SIMD_AVX512)
    store(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(PAGEDKV_SIMD_AVX2)
    store(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(PAGEDKV_SIMD_NEON)
    store(to, vcvt_f16_f32((float32x4_t)value));
#else
    const Floats size = abs(value);
    const Words word = (Words)size;
    const Words normal = (word + 0xfff + ((word >> 13) & 1) - 0x38000000u) >> 13;
    const Words subnormal = (Words)(size + 0.5f) - (Words)all(0.5f);  // 0.5 has 2^-24 as its unit
    Words result = (Words)(size < 0x1p-14f);
    result = (subnormal & result) | (normal & ~result);
    const Words too_large = (Words)(size >= 65520.0f);
    result = (result & ~too_large) | (0x7c00 & too_large);
    const Words is_nan = (Words)(value != value);
    result = (result & ~is_nan) | ((0x7e00 | ((word >> 13) & 0x3ff)) & is_nan);
    result |= ((Words)value >> 16) & 0x8000;
    store(to, __builtin_convertvector(result, Halves));
#endif
  }
  static PAGEDKV_INLINE void store_pair(uint16_t* to, Floats a, Floats b) {
    store_one(to, a);
    store_one(to + kLanes, b);
  }
};

struct Int8 {
  using Stored = int8_t;
  static constexpr float kLargest = 127.0f;
  static PAGEDKV_INLINE Floats load_one(const int8_t* from) {
#if defined(PAGEDKV_SIMD_AVX512)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(PAGEDKV_SIMD_AVX2)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
#endif
  }
  static PAGEDKV_INLINE void load_pair(const int8_t* from, Floats& a, Floats& b) {
    a = load_one(from);
    b = load_one(from + kLanes);
  }
  static PAGEDKV_INLINE float load_scalar(int8_t stored) { return stored; }
  /// Rounds to the nearest even, saturates at 127 both ways; NaN becomes 0.
  static PAGEDKV_INLINE void store_one(int8_t* to, Floats value) {
    value = choose(value == value, value, Floats{});
    value = max(min(value, all(kLargest)), all(-kLargest));
    const Floats magic = all(12582912.0f);
    store(to, __builtin_convertvector(bits(value + magic) - bits(magic), Bytes));
  }
};

/// Four bits of exponent, three of mantissa, no infinities, NaN only at 0x7f and 0xff.
struct Float8 {
  using Stored = uint8_t;
  static constexpr float kLargest = 448.0f;
  static PAGEDKV_INLINE Floats with_nan(Floats value) {
    return floats(bits(value) | (abs(value) == 480.0f));  // what NaN's pattern would otherwise mean
  }
  static PAGEDKV_INLINE Floats load_one(const uint8_t* from) {
#if defined(PAGEDKV_SIMD_AVX512)
    const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(from));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0xbfff - 65536));
    return with_nan((Floats)_mm512_cvtph_ps(half) * 256.0f);
#elif defined(PAGEDKV_SIMD_AVX2)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0xbfff - 65536));
    return with_nan((Floats)_mm256_cvtph_ps(half) * 256.0f);
#else
    const Ints wide = __builtin_convertvector(load<Bytes>(from), Ints);
    const Floats magnitude = floats((wide & 0x7f) << 20) * 0x1p120f;
    return with_nan(floats(bits(magnitude) | (wide & (int32_t)0x80000000)));
#endif
  }
  static PAGEDKV_INLINE void load_pair(const uint8_t* from, Floats& a, Floats& b) {
#if defined(PAGEDKV_SIMD_AVX2)
    const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(from));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0xbfff - 65536));
    a = with_nan((Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * 256.0f);
    b = with_nan((Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * 256.0f);
#else
    a = load_one(from);
    b = load_one(from + kLanes);
#endif
  }
  static PAGEDKV_INLINE float load_scalar(uint8_t stored) {
    uint8_t several[16] = {stored};
    return load_one(several)[0];
  }
  /// Rounds to the nearest even and saturates at 448 both ways; NaN stays NaN.
  static PAGEDKV_INLINE void store_one(uint8_t* to, Floats value) {
    const Floats size = min(abs(value), all(kLargest));
    const Words word = (Words)size;
    const Words normal = (word + 0x7ffff + ((word >> 20) & 1) - (120u << 23)) >> 20;
    const Words subnormal = (Words)(size + 16384.0f) - (Words)all(16384.0f);  // its unit is 2^-9
    const Words is_small = (Words)(size < 0x1p-6f);
    Words result = (subnormal & is_small) | (normal & ~is_small);
    result |= (Words)(value != value) & 0x7f;
    result |= ((Words)value >> 24) & 0x80;
    store(to, (Bytes) __builtin_convertvector(result, Bytes));
  }
};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
