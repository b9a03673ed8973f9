// The kernels for 64-bit ARM.

#include "kernel_table.h"

#if defined(__aarch64__)
#define PAGEDKV_ISA neon
#define PAGEDKV_SIMD_NEON
#include "rows.h"

namespace pagedkv::cpu::neon {
const Kernels* const kernels = &kTable;
}
#else
namespace pagedkv::cpu::neon {
const Kernels* const kernels = nullptr;
}
#endif
