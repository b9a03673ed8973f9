#include <array>
#include <cstdlib>

#include "emulated_tensor_core.h"

namespace emulated {
namespace {

struct PendingCopy {
  unsigned thread;
  void* shared;
  const void* global;
};
thread_local std::vector<PendingCopy> pending;

/// A row of a matrix, read when its own lane comes: only a barrier makes other lanes' writes count.
struct MatrixLane {
  std::array<uint16_t, 8> row;
  uint32_t* out;
};

template <bool kTransposed>
void distribute(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto element = [&](int row, int column) -> uint32_t {
        return static_cast<const MatrixLane*>(lanes[matrix * 8 + row])->row[column];
      };
      const int row = lane / 4, column = lane % 4 * 2;
      const uint32_t low = kTransposed ? element(column, row) : element(row, column);
      const uint32_t high = kTransposed ? element(column + 1, row) : element(row, column + 1);
      static_cast<MatrixLane*>(lanes[lane])->out[matrix] = low | high << 16;
    }
  }
}

template <float (*kWiden)(uint16_t)>
void multiply(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& given = *static_cast<const Product*>(lanes[lane]);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      const auto widen = [&](uint32_t word) {
        return kWiden(static_cast<uint16_t>(word >> (16 * half)));
      };
      a[group][pair + half] = widen(given.a[0]);
      a[group + 8][pair + half] = widen(given.a[1]);
      a[group][pair + 8 + half] = widen(given.a[2]);
      a[group + 8][pair + 8 + half] = widen(given.a[3]);
      b[pair + half][group] = widen(given.b[0]);
      b[pair + 8 + half][group] = widen(given.b[1]);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto& given = *static_cast<Product*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = given.c[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      given.c[i] = sum;
    }
  }
}

MatrixLane read_row(uint32_t (&out)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) std::abort();  // a fault on the device
  MatrixLane lane{{}, out};
  std::memcpy(lane.row.data(), row, 16);
  return lane;
}

}  // namespace

void copy_async_16(void* shared, const void* global) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) {
    std::abort();
  }
  if (draw() & 1) {
    std::memcpy(shared, global, 16);
  } else {
    pending.push_back({thread_number(), shared, global});
  }
}

void wait_for_copies() {
  std::erase_if(pending, [](const PendingCopy& copy) {
    if (copy.thread != thread_number()) return false;
    std::memcpy(copy.shared, copy.global, 16);
    return true;
  });
}

void forget_copies() { pending.clear(); }

void load_matrices(uint32_t (&out)[4], const void* row) {
  MatrixLane lane = read_row(out, row);
  meet_warp("ldmatrix", &lane, distribute<false>);
}

void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  MatrixLane lane = read_row(out, row);
  meet_warp("ldmatrix.trans", &lane, distribute<true>);
}

void multiply_bfloat16(void* const* lanes) { multiply<from_bfloat16>(lanes); }
void multiply_float16(void* const* lanes) { multiply<from_float16>(lanes); }

}  // namespace emulated
