// Attention in tile registers, for tests: with the registers in C++ and with the processor's own.

#pragma once

#include <cstdint>

#include "../../csrc/cpu/kernel_table.h"

namespace pagedkv::testing {

struct TileKernels {
  const char* name;
  const cpu::Kernels* kernels;
  /// c += a * b for whole tiles: a is 16 rows of 16 pairs, b 16 rows of 16 pairs, c 16 by 16.
  void (*dot)(const uint16_t* a, const uint16_t* b, float* c);
};

extern const TileKernels model_tiles;

/// Null where they are not compiled in or the processor has none.
const TileKernels* processor_tiles();

}  // namespace pagedkv::testing
