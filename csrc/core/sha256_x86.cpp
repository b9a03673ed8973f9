// SHA-256 with the SHA extensions of x86-64.
//
// Compiled for every x86-64 build through function attributes and entered only when cpuid allows.
// The instructions have a legacy SSE encoding only. Mixing them with AVX code whose upper register
// halves are in use costs up to 150 times the work itself, hence two precautions: the halves are
// zeroed on entry, and this file uses no AVX whatever -march says.

#if defined(__x86_64__) && defined(__AVX__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("no-avx")
#endif

#include "sha256_paths.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>

namespace pagedkv::sha256_x86 {
namespace {

struct Cpu {
  bool sse41 = false;  // with SSSE3
  bool sha = false;
  bool avx = false;  // and the operating system saves its registers
};

Cpu read_cpuid() {
  Cpu cpu;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
    cpu.sse41 = (ecx & bit_SSE4_1) && (ecx & bit_SSSE3);
    if ((ecx & bit_OSXSAVE) && (ecx & bit_AVX)) {
      unsigned enabled, high;
      asm("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
      cpu.avx = (enabled & 6) == 6;  // the XMM and YMM halves
    }
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) cpu.sha = ebx & bit_SHA;
  return cpu;
}

const Cpu& cpu() {
  static const Cpu found = read_cpuid();
  return found;
}

__attribute__((target("avx"))) void zero_upper_halves() { _mm256_zeroupper(); }

__attribute__((target("sha,sse4.1"))) void compress_blocks(uint32_t* state, const uint8_t* blocks,
                                                           size_t num_blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);

  // The instructions want the words as (a b e f) and (c d g h), high to low.
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

  for (; num_blocks != 0; --num_blocks, blocks += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the 16 newest words of the schedule, four to a register
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each
      __m128i& next = w[i % 4];     // holds words 4i-16 .. 4i-13 until it is renewed
      if (i < 4) {
        next = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks) + i),
                                big_endian);
      } else {
        const __m128i newest = w[(i + 3) % 4];
        const __m128i seven_back = _mm_alignr_epi8(newest, w[(i + 2) % 4], 4);
        next = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) % 4]), seven_back);
        next = _mm_sha256msg2_epu32(next, newest);
      }
      const __m128i* rounds = reinterpret_cast<const __m128i*>(kSha256Rounds.data());
      const __m128i wk = _mm_add_epi32(next, _mm_loadu_si128(rounds + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

void compress_clean(uint32_t* state, const uint8_t* blocks, size_t num_blocks) {
  if (cpu().avx) zero_upper_halves();
  compress_blocks(state, blocks, num_blocks);
}

}  // namespace

const Sha256Compress compress = compress_clean;

const char* unavailable() {
  return cpu().sha && cpu().sse41 ? "" : "this processor has no SHA extensions";
}

}  // namespace pagedkv::sha256_x86

#else

namespace pagedkv::sha256_x86 {
const Sha256Compress compress = nullptr;
const char* unavailable() { return "this build is not for x86-64"; }
}  // namespace pagedkv::sha256_x86

#endif
