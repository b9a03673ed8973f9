// A decoder's products, norms, rotations and gates: how they are divided among threads.

#include <algorithm>

#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "thread_pool.h"
#include "work_memory.h"

namespace pagedkv::cpu {
namespace {

constexpr int64_t kBytesPerPiece = 64 << 10;
constexpr int64_t kLongestRegister = 16;  // numbers
constexpr int64_t kRowsPerTile = 4;

int64_t size_of(DType dtype) {
  if (dtype == DType::Float32) return 4;
  return dtype == DType::BFloat16 ? 2 : 1;
}

/// Calls `work(begin, end)` for rows in pieces of some 64 KB each.
template <typename Work>
void run_rows(int num_threads, int64_t num_rows, int64_t row_bytes, Work work) {
  int64_t rows = std::max<int64_t>(1, kBytesPerPiece / std::max<int64_t>(row_bytes, 1));
  rows = (rows + kRowsPerTile - 1) / kRowsPerTile * kRowsPerTile;
  ThreadPool::run(num_threads, (num_rows + rows - 1) / rows, [&](int64_t piece) {
    work(piece * rows, std::min(num_rows, (piece + 1) * rows));
  });
}

}  // namespace

void multiply(const Isa& isa, const ProductParams& p, int num_threads) {
  const DenseKernels& kernels = *isa.kernels->dense;
  ProductTile tile = {};
  tile.x = static_cast<const float*>(p.x);
  tile.x_stride = p.x_stride;
  if (p.x_dtype != DType::Float32 || p.num_in % kLongestRegister != 0) {
    tile.x_stride = (p.num_in + kLongestRegister - 1) / kLongestRegister * kLongestRegister;
    auto* wide = reinterpret_cast<float*>(
        work_memory(p.num_tokens * tile.x_stride * static_cast<int64_t>(sizeof(float))));
    for (int64_t t = 0; t < p.num_tokens; ++t) {
      float* to = wide + t * tile.x_stride;
      const auto* from = static_cast<const char*>(p.x) + t * p.x_stride * size_of(p.x_dtype);
      if (p.x_dtype == DType::BFloat16) {
        kernels.widen(from, to, p.num_in);
      } else {
        std::copy_n(reinterpret_cast<const float*>(from), p.num_in, to);
      }
      std::fill(to + p.num_in, to + tile.x_stride, 0.0f);
    }
    tile.x = wide;
  }
  tile.num_tokens = p.num_tokens;
  tile.num_in = p.num_in;
  tile.weights = p.weights;
  tile.weight_dtype = p.weight_dtype;
  tile.scales = p.scales;
  tile.bias = p.bias;
  tile.out = p.out;
  tile.out_stride = p.num_out;
  tile.out_is_bfloat16 = p.out_dtype == DType::BFloat16;
  run_rows(num_threads, p.num_out, p.num_in * size_of(p.weight_dtype),
           [&](int64_t begin, int64_t end) {
             ProductTile piece = tile;
             piece.row_begin = begin;
             piece.row_end = end;
             kernels.multiply(piece);
           });
}

void normalise(const Isa& isa, const NormParams& p, int num_threads) {
  run_rows(num_threads, p.num_rows, 2 * p.num_columns * size_of(p.dtype),
           [&](int64_t begin, int64_t end) { isa.kernels->dense->normalise(p, begin, end); });
}

void rotate(const Isa& isa, const RotateParams& p, int num_threads) {
  run_rows(num_threads, p.num_tokens, 2 * p.num_heads * p.head_dim * size_of(p.dtype),
           [&](int64_t begin, int64_t end) { isa.kernels->dense->rotate(p, begin, end); });
}

void gate(const Isa& isa, const GateParams& p, int num_threads) {
  // An exponential costs as much as reading several numbers.
  run_rows(num_threads, p.num_rows, 6 * p.num_columns * size_of(p.dtype),
           [&](int64_t begin, int64_t end) { isa.kernels->dense->gate(p, begin, end); });
}

}  // namespace pagedkv::cpu
