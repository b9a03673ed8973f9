// The kernels of csrc/cpu/amx on the processor's tile registers.

#include "tile_kernels.h"

#if __has_include(<amxtileintrin.h>) && defined(__AVX512F__)
#include "../../csrc/cpu/amx_permission.h"

#define PAGEDKV_ISA tile_processor
#define PAGEDKV_SIMD_AVX512
#include "../../csrc/cpu/amx/tiles.h"
#include "tile_dot.h"

namespace pagedkv::testing {

const TileKernels* processor_tiles() {
  if (*cpu::amx_unavailable() != '\0' || !cpu::request_amx()) return nullptr;
  static const TileKernels tiles = {"processor", cpu::amx::kernels,
                                    cpu::tile_processor::dot_whole_tiles};
  return &tiles;
}

}  // namespace pagedkv::testing
#else
namespace pagedkv::testing {
const TileKernels* processor_tiles() { return nullptr; }
}  // namespace pagedkv::testing
#endif
