#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

// DLPackExchangeAPI of DLPack 1.x, from `major` to what is used of it.
struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void (*allocate)();
  void (*export_owned)();
  void (*import_owned)();
  int (*describe)(void* object, nb::dlpack::dltensor* to);  // allocates nothing, waits for nothing
};

struct Torch {
  PyTypeObject* tensor_type;
  const ExchangeApi* api;  // null when this torch has none
};

// Found when it is first needed, under Python's lock, and never let go: torch isn't either.
const Torch& torch() {
  static const Torch* found = nullptr;
  if (found != nullptr) return *found;
  const nb::object type = nb::module_::import_("torch").attr("Tensor");
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  const ExchangeApi* api = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->major != 1 || api->describe == nullptr) api = nullptr;
  }
  found = new Torch{reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()), api};
  return *found;
}

Element element_of(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype == nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  if (is(Code::Bfloat, 16)) return Element::BFloat16;
  if (is(Code::Float, 32)) return Element::Float32;
  if (is(Code::Float, 16)) return Element::Float16;
  if (is(Code::Float8_E4M3FN, 8)) return Element::Float8E4M3;
  if (is(Code::Int, 8)) return Element::Int8;
  if (is(Code::Int, 32)) return Element::Int32;
  if (is(Code::Int, 64)) return Element::Int64;
  if (is(Code::Bool, 8)) return Element::Bool;
  return Element::Other;
}

Element element_named(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Element>, 8> kNames = {{
      {"torch.float32", Element::Float32},
      {"torch.bfloat16", Element::BFloat16},
      {"torch.float16", Element::Float16},
      {"torch.float8_e4m3fn", Element::Float8E4M3},
      {"torch.int8", Element::Int8},
      {"torch.int32", Element::Int32},
      {"torch.int64", Element::Int64},
      {"torch.bool", Element::Bool},
  }};
  for (const auto& [known, element] : kNames) {
    if (known == name) return element;
  }
  return Element::Other;
}

}  // namespace

TensorView::TensorView(nb::handle tensor) {
  if (!read(tensor)) nb::raise_python_error();
}

// Wrappers that torch's transforms put around tensors have shapes, but point nowhere.
bool TensorView::has_memory(bool points_somewhere) const {
  if (points_somewhere) return true;
  for (int64_t i = 0; i < num_dims; ++i) {
    if (shape[i] == 0) return true;
  }
  PyErr_SetString(PyExc_BufferError, "a tensor without memory can't be described");
  return false;
}

bool TensorView::read(nb::handle tensor) try {
  if (!PyObject_TypeCheck(tensor.ptr(), torch().tensor_type)) {
    PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(tensor.ptr())->tp_name);
    return false;
  }
  if (const ExchangeApi* api = torch().api) {
    nb::dlpack::dltensor found;
    if (api->describe(tensor.ptr(), &found) != 0) return false;
    data = static_cast<char*>(found.data) + found.byte_offset;
    num_dims = found.ndim;
    shape = found.shape;
    strides = found.strides;
    element = element_of(found.dtype);
    element_bytes = found.dtype.bits * found.dtype.lanes / 8;
    place = {static_cast<int32_t>(found.device.device_type), found.device.device_id};
    return has_memory(found.data != nullptr);
  }
  const nb::object device = tensor.attr("device");
  const auto type = nb::cast<std::string>(device.attr("type"));
  if (type != "cpu" && type != "cuda") {
    PyErr_Format(PyExc_BufferError, "tensors on %s can't be described", type.c_str());
    return false;
  }
  const bool is_cpu = type == "cpu";
  place = {is_cpu ? nb::device::cpu::value : nb::device::cuda::value,
           is_cpu ? 0 : nb::cast<int32_t>(device.attr("index"))};
  data = reinterpret_cast<void*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
  const nb::object dtype = tensor.attr("dtype");
  element = element_named(nb::cast<std::string>(nb::str(nb::handle(dtype))));
  element_bytes = nb::cast<int64_t>(tensor.attr("element_size")());
  own_.clear();
  const nb::object sizes = tensor.attr("shape"), steps = tensor.attr("stride")();
  for (nb::handle size : sizes) own_.push_back(nb::cast<int64_t>(size));
  num_dims = static_cast<int64_t>(own_.size());
  for (nb::handle step : steps) own_.push_back(nb::cast<int64_t>(step));
  shape = own_.data();
  strides = own_.data() + num_dims;
  return has_memory(data != nullptr);
} catch (nb::python_error& error) {
  error.restore();
  return false;
}

}  // namespace pagedkv::bindings
