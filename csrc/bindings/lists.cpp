#include "lists.h"

#include <structmember.h>

#include <cstring>

#include "pagedkv/error.h"

namespace nb = nanobind;

namespace pagedkv::bindings {

Py_ssize_t core_slot(PyTypeObject* type) {
  nb::object slot = nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "_core"));
  if (!slot.is_valid()) PyErr_Clear();
  if (!slot.is_valid() || Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) return -1;
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

DigestClass::DigestClass(nb::handle type) : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
  if (!PyType_Check(type.ptr()) || !PyType_IsSubtype(type_, &PyBytes_Type) ||
      type_->tp_basicsize != PyBytes_Type.tp_basicsize)
    throw UsageError("type: expected a subclass of bytes without attributes");
}

nb::object DigestClass::make(const uint8_t* digest, size_t size) const {
  PyObject* object = type_->tp_alloc(type_, static_cast<Py_ssize_t>(size));
  if (object == nullptr) nb::raise_python_error();
  std::memcpy(PyBytes_AS_STRING(object), digest, size);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  reinterpret_cast<PyBytesObject*>(object)->ob_shash = -1;
#pragma GCC diagnostic pop
  return nb::steal(object);
}

nb::list DigestClass::list(const uint8_t* digests, size_t size, size_t num_digests) const {
  nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(num_digests)));
  if (!list.is_valid()) nb::raise_python_error();
  for (size_t i = 0; i < num_digests; ++i, digests += size)
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), make(digests, size).release().ptr());
  return list;
}

nb::list int_list(const std::vector<uint32_t>& values) {
  nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(values.size())));
  if (!list.is_valid()) nb::raise_python_error();
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* value = PyLong_FromUnsignedLong(values[i]);
    if (value == nullptr) nb::raise_python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return list;
}

}  // namespace pagedkv::bindings
