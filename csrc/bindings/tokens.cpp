#include "tokens.h"

#include <limits>
#include <memory>
#include <string>

#include "pagedkv/error.h"

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

template <typename T>
bool is_token(T value) {
  if constexpr (std::numeric_limits<T>::is_signed) {
    if (value < 0) return false;
  }
  return static_cast<uint64_t>(value) <= std::numeric_limits<uint32_t>::max();
}

[[noreturn]] void refuse(std::string_view name, const std::string& value, size_t index) {
  throw UsageError(std::string(name) + ": expected an integer from 0 to 4294967295, got " + value +
                   ", at index " + std::to_string(index));
}

template <typename T>
std::vector<uint32_t> convert(const TokenArray& array, std::string_view name) {
  const T* values = static_cast<const T*>(array.data());
  const size_t num_tokens = array.shape(0);
  std::vector<uint32_t> tokens(num_tokens);
  bool all_tokens = true;  // looked at once, after the loop, so that the loop vectorises
  for (size_t i = 0; i < num_tokens; ++i) {
    tokens[i] = static_cast<uint32_t>(values[i]);
    all_tokens &= is_token(values[i]);
  }
  if (all_tokens) return tokens;

  size_t i = 0;
  while (is_token(values[i])) ++i;
  refuse(name, std::to_string(values[i]), i);
}

// The value of an int, or -1 when it is no token id.
int64_t to_token(PyObject* exact_int) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(exact_int, &overflow);
  return overflow == 0 && is_token(value) ? value : -1;
}

// The same for an element of another type: numpy's integers, a tensor of no dimension.
int64_t to_token_by_index(nb::object element) {
  if (PyBool_Check(element.ptr())) return -1;
  const nb::object number = nb::steal(PyNumber_Index(element.ptr()));
  if (number.is_valid()) return to_token(number.ptr());
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) nb::raise_python_error();
  PyErr_Clear();
  return -1;
}

}  // namespace

nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>> leading_tokens(const nb::list& list) {
  auto tokens = std::make_unique<std::vector<uint32_t>>();
  tokens->reserve(list.size());
  // An element's __index__ may run Python code, so the length is read anew each time.
  for (size_t i = 0; i < list.size(); ++i) {
    PyObject* element = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i));
    const int64_t token =
        PyLong_CheckExact(element) ? to_token(element) : to_token_by_index(nb::borrow(element));
    if (token < 0) break;
    tokens->push_back(static_cast<uint32_t>(token));
  }
  uint32_t* data = tokens->data();
  const size_t num_tokens = tokens->size();
  nb::capsule owner(tokens.release(), [](void* pointer) noexcept {
    delete static_cast<std::vector<uint32_t>*>(pointer);
  });
  return {data, {num_tokens}, owner};
}

Tokens borrow_tokens(const TokenArray& array, std::string_view name) {
  if (array.dtype() == nb::dtype<int32_t>()) {
    const auto* values = static_cast<const int32_t*>(array.data());
    int32_t any = 0;  // negative when one of them is
    for (size_t i = 0; i < array.shape(0); ++i) any |= values[i];
    for (size_t i = 0; any < 0; ++i) {
      if (values[i] < 0) refuse(name, std::to_string(values[i]), i);
    }
  } else if (array.dtype() != nb::dtype<uint32_t>()) {
    Tokens tokens{to_tokens(array, name), {}};
    tokens.ids = tokens.copy;
    return tokens;
  }
  return {{}, {static_cast<const uint32_t*>(array.data()), array.shape(0)}};
}

std::vector<uint32_t> to_tokens(const TokenArray& array, std::string_view name) {
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<uint32_t>()) return convert<uint32_t>(array, name);
  if (dtype == nb::dtype<int64_t>()) return convert<int64_t>(array, name);
  if (dtype == nb::dtype<int32_t>()) return convert<int32_t>(array, name);
  if (dtype == nb::dtype<uint64_t>()) return convert<uint64_t>(array, name);
  if (dtype == nb::dtype<uint16_t>()) return convert<uint16_t>(array, name);
  if (dtype == nb::dtype<int16_t>()) return convert<int16_t>(array, name);
  if (dtype == nb::dtype<uint8_t>()) return convert<uint8_t>(array, name);
  if (dtype == nb::dtype<int8_t>()) return convert<int8_t>(array, name);
  throw UsageError(std::string(name) + ": expected an array of integers, got another dtype");
}

}  // namespace pagedkv::bindings
