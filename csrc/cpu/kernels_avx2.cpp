// The kernels for AVX2 with FMA and F16C; compiled with -mavx2 -mfma -mf16c.

#include "kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGEDKV_ISA avx2
#define PAGEDKV_SIMD_AVX2
#include "rows.h"

namespace pagedkv::cpu::avx2 {
const Kernels* const kernels = &kTable;
}
#else
namespace pagedkv::cpu::avx2 {
const Kernels* const kernels = nullptr;
}
#endif
