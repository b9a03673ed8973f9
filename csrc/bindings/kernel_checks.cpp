// The quick half of pagedkv.ops's checks: whether a call is as nearly every call. The other half,
// in Python, names what is wrong with one that isn't, and has the last word.

#include <nanobind/nanobind.h>

#include "bindings.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

bool is_float(Element element) { return element <= Element::Float16; }

bool is_eight_bits(Element element) {
  return element == Element::Float8E4M3 || element == Element::Int8;
}

/// Reads a tensor of so many dimensions.
bool read(TensorView& view, nb::handle tensor, int64_t num_dims) {
  if (view.read(tensor)) return view.num_dims == num_dims;
  PyErr_Clear();
  return false;
}

bool has_shape_of(const TensorView& tensor, const TensorView& other) {
  for (int64_t i = 0; i < other.num_dims; ++i) {
    if (tensor.shape[i] != other.shape[i]) return false;
  }
  return tensor.num_dims == other.num_dims;
}

/// Whether `other` is of the same kind of numbers and on the same device.
bool goes_with(const TensorView& tensor, const TensorView& other) {
  return tensor.element == other.element && tensor.place == other.place;
}

bool are_pages(const TensorView& key_pages, const TensorView& value_pages) {
  for (int i = 0; i < 4; ++i) {
    if (key_pages.shape[i] == 0) return false;
  }
  return has_shape_of(value_pages, key_pages) && goes_with(value_pages, key_pages) &&
         key_pages.strides[3] == 1 && value_pages.strides[3] == 1;
}

/// Whether no two of its numbers are one in memory, as far as strides of 0 tell.
bool can_be_written(const TensorView& tensor) {
  for (int64_t i = 0; i < tensor.num_dims; ++i) {
    if (tensor.strides[i] == 0 && tensor.shape[i] > 1) return false;
  }
  return true;
}

/// Where a tensor's memory ends that begins at `data`; strides are never negative.
const char* end_of(const TensorView& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.num_dims; ++i) {
    if (tensor.shape[i] == 0) return static_cast<const char*>(tensor.data);
    last += (tensor.shape[i] - 1) * tensor.strides[i];
  }
  return static_cast<const char*>(tensor.data) + (last + 1) * tensor.element_bytes;
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  return a.data < end_of(b) && b.data < end_of(a);
}

bool is_stored_as(Element tokens, Element pages) {
  if (!is_eight_bits(pages)) return is_float(pages) && tokens == pages;
  return tokens == pages || is_float(tokens);
}

bool is_table(const TensorView& tensor, Element element, const Place& place, int64_t size) {
  return tensor.element == element && tensor.place == place && tensor.shape[0] == size;
}

bool attention_fits(nb::handle query, nb::handle key_pages, nb::handle value_pages,
                    nb::handle block_table, nb::handle seq_lens, nb::handle query_start_loc,
                    nb::handle out) {
  TensorView q, k, v, table, lens, starts, result;
  if (!(read(q, query, 3) && read(k, key_pages, 4) && read(v, value_pages, 4) &&
        read(table, block_table, 2) && read(lens, seq_lens, 1) &&
        read(starts, query_start_loc, 1))) {
    return false;
  }
  const int64_t num_heads = q.shape[1], num_seqs = lens.shape[0];
  if (!(are_pages(k, v) && q.shape[2] == k.shape[3] && num_heads > 0 &&
        num_heads % k.shape[2] == 0 && is_float(q.element) && q.place == k.place &&
        (k.element == q.element || is_eight_bits(k.element)) &&
        is_table(table, Element::Int32, k.place, num_seqs) &&
        is_table(lens, Element::Int32, k.place, num_seqs) &&
        is_table(starts, Element::Int32, k.place, num_seqs + 1))) {
    return false;
  }
  return out.is_none() ||
         (read(result, out, 3) && has_shape_of(result, q) && goes_with(result, q) &&
          can_be_written(result) && !may_overlap(result, q) &&
          (result.strides[2] == 1 || result.shape[2] == 1));
}

bool write_kv_fits(nb::handle key, nb::handle value, nb::handle key_pages, nb::handle value_pages,
                   nb::handle slot_mapping) {
  TensorView k, v, kp, vp, slots;
  return read(k, key, 3) && read(v, value, 3) && read(kp, key_pages, 4) &&
         read(vp, value_pages, 4) && read(slots, slot_mapping, 1) && are_pages(kp, vp) &&
         can_be_written(kp) && can_be_written(vp) && goes_with(v, k) && has_shape_of(v, k) &&
         k.place == kp.place && is_stored_as(k.element, kp.element) && k.shape[1] == kp.shape[2] &&
         k.shape[2] == kp.shape[3] && is_table(slots, Element::Int64, kp.place, k.shape[0]);
}

}  // namespace

void bind_kernel_checks(nb::module_& m) {
  m.def("attention_fits", &attention_fits, "query"_a.none(), "key_pages"_a.none(),
        "value_pages"_a.none(), "block_table"_a.none(), "seq_lens"_a.none(),
        "query_start_loc"_a.none(), "out"_a.none(),
        "Whether paged_attention may be called with these tensors; the last may be None.");
  m.def("write_kv_fits", &write_kv_fits, "key"_a.none(), "value"_a.none(), "key_pages"_a.none(),
        "value_pages"_a.none(), "slot_mapping"_a.none(),
        "Whether write_kv may be called with these tensors.");
}

}  // namespace pagedkv::bindings
