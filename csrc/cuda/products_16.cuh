// The products in bfloat16 and float16, on tensor cores.
#pragma once

#include "products.cuh"
#include "tensor_core.cuh"

namespace pagedkv::cuda {

/// Tensor cores; p is rounded to the numbers' type as v is.
template <class Number>
struct TensorCoreProducts {
  using Element = uint16_t;

  __device__ static void narrow4(Element* out, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(out) =
        make_uint2(Number::narrow2(x[0], x[1]), Number::narrow2(x[2], x[3]));
  }
  __device__ static Element narrow(float x) {
    return static_cast<Element>(Number::narrow2(x, 0.0f));
  }
  __device__ static float widen(Element bits) { return Number::widen(bits); }

  template <int kDim, int kKeys>
  __device__ static void scores(float (&s)[kKeys / 8][4], const Element* q, const Element* k,
                                int lane) {
    constexpr int kPitch = row_pitch<Element>(kDim);
    const Element* q_row = q + lane % 16 * kPitch + lane / 16 * 8;
    const Element* k_row = k + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, q_row + d);
#pragma unroll
      for (int key = 0; key < kKeys; key += 16) {
        load_matrices(b, k_row + key * kPitch + d);
        multiply_add<Number>(s[key / 8], a, b[0], b[1]);
        multiply_add<Number>(s[key / 8 + 1], a, b[2], b[3]);
      }
    }
  }

  template <int kDim, int kKeys>
  __device__ static void values(float (&o)[kDim / 8][4], const float (&p)[kKeys / 8][4],
                                const Element* v, int lane) {
    constexpr int kPitch = row_pitch<Element>(kDim);
    const Element* v_row = v + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      const auto &left = p[key / 8], &right = p[key / 8 + 1];
      const uint32_t a[4] = {Number::narrow2(left[0], left[1]), Number::narrow2(left[2], left[3]),
                             Number::narrow2(right[0], right[1]),
                             Number::narrow2(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        uint32_t b[4];
        load_matrices_transposed(b, v_row + key * kPitch + d);
        multiply_add<Number>(o[d / 8], a, b[0], b[1]);
        multiply_add<Number>(o[d / 8 + 1], a, b[2], b[3]);
      }
    }
  }
};

}  // namespace pagedkv::cuda
