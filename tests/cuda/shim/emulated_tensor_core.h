// What the instructions in tensor_core.cuh do, told from their description in the PTX manual.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "emulated_numbers.h"
#include "threads.h"

namespace emulated {

/// Either now or at the last moment: both are allowed, so nothing may depend on it.
void copy_async_16(void* shared, const void* global);
void wait_for_copies();

void load_matrices(uint32_t (&out)[4], const void* row);
void load_matrices_transposed(uint32_t (&out)[4], const void* row);

/// One warp's product: a [16, 16] and b [16, 8] as numbers, c [16, 8] in place.
struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
void multiply_bfloat16(void* const* lanes);
void multiply_float16(void* const* lanes);

}  // namespace emulated

namespace pagedkv::cuda {
struct BFloat16;
struct Float16;
}  // namespace pagedkv::cuda

namespace emulated {

template <class Number>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr bool is_bfloat16 = std::is_same_v<Number, pagedkv::cuda::BFloat16>;
  Product product{c, a, {b0, b1}};
  meet_warp("mma", &product, is_bfloat16 ? multiply_bfloat16 : multiply_float16);
}

}  // namespace emulated
