// A decoder's products, norms, rotations and gates, for pagedkv/kernels/dense.py, which has checked
// what it passes.

#include <nanobind/nanobind.h>

#include "bindings.h"
#include "gil.h"
#include "pagedkv/cpu.h"

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

template <typename T = void>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void multiply(size_t isa, int num_threads, uintptr_t x, int64_t x_stride, int x_dtype,
              int64_t num_tokens, int64_t num_in, uintptr_t weights, int weight_dtype,
              int64_t num_out, uintptr_t scales, uintptr_t bias, uintptr_t out, int out_dtype) {
  ProductParams p = {};
  p.x = at_address(x);
  p.x_stride = x_stride;
  p.x_dtype = static_cast<DType>(x_dtype);
  p.num_tokens = num_tokens;
  p.num_in = num_in;
  p.num_out = num_out;
  p.weights = at_address(weights);
  p.weight_dtype = static_cast<DType>(weight_dtype);
  p.scales = at_address<const float>(scales);
  p.bias = at_address<const float>(bias);
  p.out = at_address(out);
  p.out_dtype = static_cast<DType>(out_dtype);
  const GilRelease release;
  cpu::multiply(cpu::isas()[isa], p, num_threads);
}

bool has_pairs(size_t isa) { return cpu::has_pairs(cpu::isas()[isa]); }

void pack_pairs(uintptr_t weights, int64_t num_out, int64_t num_in, uintptr_t packed) {
  const GilRelease release;
  cpu::pack_pairs(at_address<const uint16_t>(weights), num_out, num_in,
                  at_address<uint16_t>(packed));
}

void multiply_pairs(size_t isa, int num_threads, uintptr_t x, int64_t x_stride, int64_t num_tokens,
                    int64_t num_in, uintptr_t packed, int64_t num_out, uintptr_t bias,
                    uintptr_t out) {
  PairProductParams p = {};
  p.x = at_address(x);
  p.x_stride = x_stride;
  p.num_tokens = num_tokens;
  p.num_in = num_in;
  p.num_out = num_out;
  p.packed = at_address(packed);
  p.bias = at_address<const float>(bias);
  p.out = at_address(out);
  const GilRelease release;
  cpu::multiply_pairs(cpu::isas()[isa], p, num_threads);
}

void normalise(size_t isa, int num_threads, uintptr_t x, int64_t x_stride, int dtype,
               int64_t num_rows, int64_t num_columns, uintptr_t weight, float eps, uintptr_t out) {
  NormParams p = {};
  p.x = at_address(x);
  p.x_stride = x_stride;
  p.dtype = static_cast<DType>(dtype);
  p.num_rows = num_rows;
  p.num_columns = num_columns;
  p.weight = at_address<const float>(weight);
  p.eps = eps;
  p.out = at_address(out);
  const GilRelease release;
  cpu::normalise(cpu::isas()[isa], p, num_threads);
}

void rotate(size_t isa, int num_threads, uintptr_t x, int64_t token_stride, int64_t head_stride,
            int dtype, int64_t num_tokens, int64_t num_heads, int64_t head_dim, uintptr_t cos,
            uintptr_t sin) {
  RotateParams p = {};
  p.x = at_address(x);
  p.token_stride = token_stride;
  p.head_stride = head_stride;
  p.dtype = static_cast<DType>(dtype);
  p.num_tokens = num_tokens;
  p.num_heads = num_heads;
  p.head_dim = head_dim;
  p.cos = at_address<const float>(cos);
  p.sin = at_address<const float>(sin);
  const GilRelease release;
  cpu::rotate(cpu::isas()[isa], p, num_threads);
}

void gate(size_t isa, int num_threads, uintptr_t x, int64_t x_stride, int dtype, int64_t num_rows,
          int64_t num_columns, uintptr_t out) {
  GateParams p = {};
  p.x = at_address(x);
  p.x_stride = x_stride;
  p.dtype = static_cast<DType>(dtype);
  p.num_rows = num_rows;
  p.num_columns = num_columns;
  p.out = at_address(out);
  const GilRelease release;
  cpu::gate(cpu::isas()[isa], p, num_threads);
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("cpu_multiply", &multiply);
  m.def("cpu_has_pairs", &has_pairs);
  m.def("cpu_pack_pairs", &pack_pairs);
  m.def("cpu_multiply_pairs", &multiply_pairs);
  m.def("cpu_normalise", &normalise);
  m.def("cpu_rotate", &rotate);
  m.def("cpu_gate", &gate);
}

}  // namespace pagedkv::bindings
