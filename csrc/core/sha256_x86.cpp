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

// Unrolls over the lanes, of which there are one or two. A single chain waits for the latency of
// sha256rnds2 half of the time; a second one, independent of it, runs in the gaps.
#define PAGEDKV_EACH_LANE _Pragma("GCC unroll 2") for (int lane = 0; lane < kLanes; ++lane)
#define PAGEDKV_SHA_INLINE __attribute__((target("sha,sse4.1"), always_inline)) inline

// The state as the instructions want it, high to low.
template <int kLanes>
struct State {
  __m128i abef[kLanes], cdgh[kLanes];
};

PAGEDKV_SHA_INLINE __m128i load(const void* in) {
  return _mm_loadu_si128(static_cast<const __m128i*>(in));
}

PAGEDKV_SHA_INLINE void store(void* out, __m128i value) {
  _mm_storeu_si128(static_cast<__m128i*>(out), value);
}

// Four words, the first in the lowest lane, from or to big-endian bytes.
PAGEDKV_SHA_INLINE __m128i swap_bytes(__m128i words) {
  return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

PAGEDKV_SHA_INLINE void pack(__m128i dcba, __m128i hgfe, __m128i& abef, __m128i& cdgh) {
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  abef = _mm_alignr_epi8(cdab, efgh, 8);
  cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
}

PAGEDKV_SHA_INLINE void unpack(__m128i abef, __m128i cdgh, __m128i& dcba, __m128i& hgfe) {
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  dcba = _mm_blend_epi16(feba, dchg, 0xf0);
  hgfe = _mm_alignr_epi8(dchg, feba, 8);
}

// Folds 16 words, four to a register, into the state. `w` is overwritten.
//
// In the first half of a chained message each word waits for the newest before it, longer than the
// rounds do. So the one addend that is as new is added behind sha256msg2, which needs it in no lane
// but the last and makes nothing of that lane.
template <int kLanes>
PAGEDKV_SHA_INLINE void fold(State<kLanes>& state, __m128i (&w)[kLanes][4]) {
  const State<kLanes> before = state;
  const __m128i* rounds = reinterpret_cast<const __m128i*>(kSha256Rounds.data());
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // four rounds each
    PAGEDKV_EACH_LANE {
      __m128i& next = w[lane][i % 4];  // holds words 4i-16 .. 4i-13 until it is renewed
      if (i >= 4) {
        const __m128i newest = w[lane][(i + 3) % 4];
        const __m128i seven_back = _mm_srli_si128(w[lane][(i + 2) % 4], 4);
        next = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[lane][(i + 1) % 4]), seven_back);
        next = _mm_add_epi32(_mm_sha256msg2_epu32(next, newest), _mm_slli_si128(newest, 12));
      }
      const __m128i wk = _mm_add_epi32(next, load(rounds + i));
      __m128i &abef = state.abef[lane], &cdgh = state.cdgh[lane];
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
  }
  PAGEDKV_EACH_LANE {
    state.abef[lane] = _mm_add_epi32(state.abef[lane], before.abef[lane]);
    state.cdgh[lane] = _mm_add_epi32(state.cdgh[lane], before.cdgh[lane]);
  }
}

__attribute__((target("sha,sse4.1"))) void compress_blocks(uint32_t* words, const uint8_t* blocks,
                                                           size_t num_blocks) {
  State<1> state;
  pack(load(words), load(words + 4), state.abef[0], state.cdgh[0]);
  for (; num_blocks != 0; --num_blocks, blocks += 64) {
    __m128i w[1][4];
    for (int i = 0; i < 4; ++i) w[0][i] = swap_bytes(load(blocks + 16 * i));
    fold(state, w);
  }
  __m128i dcba, hgfe;
  unpack(state.abef[0], state.cdgh[0], dcba, hgfe);
  store(words, dcba);
  store(words + 4, hgfe);
}

// The digests stay in registers from one message to the next: through memory they would wait 40 ns
// a message for stores that the next load overlaps only in part.
template <int kLanes>
__attribute__((target("sha,sse4.1"))) void chain_lanes(const Sha256Stretch* stretches,
                                                       size_t num_messages) {
  State<kLanes> start;
  __m128i dcba[kLanes], hgfe[kLanes];  // the words of the last digest
  PAGEDKV_EACH_LANE {
    pack(load(kSha256Start.data()), load(kSha256Start.data() + 4), start.abef[lane],
         start.cdgh[lane]);
    dcba[lane] = swap_bytes(load(stretches[lane].parent->data()));
    hgfe[lane] = swap_bytes(load(stretches[lane].parent->data() + 16));
  }
  [[maybe_unused]] const Sha256Tail* tail = stretches[0].tails.data();
  [[maybe_unused]] const Sha256Tail* end_of_tails = tail + stretches[0].tails.size();
  for (size_t i = 0; i < num_messages; ++i) {
    State<kLanes> state = start;
    __m128i w[kLanes][4];
    size_t place[kLanes];
    PAGEDKV_EACH_LANE {
      const Sha256Stretch& stretch = stretches[lane];
      place[lane] = stretch.places == nullptr ? i : stretch.places[i];
      const uint32_t* words = stretch.words + 16 * place[lane];
      w[lane][0] = dcba[lane];
      w[lane][1] = hgfe[lane];
      w[lane][2] = swap_bytes(load(words));
      w[lane][3] = swap_bytes(load(words + 4));
    }
    fold(state, w);
    PAGEDKV_EACH_LANE {
      const uint32_t* words = stretches[lane].words + 16 * place[lane];
      w[lane][0] = swap_bytes(load(words + 8));
      w[lane][1] = swap_bytes(load(words + 12));
      w[lane][2] = _mm_set_epi32(0, 0, 0, INT32_MIN);      // the padding: one bit, zeros,
      w[lane][3] = _mm_set_epi32(8 * (32 + 64), 0, 0, 0);  // and the length in bits
    }
    if constexpr (kLanes == 1) {
      if (tail != end_of_tails && tail->message == i) {
        w[0][2] = swap_bytes(load(tail->bytes));
        w[0][3] = swap_bytes(load(tail->bytes + 16));
        for (size_t block = 0; block < tail->num_blocks; ++block) {
          fold(state, w);
          for (int j = 0; j < 4; ++j)
            w[0][j] = swap_bytes(load(tail->bytes + 32 + 64 * block + 16 * j));
        }
        ++tail;
      }
    }
    fold(state, w);
    PAGEDKV_EACH_LANE {
      unpack(state.abef[lane], state.cdgh[lane], dcba[lane], hgfe[lane]);
      uint8_t* digest = stretches[lane].digests[place[lane]].data();
      store(digest, swap_bytes(dcba[lane]));
      store(digest + 16, swap_bytes(hgfe[lane]));
    }
  }
}

#undef PAGEDKV_EACH_LANE
#undef PAGEDKV_SHA_INLINE

void compress_clean(uint32_t* state, const uint8_t* blocks, size_t num_blocks) {
  if (cpu().avx) zero_upper_halves();
  compress_blocks(state, blocks, num_blocks);
}

template <int kLanes>
void chain_clean(const Sha256Stretch* stretches, size_t num_messages) {
  if (cpu().avx) zero_upper_halves();
  chain_lanes<kLanes>(stretches, num_messages);
}

}  // namespace

const Sha256Compress compress = compress_clean;
const Sha256Chain chain_one = chain_clean<1>;
const Sha256Chain chain_two = chain_clean<2>;

const char* unavailable() {
  return cpu().sha && cpu().sse41 ? "" : "this processor has no SHA extensions";
}

}  // namespace pagedkv::sha256_x86

#else

namespace pagedkv::sha256_x86 {
const Sha256Compress compress = nullptr;
const Sha256Chain chain_one = nullptr;
const Sha256Chain chain_two = nullptr;
const char* unavailable() { return "this build is not for x86-64"; }
}  // namespace pagedkv::sha256_x86

#endif
