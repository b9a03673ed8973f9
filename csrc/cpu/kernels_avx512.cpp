// The kernels for AVX-512 (F, BW, VL, DQ); compiled with -mavx512f and the like.

#include "kernel_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGEDKV_ISA avx512
#define PAGEDKV_SIMD_AVX512
#include "rows.h"

namespace pagedkv::cpu::avx512 {
const Kernels* const kernels = &kTable;
}
#else
namespace pagedkv::cpu::avx512 {
const Kernels* const kernels = nullptr;
}
#endif
