// The tile instructions in plain C++; see tiles.h. What a processor would refuse ends the process.

#pragma once

#include "tiles.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {
namespace tiles {

struct Registers8 {
  Shapes shapes;
  bool are_configured = false;
  alignas(64) uint8_t rows[8][kRows][kRowBytes] = {};
};
thread_local Registers8 model;

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

inline void configure(const Shapes& shapes) {
  require(shapes.palette == 1 && shapes.start_row == 0);
  for (int i = 0; i < 8; ++i) {
    require(shapes.rows[i] <= kRows && shapes.row_bytes[i] <= kRowBytes);
    require((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0) && shapes.row_bytes[i] % 4 == 0);
  }
  model = {};
  model.shapes = shapes;
  model.are_configured = true;
}

inline void release() { model = {}; }

inline void require_shape(int tile) {
  require(model.are_configured && model.shapes.rows[tile] != 0);
}

template <int kTile>
inline void zero() {
  require_shape(kTile);
  __builtin_memset(model.rows[kTile], 0, sizeof model.rows[kTile]);
}

template <int kTile>
inline void load(const void* from, int64_t row_stride_bytes) {
  zero<kTile>();
  for (int row = 0; row < model.shapes.rows[kTile]; ++row) {
    __builtin_memcpy(model.rows[kTile][row],
                     static_cast<const char*>(from) + row * row_stride_bytes,
                     model.shapes.row_bytes[kTile]);
  }
}

template <int kTile>
inline void store(void* to, int64_t row_stride_bytes) {
  require_shape(kTile);
  for (int row = 0; row < model.shapes.rows[kTile]; ++row) {
    __builtin_memcpy(static_cast<char*>(to) + row * row_stride_bytes, model.rows[kTile][row],
                     model.shapes.row_bytes[kTile]);
  }
}

// A sum that was exact or rounded in double, rounded to float32. Rounding twice changes nothing
// here: a product of two bfloat16 numbers has 16 significant bits and a float32 24, so where their
// sum does not fit a double, the smaller is too small to matter to a float32 either.
inline float rounded(double sum) {
  // What rounds, with an unbounded exponent, to less than the smallest normal number is flushed.
  if (sum > -0x1.ffffffp-127 && sum < 0x1.ffffffp-127) return __builtin_copysignf(0.0f, (float)sum);
  return (float)sum;
}

inline float number(const uint8_t* from, bool is_second) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  word = is_second ? word & 0xffff0000u : word << 16;
  if ((word & 0x7f800000u) == 0) word &= 0x80000000u;
  return __builtin_bit_cast(float, word);
}

template <int kC, int kA, int kB>
inline void dot() {
  static_assert(kC != kA && kC != kB && kA != kB);
  require_shape(kA), require_shape(kB), require_shape(kC);
  const Shapes& shapes = model.shapes;
  require(shapes.rows[kC] == shapes.rows[kA] && shapes.row_bytes[kC] == shapes.row_bytes[kB] &&
          shapes.row_bytes[kA] == 4 * shapes.rows[kB]);
  const int num_columns = shapes.row_bytes[kC] / 4;
  for (int row = 0; row < shapes.rows[kC]; ++row) {
    float chains[2][16] = {};
    for (int pair = 0; pair < shapes.rows[kB]; ++pair) {
      for (int i = 0; i < 2; ++i) {
        const double a = number(model.rows[kA][row] + 4 * pair, i == 1);
        for (int column = 0; column < num_columns; ++column) {
          const double b = number(model.rows[kB][pair] + 4 * column, i == 1);
          chains[i][column] = rounded(a * b + chains[i][column]);
        }
      }
    }
    for (int column = 0; column < num_columns; ++column) {
      float sum;
      __builtin_memcpy(&sum, model.rows[kC][row] + 4 * column, sizeof sum);
      const double both = rounded((double)chains[0][column] + chains[1][column]);
      sum = rounded(rounded(sum) + both);
      __builtin_memcpy(model.rows[kC][row] + 4 * column, &sum, sizeof sum);
    }
  }
}

}  // namespace tiles
}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA
