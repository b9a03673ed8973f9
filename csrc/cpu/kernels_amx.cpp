// The kernels for AMX: attention over bfloat16 pages in tile registers, all else as for AVX-512.
// Compiled as kernels_avx512.cpp is, by compilers that know AMX and so bring an assembler that
// does.

#include "kernel_table.h"

#if __has_include(<amxtileintrin.h>) && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGEDKV_ISA amx
#define PAGEDKV_SIMD_AVX512
#include "amx/attend_tiles.h"

namespace pagedkv::cpu::amx {
namespace {
constexpr Kernels kTiledTable = {tile_scratch_bytes, attend_in_tiles, fold,           finish,
                                 quantise_rows,      merge_row,       copy_streaming, &kDense};
}
const Kernels* const kernels = &kTiledTable;
}  // namespace pagedkv::cpu::amx
#else
namespace pagedkv::cpu::amx {
const Kernels* const kernels = nullptr;
}
#endif
