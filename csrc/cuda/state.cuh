// The state of a softmax that is computed in parts: the largest logit, the sum of the exponentials
// relative to it, and the sum of values weighted with them. Logits are in units of log 2.
//
// Every operation is written out and contraction of a * b + c is switched off in the build, so the
// kernels that share these functions share their bits.
#pragma once

#include "device.cuh"

namespace pagedkv::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ inline float exp2_approximately(float x) {
#ifdef PAGEDKV_CPU_EMU
  return exp2f(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

struct SoftmaxState {
  float top;  // -inf: no key was seen
  float sum;
};

struct FoldWeights {
  float before, next;
};

/// Folds `next` into `state`; returns with what the values of both are weighted.
__device__ inline FoldWeights fold(SoftmaxState& state, SoftmaxState next) {
  // A part without keys, and the first part with some, leave the other's bits alone.
  if (next.top == minus_infinity()) return {1.0f, 0.0f};
  if (state.top == minus_infinity()) {
    state = next;
    return {0.0f, 1.0f};
  }
  const float top = fmaxf(state.top, next.top);
  const FoldWeights weights = {exp2_approximately(state.top - top),
                               exp2_approximately(next.top - top)};
  state = {top, fmaf(state.sum, weights.before, next.sum * weights.next)};
  return weights;
}

__device__ inline float fold_value(float before, float next, FoldWeights weights) {
  // A weight of 0 must not meet what may be memory that nothing was written to.
  if (weights.next == 0.0f) return before * weights.before;
  if (weights.before == 0.0f) return next * weights.next;
  return fmaf(before, weights.before, next * weights.next);
}

struct Finished {
  float factor;  // of the values
  float lse;     // natural
};

/// Closes a row. `sink`, if there is one, is a further logit that has no value.
__device__ inline Finished finish(SoftmaxState state, const float* sink) {
  if (state.top == minus_infinity()) return {0.0f, sink ? *sink : minus_infinity()};
  float weight = 1.0f;
  if (sink != nullptr) {
    const float logit = *sink * kLog2e;
    const float top = fmaxf(state.top, logit);
    weight = exp2_approximately(state.top - top);
    state = {top, fmaf(state.sum, weight, exp2_approximately(logit - top))};
  }
  return {weight / state.sum, fmaf(state.top, kLn2, logf(state.sum))};
}

__device__ inline float finish_value(float sum, Finished finished) {
  // A row that saw nothing has no sum.
  return finished.factor == 0.0f ? 0.0f : sum * finished.factor;
}

}  // namespace pagedkv::cuda
