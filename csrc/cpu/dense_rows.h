// A decoder's products, norms, rotations and gates, for whichever instruction set the including
// file is compiled.

#pragma once

#include "formats.h"
#include "kernel_table.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

template <typename Format>
PAGEDKV_INLINE Floats load_up_to(const typename Format::Stored* from, int64_t count) {
  if (count >= kLanes) return Format::load_one(from);
  typename Format::Stored part[kLanes] = {};
  __builtin_memcpy(part, from, count * sizeof *part);
  return Format::load_one(part);
}

template <typename Format>
PAGEDKV_INLINE void store_up_to(typename Format::Stored* to, Floats value, int64_t count) {
  if (count >= kLanes) return Format::store_one(to, value);
  typename Format::Stored part[kLanes];
  Format::store_one(part, value);
  __builtin_memcpy(to, part, count * sizeof *part);
}

// How far ahead of what is read weights are fetched. The rows of a tile are read side by side,
// which the processor does not take for the one stream that they are.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kLineBytes = 64;

// Every sum runs through its numbers in the same order, whatever the tile: one register of partial
// sums from beginning to end. So a token's result does not depend on how many are there.
template <typename Weight, int kRows, int kTokens>
PAGEDKV_INLINE void multiply_tile(const ProductTile& p, int64_t row, int64_t token, int64_t tile,
                                  int64_t num_tiles) {
  // All tiles over the same rows fetch in turns, so that fetching never comes all at once.
  int64_t until_fetch = 1 + tile;
  const auto* weights = static_cast<const typename Weight::Stored*>(p.weights) + row * p.num_in;
  const float* x = p.x + token * p.x_stride;
  Floats sums[kRows][kTokens] = {};
  const auto add = [&](int64_t k, int64_t count) {
    if (--until_fetch == 0) {
      until_fetch = num_tiles;
      constexpr int64_t kBytes = kRows * kLanes * sizeof *weights;
      const char* ahead = reinterpret_cast<const char*>(weights + kRows * k) + kPrefetchBytes;
      PAGEDKV_UNROLL for (int64_t line = 0; line < kBytes; line += kLineBytes) {
        __builtin_prefetch(ahead + line);
      }
    }
    Floats loaded[kRows];
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      loaded[r] = load_up_to<Weight>(weights + r * p.num_in + k, count);
    }
    PAGEDKV_UNROLL for (int t = 0; t < kTokens; ++t) {
      const Floats value = load(x + t * p.x_stride + k);
      PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][t] = fma(loaded[r], value, sums[r][t]);
      }
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= p.num_in; k += kLanes) add(k, kLanes);
  if (k < p.num_in) add(k, p.num_in - k);  // x is padded with zeros
  PAGEDKV_UNROLL for (int t = 0; t < kTokens; ++t) {
    const Floats4 totals =
        sums_of(sums[0][t], sums[1 % kRows][t], sums[2 % kRows][t], sums[3 % kRows][t]);
    PAGEDKV_UNROLL for (int r = 0; r < kRows; ++r) {
      float total = totals[r];
      if (p.scales) total *= p.scales[row + r];
      if (p.bias) total += p.bias[row + r];
      const int64_t at = (token + t) * p.out_stride + row + r;
      if (p.out_is_bfloat16) {
        const uint32_t word = BFloat16::round(all(total))[0];
        static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(word >> 16);
      } else {
        static_cast<float*>(p.out)[at] = total;
      }
    }
  }
}

constexpr int kMaxTileTokens = kHas32Registers ? 6 : 4;

template <typename Weight, int kRows, int kTokens>
inline void multiply_so_many(const ProductTile& p, int64_t row, int64_t token, int64_t count,
                             int64_t tile, int64_t num_tiles) {
  if constexpr (kTokens > 0) {
    if (count == kTokens)
      return multiply_tile<Weight, kRows, kTokens>(p, row, token, tile, num_tiles);
    multiply_so_many<Weight, kRows, kTokens - 1>(p, row, token, count, tile, num_tiles);
  }
}

/// All tokens by some rows of weights, in tiles of about the same size.
template <typename Weight, int kRows>
inline void multiply_tokens(const ProductTile& p, int64_t row) {
  const int64_t num_tiles = (p.num_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
  for (int64_t tile = 0, token = 0; tile < num_tiles; ++tile) {
    const int64_t left = num_tiles - tile, count = (p.num_tokens - token + left - 1) / left;
    multiply_so_many<Weight, kRows, kMaxTileTokens>(p, row, token, count, tile, num_tiles);
    token += count;
  }
}

template <typename Weight>
inline void multiply_rows(const ProductTile& p) {
  int64_t row = p.row_begin;
  for (; row + 4 <= p.row_end; row += 4) multiply_tokens<Weight, 4>(p, row);
  for (; row < p.row_end; ++row) multiply_tokens<Weight, 1>(p, row);
}

inline void multiply(const ProductTile& p) {
  switch (p.weight_dtype) {
    case DType::BFloat16:
      return multiply_rows<BFloat16>(p);
    case DType::Int8:
      return multiply_rows<Int8>(p);
    default:
      return multiply_rows<Float32>(p);
  }
}

inline void widen(const void* from, float* to, int64_t count) {
  for (int64_t k = 0; k < count; k += kLanes) {
    const auto* stored = static_cast<const uint16_t*>(from) + k;
    store_up_to<Float32>(to + k, load_up_to<BFloat16>(stored, count - k), count - k);
  }
}

template <typename Format>
inline void normalise_row(const NormParams& p, int64_t row) {
  const auto* x = static_cast<const typename Format::Stored*>(p.x) + row * p.x_stride;
  auto* out = static_cast<typename Format::Stored*>(p.out) + row * p.num_columns;
  const int64_t count = p.num_columns;
  Floats squares[2] = {};
  for (int64_t k = 0, i = 0; k < count; k += kLanes, i ^= 1) {
    const Floats value = load_up_to<Format>(x + k, count - k);
    squares[i] = fma(value, value, squares[i]);
  }
  const float mean = sum_of(squares[0] + squares[1]) / static_cast<float>(count);
  const Floats factor = all(1.0f / __builtin_sqrtf(mean + p.eps));
  for (int64_t k = 0; k < count; k += kLanes) {
    const Floats value = load_up_to<Format>(x + k, count - k) * factor;
    store_up_to<Format>(out + k, value * load_up_to<Float32>(p.weight + k, count - k), count - k);
  }
}

inline void normalise(const NormParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (p.dtype == DType::BFloat16) {
      normalise_row<BFloat16>(p, row);
    } else {
      normalise_row<Float32>(p, row);
    }
  }
}

template <typename Format>
inline void rotate_token(const RotateParams& p, int64_t token) {
  const int64_t half = p.head_dim / 2;
  const float *cos = p.cos + token * half, *sin = p.sin + token * half;
  for (int64_t head = 0; head < p.num_heads; ++head) {
    auto* first =
        static_cast<typename Format::Stored*>(p.x) + token * p.token_stride + head * p.head_stride;
    auto* second = first + half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t left = half - i;
      const Floats a = load_up_to<Format>(first + i, left);
      const Floats b = load_up_to<Format>(second + i, left);
      const Floats c = load_up_to<Float32>(cos + i, left);
      const Floats s = load_up_to<Float32>(sin + i, left);
      store_up_to<Format>(first + i, a * c - b * s, left);
      store_up_to<Format>(second + i, b * c + a * s, left);
    }
  }
}

inline void rotate(const RotateParams& p, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    if (p.dtype == DType::BFloat16) {
      rotate_token<BFloat16>(p, token);
    } else {
      rotate_token<Float32>(p, token);
    }
  }
}

// x / (1 + exp(-x)), by the exponential of -|x|, which never overflows; NaN stays NaN.
PAGEDKV_INLINE Floats silu(Floats x) {
  const Floats decayed = exp2_of_negative(abs(x) * all(-kLog2E));
  const Floats numerator = choose(x < 0.0f, decayed, all(1.0f));
  return x * (numerator / (all(1.0f) + decayed));
}

template <typename Format>
inline void gate_row(const GateParams& p, int64_t row) {
  const auto* x = static_cast<const typename Format::Stored*>(p.x) + row * p.x_stride;
  auto* out = static_cast<typename Format::Stored*>(p.out) + row * p.num_columns;
  for (int64_t k = 0; k < p.num_columns; k += kLanes) {
    const int64_t left = p.num_columns - k;
    const Floats up = load_up_to<Format>(x + p.num_columns + k, left);
    store_up_to<Format>(out + k, silu(load_up_to<Format>(x + k, left)) * up, left);
  }
}

inline void gate(const GateParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (p.dtype == DType::BFloat16) {
      gate_row<BFloat16>(p, row);
    } else {
      gate_row<Float32>(p, row);
    }
  }
}

constexpr DenseKernels kDense = {multiply, widen, normalise, rotate, gate, nullptr};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
