// The CPU kernels that move whole blocks, for pagedkv/kernels/cpu.py.

#include <nanobind/nanobind.h>

#include <array>

#include "bindings.h"
#include "gil.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

void set_dims(BlocksView& view, const TensorView& tensor) {
  view.data = tensor.data;
  view.num_blocks = tensor.shape[0];
  view.block_stride = tensor.strides[0] * tensor.element_bytes;
  view.run_bytes = tensor.element_bytes;
}

// Describes blocks and buffer alike, with as few dimensions as both allow. A buffer there may be
// none of.
void set_views(BlocksView& a, const TensorView& blocks, BlocksView* b, const TensorView* buffer) {
  set_dims(a, blocks);
  if (b) set_dims(*b, *buffer);
  struct Dim {
    int64_t size, a_stride, b_stride;
  };
  std::array<Dim, BlocksView::kMaxDims> dims;
  int32_t num_dims = 0;
  for (int64_t i = blocks.num_dims - 1; i > 0; --i) {  // innermost first
    const Dim dim = {blocks.shape[i], blocks.strides[i] * blocks.element_bytes,
                     b ? buffer->strides[i] * blocks.element_bytes : 0};
    if (dim.size == 1) continue;
    const bool extends_run =
        num_dims == 0 && dim.a_stride == a.run_bytes && (!b || dim.b_stride == b->run_bytes);
    if (extends_run) {
      a.run_bytes *= dim.size;
      if (b) b->run_bytes *= dim.size;
      continue;
    }
    if (num_dims > 0) {
      Dim& inner = dims[num_dims - 1];
      if (dim.a_stride == inner.size * inner.a_stride &&
          dim.b_stride == inner.size * inner.b_stride) {
        inner.size *= dim.size;
        continue;
      }
    }
    if (num_dims == BlocksView::kMaxDims) throw UsageError("blocks: too many dimensions");
    dims[num_dims++] = dim;
  }
  const auto put = [&](BlocksView& view, int64_t Dim::* stride) {
    view.num_dims = num_dims;
    for (int32_t i = 0; i < num_dims; ++i) {  // outermost first
      view.sizes[i] = dims[num_dims - 1 - i].size;
      view.strides[i] = dims[num_dims - 1 - i].*stride;
    }
  };
  put(a, &Dim::a_stride);
  if (b) put(*b, &Dim::b_stride);
}

void copy_blocks(size_t isa, int num_threads, nb::handle blocks, nb::handle sources,
                 nb::handle destinations) {
  const TensorView from(sources);
  DenseNumbers<int64_t> dense_sources, dense_destinations;
  CopyBlocksParams p = {};
  set_views(p.blocks, TensorView(blocks), nullptr, nullptr);
  p.sources = dense_sources.of(from);
  p.destinations = dense_destinations.of(TensorView(destinations));
  p.num_copies = from.shape[0];
  const GilRelease release;
  cpu::copy_blocks(cpu::isas()[isa], p, num_threads);
}

template <auto move>
void move_blocks(size_t isa, int num_threads, nb::handle blocks, nb::handle block_ids,
                 nb::handle buffer) {
  const TensorView rows(buffer);
  DenseNumbers<int64_t> dense_ids;
  MoveBlocksParams p = {};
  set_views(p.blocks, TensorView(blocks), &p.buffer, &rows);
  p.block_ids = dense_ids.of(TensorView(block_ids));
  const GilRelease release;
  move(cpu::isas()[isa], p, num_threads);
}

}  // namespace

void bind_block_kernels(nb::module_& m) {
  m.def("cpu_copy_blocks", &copy_blocks, "isa"_a, "num_threads"_a, "blocks"_a, "sources"_a,
        "destinations"_a);
  m.def("cpu_gather_blocks", &move_blocks<cpu::gather_blocks>, "isa"_a, "num_threads"_a, "blocks"_a,
        "block_ids"_a, "buffer"_a);
  m.def("cpu_scatter_blocks", &move_blocks<cpu::scatter_blocks>, "isa"_a, "num_threads"_a,
        "blocks"_a, "block_ids"_a, "buffer"_a);
}

}  // namespace pagedkv::bindings
