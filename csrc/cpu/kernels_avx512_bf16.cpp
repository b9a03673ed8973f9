// The kernels for AVX-512 with BF16: attention and products of bfloat16 in pairs, all else as for
// AVX-512. Compiled as kernels_avx512.cpp is, and with -mavx512bf16.

#include "kernel_table.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGEDKV_ISA avx512_bf16
#define PAGEDKV_SIMD_AVX512
#include "attend_pairs.h"
#include "dense_pairs.h"
#include "rows.h"

namespace pagedkv::cpu::avx512_bf16 {
namespace {
constexpr Kernels kPairedTable = {scratch_bytes, attend_in_pairs, fold,           finish,
                                  quantise_rows, merge_row,       copy_streaming, &kDenseInPairs};
}
const Kernels* const kernels = &kPairedTable;
}  // namespace pagedkv::cpu::avx512_bf16
#else
namespace pagedkv::cpu::avx512_bf16 {
const Kernels* const kernels = nullptr;
}
#endif
