// The products in float32, which tensor cores would round.
#pragma once

#include "products.cuh"

namespace pagedkv::cuda {

/// float32 by fused multiply-adds, over head_dim and over keys in ascending order.
struct Float32Products {
  using Element = float;

  __device__ static void narrow4(Element* out, const float (&x)[4]) {
    *reinterpret_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
  }
  __device__ static Element narrow(float x) { return x; }
  __device__ static float widen(Element x) { return x; }

  __device__ static float dot4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  template <int kDim, int kKeys>
  __device__ static void scores(float (&s)[kKeys / 8][4], const Element* q, const Element* k,
                                int lane) {
    constexpr int kPitch = row_pitch<Element>(kDim);
    const Element* q_row = q + lane / 4 * kPitch;
    const Element* k_row = k + lane % 4 * 2 * kPitch;
#pragma unroll 2
    for (int d = 0; d < kDim; d += 4) {
      const float4 upper = *reinterpret_cast<const float4*>(q_row + d);
      const float4 lower = *reinterpret_cast<const float4*>(q_row + 8 * kPitch + d);
#pragma unroll
      for (int key = 0; key < kKeys; key += 8) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const float4 b = *reinterpret_cast<const float4*>(k_row + (key + next) * kPitch + d);
          s[key / 8][next] = dot4(upper, b, s[key / 8][next]);
          s[key / 8][2 + next] = dot4(lower, b, s[key / 8][2 + next]);
        }
      }
    }
  }

  template <int kDim, int kKeys>
  __device__ static void values(float (&o)[kDim / 8][4], const float (&p)[kKeys / 8][4],
                                const Element* v, int lane) {
    constexpr int kPitch = row_pitch<Element>(kDim);
    const Element* v_row = v + lane % 4 * 2;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const int owner = lane / 4 * 4 + key % 8 / 2;  // of the key's column, in our rows
      const float upper = __shfl_sync(kWholeWarp, p[key / 8][key % 2], owner);
      const float lower = __shfl_sync(kWholeWarp, p[key / 8][2 + key % 2], owner);
#pragma unroll
      for (int d = 0; d < kDim; d += 8) {
        const float2 b = *reinterpret_cast<const float2*>(v_row + key * kPitch + d);
        o[d / 8][0] = fmaf(upper, b.x, o[d / 8][0]);
        o[d / 8][1] = fmaf(upper, b.y, o[d / 8][1]);
        o[d / 8][2] = fmaf(lower, b.x, o[d / 8][2]);
        o[d / 8][3] = fmaf(lower, b.y, o[d / 8][3]);
      }
    }
  }
};

}  // namespace pagedkv::cuda
