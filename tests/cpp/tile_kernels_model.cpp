// The kernels of csrc/cpu/amx on the model of the tile registers, so that any processor can test
// them.

#include "tile_kernels.h"

#define PAGEDKV_ISA tile_model
#define PAGEDKV_TILE_MODEL
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PAGEDKV_SIMD_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGEDKV_SIMD_AVX2
#elif defined(__aarch64__)
#define PAGEDKV_SIMD_NEON
#endif
#include "../../csrc/cpu/amx/attend_tiles.h"
#include "tile_dot.h"

namespace pagedkv::testing {
namespace {
constexpr cpu::Kernels kTable = {cpu::tile_model::tile_scratch_bytes,
                                 cpu::tile_model::attend_in_tiles,
                                 cpu::tile_model::fold,
                                 cpu::tile_model::finish,
                                 cpu::tile_model::quantise_rows,
                                 cpu::tile_model::merge_row,
                                 cpu::tile_model::copy_streaming,
                                 &cpu::tile_model::kDense};
}

const TileKernels model_tiles = {"model", &kTable, cpu::tile_model::dot_whole_tiles};

}  // namespace pagedkv::testing
