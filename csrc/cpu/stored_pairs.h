// What lies in pages, as pairs of bfloat16: exactly, whether it is stored so or in 8 bits.

#pragma once

#include "pair_products.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

/// kPairDims numbers that follow one another.
template <typename Format>
PAGEDKV_INLINE Words load_words(const typename Format::Stored* from);

/// The same of two keys, each number of one beside that of the other. Which of the two registers a
/// number is in is as in the rest of a row's state (formats.h).
template <typename Format>
PAGEDKV_INLINE void load_two(const typename Format::Stored* first,
                             const typename Format::Stored* second, Words& a, Words& b);

template <>
PAGEDKV_INLINE Words load_words<BFloat16>(const uint16_t* from) {
  return load_pairs(from);
}
template <>
PAGEDKV_INLINE void load_two<BFloat16>(const uint16_t* first, const uint16_t* second, Words& a,
                                       Words& b) {
  pair_values(first, second, a, b);
}

template <>
PAGEDKV_INLINE Words load_words<Int8>(const int8_t* from) {
  Floats low, high;
  Int8::load_pair(from, low, high);
  return (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
template <>
PAGEDKV_INLINE void load_two<Int8>(const int8_t* first, const int8_t* second, Words& a, Words& b) {
  Floats low[2], high[2];
  Int8::load_pair(first, low[0], high[0]);
  Int8::load_pair(second, low[1], high[1]);
  a = ((Words)low[0] >> 16) | (Words)low[1];
  b = ((Words)high[0] >> 16) | (Words)high[1];
}

template <>
PAGEDKV_INLINE Words load_words<Float8>(const uint8_t* from) {
  const __m512i wide = _mm512_cvtepi8_epi16(load<__m256i>(from));
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
  // Exponent and mantissa in bfloat16's places, whose bias is larger by 120.
  __m512i number = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  // Multiples of 2^-9 up to 7 are subnormal there and normal here.
  const __m512i multiples = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  number = _mm512_mask_permutexvar_epi16(number, is_small, magnitude, multiples);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  number = _mm512_mask_mov_epi16(number, is_nan, _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_set1_epi16(-0x8000);
  return (Words)_mm512_ternarylogic_epi32(sign, wide, number, 0xca);  // sign ? wide : number
}
template <>
PAGEDKV_INLINE void load_two<Float8>(const uint8_t* first, const uint8_t* second, Words& a,
                                     Words& b) {
  const __m512i one = (__m512i)load_words<Float8>(first);
  const __m512i other = (__m512i)load_words<Float8>(second);
  // Number i of one and number i of the other, which is number 32 + i of both.
  const Words low = (Words)lane_numbers() * 0x10001u + 0x200000u, high = low + 0x100010u;
  a = (Words)_mm512_permutex2var_epi16(one, (__m512i)low, other);
  b = (Words)_mm512_permutex2var_epi16(one, (__m512i)high, other);
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
