// Brings the K or V of a block of keys from their pages into shared memory, 16 bytes at a time.
// Keys that nobody sees are never read; zeros stand in for them.
#pragma once

#include "numbers.cuh"
#include "products.cuh"
#include "rows.cuh"
#include "tensor_core.cuh"

namespace pagedkv::cuda {

/// Keys that are processed together. A function of type and head_dim only: it is part of the
/// arithmetic. Splits are multiples of it.
template <class Element>
__host__ __device__ constexpr int block_keys(int dim) {
  const int row_bytes = dim * static_cast<int>(sizeof(Element));
  return row_bytes <= 256 ? 64 : row_bytes <= 512 ? 32 : 16;
}

/// Where the keys of a block lie: offsets in elements, -1 for a key that is not needed.
template <int kKeys>
struct KeyPlaces {
  int64_t key_offset[kKeys];
  int64_t value_offset[kKeys];
  float key_scale[kKeys];
  float value_scale[kKeys];
};

template <int kThreads, int kKeys>
__device__ void find_places(KeyPlaces<kKeys>& places, const AttentionParams& p, const Tile& tile,
                            KeyRange keys, int64_t kv_head, int64_t first_key) {
  const int32_t* table = p.block_table + tile.seq.index * p.block_table_stride;
  for (int i = threadIdx.x; i < kKeys; i += kThreads) {
    const int64_t position = first_key + i;
    const bool is_needed = position >= keys.begin && position < keys.end;
    const uint32_t block = static_cast<uint32_t>(position) / static_cast<uint32_t>(p.block_size);
    const int64_t page = is_needed ? table[block] : -1;
    const bool is_there = page >= 0 && page < p.num_blocks;  // a wrong id must not fault
    const int64_t offset = position - static_cast<int64_t>(block) * p.block_size;
    const auto place = [&](const auto& view) {
      return page * view.block_stride + offset * view.token_stride + kv_head * view.head_stride;
    };
    const auto scale = [&](const ScalesView& view) {
      return is_there && view.data != nullptr ? view.data[place(view)] : 1.0f;
    };
    places.key_offset[i] = is_there ? place(p.key_pages) : -1;
    places.value_offset[i] = is_there ? place(p.value_pages) : -1;
    places.key_scale[i] = scale(p.key_scales);
    places.value_scale[i] = scale(p.value_scales);
  }
}

/// Copies rows of head_dim numbers of `kBytes` each into rows of `kDim` of them, `pitch_bytes`
/// apart; what is missing becomes zero. Asynchronous if every row begins at a multiple of 16 bytes.
template <int kThreads, int kKeys, int kDim, int kBytes>
__device__ void fetch_rows(unsigned char* rows, int pitch_bytes, const void* pages,
                           const int64_t (&offsets)[kKeys], int head_dim, bool is_aligned) {
  constexpr int kChunks = kDim * kBytes / 16;
  const auto* bytes = static_cast<const unsigned char*>(pages);
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 16;  // in bytes
    unsigned char* to = rows + row * pitch_bytes + column;
    const int num_bytes = offsets[row] < 0 ? 0 : head_dim * kBytes - column;
    const unsigned char* from = bytes + offsets[row] * kBytes + column;
    if (num_bytes >= 16 && is_aligned) {
      copy_async_16(to, from);
      continue;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    for (int byte = 0; byte < num_bytes && byte < 16; byte += kBytes) {
#pragma unroll
      for (int part = 0; part < kBytes; ++part) to[byte + part] = from[byte + part];
    }
  }
}

/// Widens rows of 8-bit numbers, as fetch_rows left them with a pitch of kDim, into a tile. With
/// `scales`, one for each row, the numbers are multiplied before they are rounded.
template <class Products, int kThreads, int kKeys, int kDim>
__device__ void widen_rows(typename Products::Element* tile, const unsigned char* rows,
                           const float* scales, DType dtype) {
  constexpr int kQuads = kDim / 4;
  for (int i = threadIdx.x; i < kKeys * kQuads; i += kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const uint32_t four = *reinterpret_cast<const uint32_t*>(rows + row * kDim + column);
    float x[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint8_t bits = static_cast<uint8_t>(four >> (part * 8));
      x[part] =
          dtype == DType::Int8 ? static_cast<float>(static_cast<int8_t>(bits)) : widen_float8(bits);
      if (scales != nullptr) x[part] *= scales[row];
    }
    Products::narrow4(tile + row * row_pitch<typename Products::Element>(kDim) + column, x);
  }
}

}  // namespace pagedkv::cuda
