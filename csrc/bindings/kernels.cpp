// The CPU kernels, for pagedkv/kernels/cpu.py. A tensor comes as its address, its shape and its
// strides as Python's tuples; the entry has checked them, so nothing is checked here but
// conversion.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

int64_t at(const nb::tuple& numbers, Py_ssize_t i) {
  const int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.ptr(), i));
  if (number == -1 && PyErr_Occurred()) nb::raise_python_error();
  return number;
}

int32_t small(const nb::tuple& numbers, Py_ssize_t i) {
  const int64_t number = at(numbers, i);
  if (number < 0 || number > INT32_MAX) throw UsageError("a size is too large for the kernels");
  return static_cast<int32_t>(number);
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

template <typename T>
T* pointer_to(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

TokensView tokens_view(uintptr_t data, const nb::tuple& strides) {
  return {pointer(data), at(strides, 0), at(strides, 1)};
}

PagesView pages_view(uintptr_t data, const nb::tuple& strides) {
  return {pointer(data), at(strides, 0), at(strides, 1), at(strides, 2)};
}

ScalesView scales_view(uintptr_t data, const nb::tuple& strides) {
  if (data == 0) return {};
  return {pointer_to<float>(data), at(strides, 0), at(strides, 1), at(strides, 2)};
}

const cpu::Isa& isa_at(size_t index) { return cpu::isas()[index]; }

size_t find_isa(const std::string& name, const std::string& what) {
  return &cpu::find_isa(name, what) - cpu::isas().data();
}

std::map<std::string, std::string> isas() {
  std::map<std::string, std::string> all;
  for (const cpu::Isa& isa : cpu::isas()) all[isa.name] = isa.unavailable;
  return all;
}

std::string isa_name(size_t index) { return isa_at(index).name; }

void write_kv(size_t isa, int num_threads, uintptr_t key, const nb::tuple& key_strides,
              uintptr_t value, const nb::tuple& value_strides, int token_dtype, uintptr_t key_pages,
              const nb::tuple& key_pages_strides, uintptr_t value_pages,
              const nb::tuple& value_pages_strides, const nb::tuple& pages_shape, int page_dtype,
              uintptr_t slot_mapping, int64_t num_tokens, uintptr_t key_scales,
              const nb::tuple& key_scales_strides, uintptr_t value_scales,
              const nb::tuple& value_scales_strides) {
  WriteKvParams p = {};
  p.key = tokens_view(key, key_strides);
  p.value = tokens_view(value, value_strides);
  p.token_dtype = static_cast<DType>(token_dtype);
  p.key_pages = pages_view(key_pages, key_pages_strides);
  p.value_pages = pages_view(value_pages, value_pages_strides);
  p.num_blocks = at(pages_shape, 0);
  p.block_size = small(pages_shape, 1);
  p.num_kv_heads = small(pages_shape, 2);
  p.head_dim = small(pages_shape, 3);
  p.page_dtype = static_cast<DType>(page_dtype);
  p.slot_mapping = pointer_to<const int64_t>(slot_mapping);
  p.num_tokens = num_tokens;
  p.key_scales = scales_view(key_scales, key_scales_strides);
  p.value_scales = scales_view(value_scales, value_scales_strides);
  const GilRelease release;
  cpu::write_kv(isa_at(isa), p, num_threads);
}

void paged_attention(size_t isa, int num_threads, uintptr_t query, const nb::tuple& query_shape,
                     const nb::tuple& query_strides, int query_dtype, uintptr_t key_pages,
                     const nb::tuple& key_pages_strides, uintptr_t value_pages,
                     const nb::tuple& value_pages_strides, const nb::tuple& pages_shape,
                     int page_dtype, uintptr_t block_table, const nb::tuple& block_table_shape,
                     int64_t block_table_stride, uintptr_t seq_lens, uintptr_t query_start_loc,
                     uintptr_t out, const nb::tuple& out_strides, uintptr_t lse,
                     const nb::tuple& lse_strides, float scale, bool causal, int64_t window,
                     float soft_cap, uintptr_t alibi_slopes, uintptr_t sinks, uintptr_t mask,
                     bool mask_is_bool, int64_t mask_stride, int64_t max_new, uintptr_t key_scales,
                     const nb::tuple& key_scales_strides, uintptr_t value_scales,
                     const nb::tuple& value_scales_strides, uintptr_t prefix_groups,
                     int64_t num_groups, uintptr_t prefix_rows, int64_t num_prefix_rows) {
  AttentionParams p = {};
  p.query = tokens_view(query, query_strides);
  p.num_tokens = at(query_shape, 0);
  p.num_heads = small(query_shape, 1);
  p.query_dtype = static_cast<DType>(query_dtype);
  p.key_pages = pages_view(key_pages, key_pages_strides);
  p.value_pages = pages_view(value_pages, value_pages_strides);
  p.num_blocks = at(pages_shape, 0);
  p.block_size = small(pages_shape, 1);
  p.num_kv_heads = small(pages_shape, 2);
  p.head_dim = small(pages_shape, 3);
  p.page_dtype = static_cast<DType>(page_dtype);
  p.block_table = pointer_to<const int32_t>(block_table);
  p.num_seqs = at(block_table_shape, 0);
  p.max_blocks = at(block_table_shape, 1);
  p.block_table_stride = block_table_stride;
  p.seq_lens = pointer_to<const int32_t>(seq_lens);
  p.query_start_loc = pointer_to<const int32_t>(query_start_loc);
  p.out = tokens_view(out, out_strides);
  p.lse = pointer_to<float>(lse);
  if (lse != 0) {
    p.lse_token_stride = at(lse_strides, 0);
    p.lse_head_stride = at(lse_strides, 1);
  }
  p.scale = scale;
  p.causal = causal;
  p.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
  p.soft_cap = soft_cap;
  p.alibi_slopes = pointer_to<const float>(alibi_slopes);
  p.sinks = pointer_to<const float>(sinks);
  if (mask_is_bool) {
    p.bool_mask = pointer_to<const bool>(mask);
  } else {
    p.float_mask = pointer_to<const float>(mask);
  }
  p.mask_stride = mask_stride;
  p.max_new = max_new;
  p.key_scales = scales_view(key_scales, key_scales_strides);
  p.value_scales = scales_view(value_scales, value_scales_strides);
  p.prefix_groups = pointer_to<const int32_t>(prefix_groups);
  p.num_groups = num_groups;
  p.prefix_rows = pointer_to<const int32_t>(prefix_rows);
  p.num_prefix_rows = num_prefix_rows;
  const GilRelease release;
  cpu::paged_attention(isa_at(isa), p, num_threads);
}

void set_dims(BlocksView& view, uintptr_t data, const nb::tuple& strides, int64_t element_size) {
  view.data = pointer(data);
  view.block_stride = at(strides, 0) * element_size;
  view.run_bytes = element_size;
}

// Describes blocks and buffer alike, with as few dimensions as both allow.
void set_views(const nb::tuple& shape, int64_t element_size, BlocksView& a, uintptr_t a_data,
               const nb::tuple& a_strides, BlocksView* b, uintptr_t b_data,
               const nb::tuple* b_strides) {
  set_dims(a, a_data, a_strides, element_size);
  if (b) set_dims(*b, b_data, *b_strides, element_size);
  struct Dim {
    int64_t size, a_stride, b_stride;
  };
  std::array<Dim, BlocksView::kMaxDims> dims;
  int32_t num_dims = 0;
  for (auto i = static_cast<Py_ssize_t>(shape.size()) - 1; i > 0; --i) {  // innermost first
    const Dim dim = {at(shape, i), at(a_strides, i) * element_size,
                     b ? at(*b_strides, i) * element_size : 0};
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

void copy_blocks(size_t isa, int num_threads, uintptr_t blocks, const nb::tuple& shape,
                 const nb::tuple& strides, int64_t element_size, uintptr_t sources,
                 uintptr_t destinations, int64_t num_copies) {
  CopyBlocksParams p = {};
  set_views(shape, element_size, p.blocks, blocks, strides, nullptr, 0, nullptr);
  p.blocks.num_blocks = at(shape, 0);
  p.sources = pointer_to<const int64_t>(sources);
  p.destinations = pointer_to<const int64_t>(destinations);
  p.num_copies = num_copies;
  const GilRelease release;
  cpu::copy_blocks(isa_at(isa), p, num_threads);
}

template <auto move>
void move_blocks(size_t isa, int num_threads, uintptr_t blocks, const nb::tuple& shape,
                 const nb::tuple& strides, int64_t element_size, uintptr_t buffer,
                 const nb::tuple& buffer_strides, uintptr_t block_ids, int64_t num_ids) {
  MoveBlocksParams p = {};
  set_views(shape, element_size, p.blocks, blocks, strides, &p.buffer, buffer, &buffer_strides);
  p.blocks.num_blocks = at(shape, 0);
  p.buffer.num_blocks = num_ids;
  p.block_ids = pointer_to<const int64_t>(block_ids);
  const GilRelease release;
  move(isa_at(isa), p, num_threads);
}

void merge_attention_states(size_t isa, int num_threads, uintptr_t outs,
                            const nb::tuple& outs_shape, const nb::tuple& outs_strides, int dtype,
                            uintptr_t lses, const nb::tuple& lses_strides, uintptr_t out,
                            const nb::tuple& out_strides, uintptr_t lse,
                            const nb::tuple& lse_strides) {
  MergeStatesParams p = {};
  p.outs = pointer(outs);
  p.num_states = at(outs_shape, 0);
  p.num_tokens = at(outs_shape, 1);
  p.num_heads = small(outs_shape, 2);
  p.head_dim = small(outs_shape, 3);
  p.outs_state_stride = at(outs_strides, 0);
  p.outs_token_stride = at(outs_strides, 1);
  p.outs_head_stride = at(outs_strides, 2);
  p.dtype = static_cast<DType>(dtype);
  p.lses = pointer_to<const float>(lses);
  p.lses_state_stride = at(lses_strides, 0);
  p.lses_token_stride = at(lses_strides, 1);
  p.lses_head_stride = at(lses_strides, 2);
  p.out = tokens_view(out, out_strides);
  p.lse = pointer_to<float>(lse);
  if (lse != 0) {
    p.lse_token_stride = at(lse_strides, 0);
    p.lse_head_stride = at(lse_strides, 1);
  }
  const GilRelease release;
  cpu::merge_attention_states(isa_at(isa), p, num_threads);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("cpu_isas", &isas,
        "Every instruction set of the CPU kernels and why it can't run, \"\" when it can.");
  m.def("cpu_find_isa", &find_isa, "name"_a, "what"_a,
        "The number of the instruction set of this name, or of the fastest for \"\".");
  m.def("cpu_isa_name", &isa_name, "isa"_a, "The name of an instruction set.");
  m.def("cpu_write_kv", &write_kv);
  m.def("cpu_paged_attention", &paged_attention);
  m.def("cpu_copy_blocks", &copy_blocks);
  m.def("cpu_gather_blocks", &move_blocks<cpu::gather_blocks>);
  m.def("cpu_scatter_blocks", &move_blocks<cpu::scatter_blocks>);
  m.def("cpu_merge_attention_states", &merge_attention_states);
}

}  // namespace pagedkv::bindings
