#include "block_hashes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "bindings.h"

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

PyTypeObject* block_hash_type = nullptr;  // made when the module is loaded and kept for good

// Objects that nobody has any more, kept for the next prompt: to take one from here and to put it
// back costs a third of what Python's allocator does. Guarded by the GIL.
class SpareObjects {
 public:
  PyObject* take() { return num_spare_ == 0 ? nullptr : spare_[--num_spare_]; }
  bool keep(PyObject* object) {
    if (num_spare_ == spare_.size()) return false;
    spare_[num_spare_++] = object;
    return true;
  }

 private:
  std::array<PyObject*, 1024> spare_;
  size_t num_spare_ = 0;
} spare_objects;  // all with room for a Digest

// Also runs, as the last of their own, for objects of a subclass written in Python: what those have
// besides is gone by then, and `tp_free` and the reference are those of the subclass.
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  const bool may_keep = type == block_hash_type && PyBytes_GET_SIZE(self) == sizeof(Digest);
  if (!may_keep || !spare_objects.keep(self)) type->tp_free(self);
  Py_DECREF(type);
}

PyObject* repr(PyObject* self) {
  constexpr Py_ssize_t kShown = 4;
  const auto* bytes = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(self));
  char hex[2 * kShown + 1] = "";
  const Py_ssize_t num_shown = std::min(PyBytes_GET_SIZE(self), kShown);
  for (Py_ssize_t i = 0; i < num_shown; ++i) {
    hex[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
    hex[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
  }
  return PyUnicode_FromFormat("BlockHash(%s%c)", hex, 0x2026);  // an ellipsis
}

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The 32 bytes (16 in the schemes of XXH3) that name a block and, "
                                  "through its parent, all before it.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {0, nullptr},
};

// Sizes of 0 are those of the base.
PyType_Spec spec = {
    .name = "pagedkv._core.BlockHash",
    .basicsize = 0,
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

// As bytes itself makes those of a subclass: allocated, filled, the cached hash marked as not
// known.
PyObject* make(const uint8_t* digest, size_t size) {
  const auto length = static_cast<Py_ssize_t>(size);
  PyObject* spare = size == sizeof(Digest) ? spare_objects.take() : nullptr;
  auto* object = spare == nullptr
                     ? PyObject_NewVar(PyBytesObject, block_hash_type, length)
                     : reinterpret_cast<PyBytesObject*>(PyObject_InitVar(
                           reinterpret_cast<PyVarObject*>(spare), block_hash_type, length));
  if (object == nullptr) nb::raise_python_error();
  std::memcpy(object->ob_sval, digest, size);
  object->ob_sval[size] = '\0';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  object->ob_shash = -1;
#pragma GCC diagnostic pop
  return reinterpret_cast<PyObject*>(object);
}

}  // namespace

BlockHash::BlockHash(const uint8_t* digest, size_t size)
    : nb::bytes(make(digest, size), nb::detail::steal_t()) {}

bool BlockHash::is_block_hash(PyObject* object) {
  return PyObject_TypeCheck(object, block_hash_type);
}

BlockHashList block_hash_list(const uint8_t* digests, size_t size, size_t num_digests) {
  auto list = nb::steal<BlockHashList>(PyList_New(static_cast<Py_ssize_t>(num_digests)));
  if (!list.is_valid()) nb::raise_python_error();
  for (size_t i = 0; i < num_digests; ++i, digests += size)
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), make(digests, size));
  return list;
}

void bind_block_hash(nb::module_& m) {
  nb::object type =
      nb::steal(PyType_FromSpecWithBases(&spec, reinterpret_cast<PyObject*>(&PyBytes_Type)));
  if (!type.is_valid()) nb::raise_python_error();
  m.attr("BlockHash") = type;
  block_hash_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
}

}  // namespace pagedkv::bindings
