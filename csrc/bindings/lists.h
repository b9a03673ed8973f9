// Lists of Python's objects, read without a call for each of them: a step has hundreds.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gil.h"

namespace pagedkv::bindings {

/// Where the instances of a Python class have the slot `name`, or -1.
Py_ssize_t slot_offset(PyTypeObject* type, const char* name);

/// Calls `take` with the core's handle, and the object that holds it, which each object of a list
/// keeps in its slot `_core`. False
/// when it is no list, or one of them has no such slot or something else in it.
template <typename Handle, typename Take>
bool read_core_slots(nanobind::handle list, Take&& take) {
  if (!PyList_CheckExact(list.ptr())) return false;
  PyObject* handle_type = nanobind::type<Handle>().ptr();
  PyTypeObject* type = nullptr;  // of the objects so far
  Py_ssize_t offset = -1;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
    PyObject* object = PyList_GET_ITEM(list.ptr(), i);
    if (Py_TYPE(object) != type) {
      const nanobind::object kept = nanobind::borrow(object);  // a metaclass may do as it likes
      type = Py_TYPE(object);
      offset = slot_offset(type, "_core");
      if (offset < 0 || i >= PyList_GET_SIZE(list.ptr()) ||
          PyList_GET_ITEM(list.ptr(), i) != object)
        return false;
    }
    PyObject* core = *reinterpret_cast<PyObject**>(reinterpret_cast<std::byte*>(object) + offset);
    if (core == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(core)) != handle_type ||
        !nanobind::inst_ready(core))
      return false;
    take(*nanobind::inst_ptr<Handle>(core), nanobind::handle(core));
  }
  return true;
}

/// Puts the numbers of a list into `values`. False when it is no list, or not of int alone, or one
/// of them has more than 64 bits.
bool read_ints(nanobind::handle list, std::vector<int64_t>& values);

/// Python's integers for the tokens of a vocabulary, each made once: a new one takes longer than to
/// hash its token. Guarded by the GIL.
class TokenInts {
 public:
  TokenInts() = default;
  TokenInts(const TokenInts&) = delete;
  TokenInts& operator=(const TokenInts&) = delete;
  ~TokenInts() {
    for (PyObject* number : numbers_) Py_XDECREF(number);
  }

  nanobind::list list_of(const std::vector<uint32_t>& tokens, GilTurns& turns);

 private:
  static constexpr size_t kMaxKept = size_t{1} << 18;  // tokens from there on are made anew

  std::vector<PyObject*> numbers_;  // by token; those that were asked for
};

}  // namespace pagedkv::bindings
