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
constexpr int64_t kTokensPerBlock = 240;
constexpr int64_t kRunsPerThread = 4;

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

bool has_pairs(const Isa& isa) { return isa.kernels->dense->multiply_pairs != nullptr; }

void pack_pairs(const uint16_t* weights, int64_t num_out, int64_t num_in, uint16_t* packed) {
  for (int64_t panel = 0; panel < num_out; panel += kPanelOutputs) {
    for (int64_t k = 0; k < num_in; k += 2) {
      for (int64_t n = panel; n < panel + kPanelOutputs; ++n, packed += 2) {
        packed[0] = n < num_out ? weights[n * num_in + k] : 0;
        packed[1] = n < num_out ? weights[n * num_in + k + 1] : 0;
      }
    }
  }
}

void multiply_pairs(const Isa& isa, const PairProductParams& p, int num_threads) {
  const DenseKernels& kernels = *isa.kernels->dense;
  const int64_t num_panels = (p.num_out + kPanelOutputs - 1) / kPanelOutputs;
  const int64_t num_blocks = (p.num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  // Some panels in a row, so that one is fetched while another is in use, and enough such runs that
  // no thread waits long for another. Block after block, so that its tokens stay in a cache.
  const int64_t run = std::max<int64_t>(1, num_panels / (kRunsPerThread * num_threads));
  const int64_t num_runs = (num_panels + run - 1) / run;
  ThreadPool::run(num_threads, num_blocks * num_runs, [&](int64_t piece) {
    const int64_t first = piece % num_runs * run, begin = piece / num_runs * kTokensPerBlock;
    kernels.multiply_pairs(p, first, std::min(num_panels, first + run), begin,
                           std::min(p.num_tokens, begin + kTokensPerBlock));
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
