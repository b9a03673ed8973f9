// copy_blocks, gather_blocks and scatter_blocks: bytes between blocks, whatever their strides.
#include <algorithm>

#include "api.h"
#include "device.cuh"

namespace pagedkv::cuda {
namespace {

constexpr int kThreads = 256;
// Kernels loop over what is beyond. Enough to keep any device busy, and few enough for the launches
// that a flag makes needless.
constexpr int64_t kMaxBlocks = 8192;
/// Of the scratch memory, in front of the buffer.
constexpr int64_t kFlagBytes = 16;

/// One side of a copy: the blocks of these ids, or a buffer that holds them one after the other.
struct End {
  BlocksView blocks;
  bool is_buffer;
  const int64_t* ids;
  int64_t num_blocks;
};

struct Move {
  End from, to;
  int64_t num_moves;
  const int32_t* flag;  // null: always; else the move is made if *flag is `wanted`
  int32_t wanted;
};

/// Where a byte of block number `move` lies; null for an id that there is not.
__device__ unsigned char* find(const End& end, int64_t move, int64_t byte) {
  const int64_t id = end.ids[move];
  if (id < 0 || id >= end.num_blocks) return nullptr;
  const BlocksView& view = end.blocks;
  auto* block =
      static_cast<unsigned char*>(view.data) + (end.is_buffer ? move : id) * view.block_stride;
  if (view.num_dims == 0) return block + byte;  // without a division
  int64_t offset = byte % view.run_bytes;
  int64_t run = byte / view.run_bytes;
  for (int dim = view.num_dims - 1; dim >= 0 && run > 0; --dim) {
    offset += run % view.sizes[dim] * view.strides[dim];
    run /= view.sizes[dim];
  }
  return block + offset;
}

__host__ __device__ int64_t block_bytes(const BlocksView& view) {
  int64_t bytes = view.run_bytes;
  for (int dim = 0; dim < view.num_dims; ++dim) bytes *= view.sizes[dim];
  return bytes;
}

/// Grid: units of a block; blocks.
template <class Unit>
__global__ void __launch_bounds__(kThreads) move_blocks(const __grid_constant__ Move m) {
  if (m.flag != nullptr && *m.flag != m.wanted) return;
  const int64_t num_units = block_bytes(m.from.blocks) / static_cast<int64_t>(sizeof(Unit));
  for (int64_t move = blockIdx.y; move < m.num_moves; move += gridDim.y) {
    for (int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x; unit < num_units;
         unit += int64_t{gridDim.x} * kThreads) {
      const int64_t byte = unit * static_cast<int64_t>(sizeof(Unit));
      const unsigned char* from = find(m.from, move, byte);
      unsigned char* to = find(m.to, move, byte);
      if (from == nullptr || to == nullptr) continue;
      *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
    }
  }
}

/// Sets the flag to whether a destination is the source of another copy, so that they could not be
/// made in any order. One block of threads.
__global__ void __launch_bounds__(kThreads)
    find_conflicts(const int64_t* sources, const int64_t* destinations, int64_t num_copies,
                   int32_t* flag) {
  bool conflicts = false;
  for (int64_t i = threadIdx.x; i < num_copies; i += kThreads) {
    const int64_t destination = destinations[i];
    for (int64_t j = 0; j < num_copies; ++j) conflicts |= i != j && sources[j] == destination;
  }
  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();
  if (conflicts) *flag = 1;
}

/// The widest unit that divides every address and length.
int32_t find_unit(const Move& m) {
  int64_t bits = 0;
  for (const BlocksView* view : {&m.from.blocks, &m.to.blocks}) {
    bits |= reinterpret_cast<int64_t>(view->data) | view->block_stride | view->run_bytes;
    for (int dim = 0; dim < view->num_dims; ++dim) bits |= view->strides[dim];
  }
  for (const int32_t unit : {16, 8, 4, 2}) {
    if (bits % unit == 0) return unit;
  }
  return 1;
}

int start_move(const Move& m, cudaStream_t stream) {
  const int32_t unit = find_unit(m);
  const int64_t num_units = block_bytes(m.from.blocks) / unit;
  if (num_units == 0 || m.num_moves == 0) return 0;
  const int64_t in_block = ceil_div<int64_t>(num_units, kThreads);
  const int64_t rows = std::min(m.num_moves, kMaxBlocks);
  const dim3 grid(static_cast<unsigned>(std::min(in_block, kMaxBlocks / rows)),
                  static_cast<unsigned>(rows));
  switch (unit) {
    case 16:
      return launch(move_blocks<uint4>, grid, kThreads, 0, stream, m);
    case 8:
      return launch(move_blocks<uint64_t>, grid, kThreads, 0, stream, m);
    case 4:
      return launch(move_blocks<uint32_t>, grid, kThreads, 0, stream, m);
    case 2:
      return launch(move_blocks<uint16_t>, grid, kThreads, 0, stream, m);
    default:
      return launch(move_blocks<uint8_t>, grid, kThreads, 0, stream, m);
  }
}

/// Without conflicts the copies are made at once, else through a buffer; the device decides.
int copy_blocks(const CopyBlocksParams& p, void* workspace, cudaStream_t stream) {
  auto* flag = static_cast<int32_t*>(workspace);
  if (const int error = launch(find_conflicts, dim3(1), kThreads, 0, stream, p.sources,
                               p.destinations, p.num_copies, flag)) {
    return error;
  }
  const int64_t num_blocks = p.blocks.num_blocks;
  const End sources = {p.blocks, false, p.sources, num_blocks};
  const End destinations = {p.blocks, false, p.destinations, num_blocks};
  End buffer = {p.blocks, true, p.sources, num_blocks};
  buffer.blocks.data = static_cast<unsigned char*>(workspace) + kFlagBytes;
  int64_t stride = p.blocks.run_bytes;
  for (int dim = p.blocks.num_dims - 1; dim >= 0; --dim) {
    buffer.blocks.strides[dim] = stride;
    stride *= p.blocks.sizes[dim];
  }
  buffer.blocks.block_stride = stride;
  if (const int error = start_move({sources, destinations, p.num_copies, flag, 0}, stream)) {
    return error;
  }
  if (const int error = start_move({sources, buffer, p.num_copies, flag, 1}, stream)) return error;
  return start_move({buffer, destinations, p.num_copies, flag, 1}, stream);
}

int transfer(const MoveBlocksParams& p, bool gathers, cudaStream_t stream) {
  const End blocks = {p.blocks, false, p.block_ids, p.blocks.num_blocks};
  const End buffer = {p.buffer, true, p.block_ids, p.blocks.num_blocks};
  const int64_t num_moves = p.buffer.num_blocks;
  if (gathers) return start_move({blocks, buffer, num_moves, nullptr, 0}, stream);
  return start_move({buffer, blocks, num_moves, nullptr, 0}, stream);
}

}  // namespace
}  // namespace pagedkv::cuda

int64_t pagedkv_cuda_copy_blocks_workspace_bytes(const pagedkv::CopyBlocksParams* params) {
  using namespace pagedkv::cuda;
  return kFlagBytes + params->num_copies * block_bytes(params->blocks);
}

int pagedkv_cuda_copy_blocks(const pagedkv::CopyBlocksParams* params, void* workspace,
                             int64_t workspace_bytes, cudaStream_t stream) {
  using namespace pagedkv::cuda;
  if (params->num_copies == 0) return 0;
  if (workspace_bytes < pagedkv_cuda_copy_blocks_workspace_bytes(params)) return kSmallWorkspace;
  return copy_blocks(*params, workspace, stream);
}

int pagedkv_cuda_gather_blocks(const pagedkv::MoveBlocksParams* params, cudaStream_t stream) {
  return pagedkv::cuda::transfer(*params, true, stream);
}

int pagedkv_cuda_scatter_blocks(const pagedkv::MoveBlocksParams* params, cudaStream_t stream) {
  return pagedkv::cuda::transfer(*params, false, stream);
}
