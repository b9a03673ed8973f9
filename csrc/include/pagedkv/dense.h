// What a decoder computes between two calls of attention, for few tokens or many: products with
// weights, norms, rotations and gates. Numbers are float32 or bfloat16; sums are float32.

#pragma once

#include <cstdint>

#include "pagedkv/kernels.h"

namespace pagedkv {

/// out[t, n] = (sum over k of x[t, k] * weights[n, k]) * scales[n] + bias[n]
struct ProductParams {
  const void* x;  // [num_tokens, num_in]
  int64_t x_stride;
  DType x_dtype;
  int64_t num_tokens, num_in, num_out;
  const void* weights;  // [num_out, num_in], contiguous
  DType weight_dtype;   // float32, bfloat16 or int8
  const float* scales;  // [num_out]; optional
  const float* bias;    // [num_out]; optional
  void* out;            // [num_tokens, num_out], contiguous
  DType out_dtype;
};

/// Outputs whose weights lie together in the layout of pack_pairs().
constexpr int64_t kPanelOutputs = 32;

/// The same for numbers of bfloat16, with weights as pack_pairs() lays them out:
/// [num_out / kPanelOutputs, rounded up][num_in / 2][kPanelOutputs][2]. `num_in` is even.
struct PairProductParams {
  const void* x;  // [num_tokens, num_in]
  int64_t x_stride;
  int64_t num_tokens, num_in, num_out;
  const void* packed;
  const float* bias;  // [num_out]; optional
  void* out;          // [num_tokens, num_out], contiguous
};

/// out[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight
struct NormParams {
  const void* x;  // [num_rows, num_columns]
  int64_t x_stride;
  DType dtype;  // of x and out
  int64_t num_rows, num_columns;
  const float* weight;  // [num_columns]
  float eps;
  void* out;  // [num_rows, num_columns], contiguous
};

/// Turns the pairs (x[t, h, i], x[t, h, i + head_dim / 2]) by the angles of the token, in place.
struct RotateParams {
  void* x;  // [num_tokens, num_heads, head_dim]
  int64_t token_stride, head_stride;
  DType dtype;
  int64_t num_tokens, num_heads, head_dim;
  const float *cos, *sin;  // [num_tokens, head_dim / 2], contiguous
};

/// out[t, i] = silu(x[t, i]) * x[t, num_columns + i]
struct GateParams {
  const void* x;  // [num_rows, 2 * num_columns]
  int64_t x_stride;
  DType dtype;
  int64_t num_rows, num_columns;
  void* out;  // [num_rows, num_columns], contiguous
};

}  // namespace pagedkv
