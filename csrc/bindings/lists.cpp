#include "lists.h"

#include <structmember.h>

#include <algorithm>

namespace nb = nanobind;

namespace pagedkv::bindings {

Py_ssize_t slot_offset(PyTypeObject* type, const char* name) {
  nb::object slot = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (!slot.is_valid()) PyErr_Clear();
  if (!slot.is_valid() || Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) return -1;
  // A descriptor of another class would be of another layout.
  if (!PyType_IsSubtype(type, PyDescr_TYPE(slot.ptr()))) return -1;
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
  return member->type == T_OBJECT_EX ? member->offset : -1;
}

bool read_ints(nb::handle list, std::vector<int64_t>& values) {
  if (!PyList_CheckExact(list.ptr())) return false;
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  values.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* element = PyList_GET_ITEM(list.ptr(), i);
    if (!PyLong_CheckExact(element)) return false;
    int overflow = 0;
    values.push_back(PyLong_AsLongLongAndOverflow(element, &overflow));
    if (overflow != 0) return false;
  }
  return true;
}

nb::list TokenInts::list_of(const std::vector<uint32_t>& tokens, GilTurns& turns) {
  nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(tokens.size())));
  if (!list.is_valid()) nb::raise_python_error();
  if (!tokens.empty()) {
    const size_t size = std::min<size_t>(kMaxKept, 1 + std::ranges::max(tokens));
    if (numbers_.size() < size) numbers_.resize(std::min(kMaxKept, 2 * size), nullptr);
  }
  // They lie anywhere, so they are fetched ahead.
  constexpr size_t kAhead = 16, kSlice = 4096;
  const auto kept = [&](size_t i) { return i < tokens.size() && tokens[i] < kMaxKept; };
  PyObject_GC_UnTrack(list.ptr());  // nobody else may see it before it is filled
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i % kSlice == kSlice - 1) turns.made(kSlice);
    if (kept(i + 2 * kAhead)) __builtin_prefetch(&numbers_[tokens[i + 2 * kAhead]]);
    if (kept(i + kAhead)) __builtin_prefetch(numbers_[tokens[i + kAhead]], 1);
    PyObject* number = kept(i) ? numbers_[tokens[i]] : nullptr;
    if (number == nullptr) {
      number = PyLong_FromUnsignedLong(tokens[i]);
      if (number == nullptr) nb::raise_python_error();
      if (kept(i)) numbers_[tokens[i]] = number;
    }
    if (kept(i)) Py_INCREF(number);
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), number);
  }
  PyObject_GC_Track(list.ptr());
  turns.made(tokens.size() % kSlice);
  return list;
}

}  // namespace pagedkv::bindings
