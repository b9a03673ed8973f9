// The CPU kernels, for pagedkv/kernels/cpu.py. They are given the tensors themselves; the entry has
// checked these, so nothing is checked here but what a kernel's smaller numbers hold.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <map>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

int32_t small(int64_t size) {
  if (size > INT32_MAX) throw UsageError("a size is too large for the kernels");
  return static_cast<int32_t>(size);
}

TokensView tokens_view(const TensorView& tensor) {
  return {tensor.data, tensor.strides[0], tensor.strides[1]};
}

PagesView pages_view(const TensorView& tensor) {
  return {tensor.data, tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

ScalesView scales_view(nb::handle scales) {
  if (scales.is_none()) return {};
  const TensorView tensor(scales);
  return {static_cast<float*>(tensor.data), tensor.strides[0], tensor.strides[1],
          tensor.strides[2]};
}

/// Sets `lse` and its strides in any params that have them.
template <typename Params>
void set_lse(Params& params, nb::handle lse) {
  if (lse.is_none()) return;
  const TensorView tensor(lse);
  params.lse = static_cast<float*>(tensor.data);
  params.lse_token_stride = tensor.strides[0];
  params.lse_head_stride = tensor.strides[1];
}

/// Sets the sizes of pages in any params that have them.
template <typename Params>
void set_pages(Params& params, const TensorView& key_pages, const TensorView& value_pages) {
  params.key_pages = pages_view(key_pages);
  params.value_pages = pages_view(value_pages);
  params.num_blocks = key_pages.shape[0];
  params.block_size = small(key_pages.shape[1]);
  params.num_kv_heads = small(key_pages.shape[2]);
  params.head_dim = small(key_pages.shape[3]);
  params.page_dtype = key_pages.dtype();
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

void write_kv(size_t isa, int num_threads, nb::handle key, nb::handle value, nb::handle key_pages,
              nb::handle value_pages, nb::handle slot_mapping, nb::handle key_scales,
              nb::handle value_scales) {
  const TensorView tokens(key), slots(slot_mapping);
  DenseNumbers<int64_t> dense_slots;
  WriteKvParams p = {};
  p.key = tokens_view(tokens);
  p.value = tokens_view(TensorView(value));
  p.token_dtype = tokens.dtype();
  set_pages(p, TensorView(key_pages), TensorView(value_pages));
  p.slot_mapping = dense_slots.of(slots);
  p.num_tokens = slots.shape[0];
  p.key_scales = scales_view(key_scales);
  p.value_scales = scales_view(value_scales);
  const GilRelease release;
  cpu::write_kv(isa_at(isa), p, num_threads);
}

void paged_attention(size_t isa, int num_threads, nb::handle query, nb::handle key_pages,
                     nb::handle value_pages, nb::handle block_table, nb::handle seq_lens,
                     nb::handle query_start_loc, nb::handle out, nb::handle lse, float scale,
                     bool causal, int64_t window, float soft_cap, nb::handle alibi_slopes,
                     nb::handle sinks, nb::handle mask, nb::handle key_scales,
                     nb::handle value_scales, nb::handle prefix_groups, nb::handle prefix_rows) {
  const TensorView tokens(query), table(block_table);
  DenseNumbers<int32_t> dense_table, dense_lens, dense_starts, dense_groups, dense_rows;
  DenseNumbers<float> dense_slopes, dense_sinks, dense_mask;
  DenseNumbers<bool> dense_bool_mask;
  AttentionParams p = {};
  p.query = tokens_view(tokens);
  p.num_tokens = tokens.shape[0];
  p.num_heads = small(tokens.shape[1]);
  p.query_dtype = tokens.dtype();
  set_pages(p, TensorView(key_pages), TensorView(value_pages));
  p.num_seqs = table.shape[0];
  p.max_blocks = table.shape[1];
  const bool has_dense_rows = p.max_blocks <= 1 || table.strides[1] == 1;
  p.block_table = has_dense_rows ? static_cast<const int32_t*>(table.data) : dense_table.of(table);
  p.block_table_stride = has_dense_rows ? table.strides[0] : p.max_blocks;
  p.seq_lens = dense_lens.of(TensorView(seq_lens));
  p.query_start_loc = dense_starts.of(TensorView(query_start_loc));
  p.out = tokens_view(TensorView(out));
  set_lse(p, lse);
  p.scale = scale;
  p.causal = causal;
  p.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
  p.soft_cap = soft_cap;
  if (!alibi_slopes.is_none()) p.alibi_slopes = dense_slopes.of(TensorView(alibi_slopes));
  if (!sinks.is_none()) p.sinks = dense_sinks.of(TensorView(sinks));
  if (!mask.is_none()) {
    const TensorView numbers(mask);
    p.max_new = p.mask_stride = numbers.shape[1];
    if (numbers.element == Element::Bool) {
      p.bool_mask = dense_bool_mask.of(numbers);
    } else {
      p.float_mask = dense_mask.of(numbers);
    }
  }
  p.key_scales = scales_view(key_scales);
  p.value_scales = scales_view(value_scales);
  if (!prefix_groups.is_none()) {
    const TensorView groups(prefix_groups), rows(prefix_rows);
    p.prefix_groups = dense_groups.of(groups);
    p.num_groups = groups.shape[0];
    p.prefix_rows = dense_rows.of(rows);
    p.num_prefix_rows = rows.shape[0];
  }
  const GilRelease release;
  cpu::paged_attention(isa_at(isa), p, num_threads);
}

void merge_attention_states(size_t isa, int num_threads, nb::handle outs, nb::handle lses,
                            nb::handle out, nb::handle lse) {
  const TensorView states(outs), weights(lses);
  MergeStatesParams p = {};
  p.outs = states.data;
  p.num_states = states.shape[0];
  p.num_tokens = states.shape[1];
  p.num_heads = small(states.shape[2]);
  p.head_dim = small(states.shape[3]);
  p.outs_state_stride = states.strides[0];
  p.outs_token_stride = states.strides[1];
  p.outs_head_stride = states.strides[2];
  p.dtype = states.dtype();
  p.lses = static_cast<const float*>(weights.data);
  p.lses_state_stride = weights.strides[0];
  p.lses_token_stride = weights.strides[1];
  p.lses_head_stride = weights.strides[2];
  p.out = tokens_view(TensorView(out));
  set_lse(p, lse);
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
  m.def("cpu_write_kv", &write_kv, "isa"_a, "num_threads"_a, "key"_a, "value"_a, "key_pages"_a,
        "value_pages"_a, "slot_mapping"_a, "key_scales"_a.none(), "value_scales"_a.none());
  m.def("cpu_paged_attention", &paged_attention, "isa"_a, "num_threads"_a, "query"_a, "key_pages"_a,
        "value_pages"_a, "block_table"_a, "seq_lens"_a, "query_start_loc"_a, "out"_a,
        "lse"_a.none(), "scale"_a, "causal"_a, "window"_a, "soft_cap"_a, "alibi_slopes"_a.none(),
        "sinks"_a.none(), "mask"_a.none(), "key_scales"_a.none(), "value_scales"_a.none(),
        "prefix_groups"_a.none(), "prefix_rows"_a.none());
  m.def("cpu_merge_attention_states", &merge_attention_states, "isa"_a, "num_threads"_a, "outs"_a,
        "lses"_a, "out"_a, "lse"_a.none());
}

}  // namespace pagedkv::bindings
