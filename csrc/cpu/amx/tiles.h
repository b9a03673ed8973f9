// The tile registers: eight of up to 16 rows of 64 bytes, and the sums of products of bfloat16
// pairs.
//
// `dot` is tdpbf16ps. For C of m rows and n columns, A of m rows of k pairs and B of k rows of n
// pairs it adds to each C[m][n] the sum of two chains, one over the first and one over the second
// number of every pair: each begins at 0 and takes one fused multiply-add after the other, in the
// order of k. All operations round to the nearest even, take subnormal numbers as zero and flush
// subnormal results to zero, whatever MXCSR says.
//
// With PAGEDKV_TILE_MODEL this is computed in plain C++ (tile_model.h), so that what is built on it
// can be tested on any processor; without, by the instructions. They are written out, since GCC
// 12's intrinsics do not tell the compiler what memory they read.

#pragma once

#include "../simd.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {
namespace tiles {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;

/// The shapes of the registers, as `ldtilecfg` reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int number, int num_rows, int num_bytes) {
    rows[number] = static_cast<uint8_t>(num_rows);
    row_bytes[number] = static_cast<uint16_t>(num_bytes);
  }
};
static_assert(sizeof(Shapes) == 64);

}  // namespace tiles
}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA

#if defined(PAGEDKV_TILE_MODEL)
#include "tile_model.h"
#else

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {
namespace tiles {

/// Sets the shapes; every register is zero then.
PAGEDKV_INLINE void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

/// Gives the registers up, so that a change of threads has nothing to save.
PAGEDKV_INLINE void release() { asm volatile("tilerelease"); }

template <int kTile>
PAGEDKV_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
PAGEDKV_INLINE void load(const void* from, int64_t row_stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride_bytes), "i"(kTile)
               : "memory");
}

template <int kTile>
PAGEDKV_INLINE void store(void* to, int64_t row_stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride_bytes), "i"(kTile)
               : "memory");
}

template <int kC, int kA, int kB>
PAGEDKV_INLINE void dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace tiles
}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA

#endif
