// SHA-256 with the cryptography extension of ARMv8.
//
// Compiled for every 64-bit ARM build through function attributes and entered only when the
// operating system reports the instructions.

#include "sha256_paths.h"

#if defined(__aarch64__) && defined(__GNUC__)

#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(__ARM_FEATURE_SHA2)
#define PAGEDKV_TARGET_SHA2  // the whole build has them
#elif defined(__clang__)
#define PAGEDKV_TARGET_SHA2 __attribute__((target("sha2")))
#else
#define PAGEDKV_TARGET_SHA2 __attribute__((target("+crypto")))
#endif

namespace pagedkv::sha256_arm {
namespace {

PAGEDKV_TARGET_SHA2 void compress_blocks(uint32_t* state, const uint8_t* blocks,
                                         size_t num_blocks) {
  uint32x4_t abcd = vld1q_u32(state);
  uint32x4_t efgh = vld1q_u32(state + 4);

  for (; num_blocks != 0; --num_blocks, blocks += 64) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];  // the 16 newest words of the schedule, four to a register
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // four rounds each
      uint32x4_t& next = w[i % 4];  // holds words 4i-16 .. 4i-13 until it is renewed
      if (i < 4) {
        next = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
      } else {
        next =
            vsha256su1q_u32(vsha256su0q_u32(next, w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      }
      const uint32x4_t wk = vaddq_u32(next, vld1q_u32(kSha256Rounds.data() + 4 * i));
      const uint32x4_t abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, wk);
      efgh = vsha256h2q_u32(efgh, abcd_now, wk);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }

  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

bool has_sha2() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_SHA2;
#elif defined(__APPLE__)
  return true;  // every 64-bit ARM processor of theirs
#else
  return false;
#endif
}

}  // namespace

const Sha256Compress compress = compress_blocks;

const char* unavailable() {
  return has_sha2() ? "" : "this processor has no SHA-256 instructions, or its system does not say";
}

}  // namespace pagedkv::sha256_arm

#else

namespace pagedkv::sha256_arm {
const Sha256Compress compress = nullptr;
const char* unavailable() { return "this build is not for 64-bit ARM"; }
}  // namespace pagedkv::sha256_arm

#endif
