#include "tokens.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "pagedkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

using TokenArray = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
bool is_token(T value) {
  if constexpr (std::numeric_limits<T>::is_signed) {
    if (value < 0) return false;
  }
  return static_cast<uint64_t>(value) <= std::numeric_limits<uint32_t>::max();
}

/// The head of a numpy array, as numpy's C API documents it. To ask for it through the buffer
/// protocol takes as long as to match a block.
struct ArrayFields {
  PyObject_HEAD char* data;
  int num_dims;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* dtype;
  int flags;
};
constexpr int kPlain = 0x1 | 0x100;  // C contiguous and aligned

/// numpy's own objects, found when the module is loaded and kept for good.
struct Numpy {
  PyTypeObject* array_type = nullptr;  // none when arrays are laid out in another way than above
  PyObject* int32 = nullptr;
  PyObject* uint32 = nullptr;
  PyObject* int64 = nullptr;
  PyObject* empty = nullptr;
} numpy;

bool is_laid_out_as_documented(nb::handle array) {
  const auto* fields = reinterpret_cast<const ArrayFields*>(array.ptr());
  return Py_TYPE(array.ptr())->tp_basicsize >= static_cast<Py_ssize_t>(sizeof(ArrayFields)) &&
         nb::cast<uintptr_t>(array.attr("ctypes").attr("data")) ==
             reinterpret_cast<uintptr_t>(fields->data) &&
         fields->num_dims == 1 && fields->shape[0] == nb::cast<Py_ssize_t>(array.attr("size")) &&
         fields->strides[0] == nb::cast<Py_ssize_t>(array.attr("itemsize")) &&
         fields->dtype == nb::object(array.attr("dtype")).ptr() &&
         fields->flags == nb::cast<int>(array.attr("flags").attr("num"));
}

const ArrayFields* plain_array(nb::handle object) {
  if (Py_TYPE(object.ptr()) != numpy.array_type) return nullptr;
  const auto* fields = reinterpret_cast<const ArrayFields*>(object.ptr());
  const PyObject* dtype = fields->dtype;
  bool is_plain = fields->num_dims == 1 && (fields->flags & kPlain) == kPlain &&
                  (dtype == numpy.int32 || dtype == numpy.uint32 || dtype == numpy.int64);
  return is_plain ? fields : nullptr;
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

template <size_t kLanes>
[[gnu::always_inline]] inline bool any_is_negative_in_lanes(const int32_t* values, size_t size) {
  int32_t each[kLanes] = {}, any = 0;  // negative when one of them is
  const size_t end = size / kLanes * kLanes;
  for (size_t i = 0; i < end; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) each[lane] |= values[i + lane];
  for (size_t i = end; i < size; ++i) any |= values[i];
  for (int32_t lane : each) any |= lane;
  return any < 0;
}

#ifdef __x86_64__
[[gnu::target("avx2")]] bool any_is_negative_avx2(const int32_t* values, size_t size) {
  return any_is_negative_in_lanes<32>(values, size);
}
#endif

bool any_is_negative(const int32_t* values, size_t size) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return any_is_negative_avx2(values, size);
#endif
  return any_is_negative_in_lanes<16>(values, size);
}

}  // namespace

void find_numpy() {
  const nb::module_ module = nb::module_::import_("numpy");
  const nb::object array = module.attr("arange")(3, "dtype"_a = "int32");
  if (!is_laid_out_as_documented(array)) return;
  auto dtype = [&](const char* name) { return module.attr("dtype")(name).release().ptr(); };
  numpy = {Py_TYPE(array.ptr()), dtype("int32"), dtype("uint32"), dtype("int64"),
           nb::object(module.attr("empty")).release().ptr()};
}

nb::object new_array(const void* values, size_t size, ArrayType type) {
  if (numpy.array_type == nullptr) return {};
  PyObject* dtype = type == ArrayType::kInt32 ? numpy.int32 : numpy.int64;
  nb::object array = nb::handle(numpy.empty)(size, nb::handle(dtype));
  if (size == 0) return array;  // of which `values` need not point anywhere
  const size_t item_size = type == ArrayType::kInt64 ? 8 : 4;
  std::memcpy(reinterpret_cast<ArrayFields*>(array.ptr())->data, values, size * item_size);
  return array;
}

bool is_plain_array(nb::handle object) { return plain_array(object) != nullptr; }

TokenIds::TokenIds(nb::handle token_ids, const char* name, Py_ssize_t index)
    : name_(name), index_(index) {
  if (const ArrayFields* fields = plain_array(token_ids)) {
    owner_ = nb::borrow(token_ids);
    data_ = fields->data;
    size_ = static_cast<size_t>(fields->shape[0]);
    dtype_ = fields->dtype == numpy.int32    ? nb::dtype<int32_t>()
             : fields->dtype == numpy.uint32 ? nb::dtype<uint32_t>()
                                             : nb::dtype<int64_t>();
    return;
  }
  const nb::object as_tokens = nb::module_::import_("pagedkv.tokens").attr("as_tokens");
  owner_ = as_tokens(token_ids, full_name());
  const auto array = nb::cast<TokenArray>(owner_);
  data_ = array.data();
  size_ = array.shape(0);
  dtype_ = array.dtype();
}

std::string TokenIds::full_name() const {
  return index_ < 0 ? name_ : name_ + ("[" + std::to_string(index_) + "]");
}

void TokenIds::refuse(const std::string& value, size_t i) const {
  throw UsageError(full_name() + ": expected an integer from 0 to 4294967295, got " + value +
                   ", at index " + std::to_string(i));
}

void TokenIds::refuse_changed() const {
  throw UsageError(full_name() +
                   ": expected token ids, got an array that changed while it was read");
}

void TokenIds::check_32_bits(const void* data, size_t first, size_t size) const {
  if (dtype_ == nb::dtype<uint32_t>()) return;
  const auto* values = static_cast<const int32_t*>(data);
  if (!any_is_negative(values, size)) return;
  for (size_t i = 0; i < size; ++i)
    if (values[i] < 0) refuse(std::to_string(values[i]), first + i);
  refuse_changed();
}

template <typename T>
std::vector<uint32_t> TokenIds::convert() const {
  const T* values = static_cast<const T*>(data_);
  std::vector<uint32_t> tokens(size_);
  bool all_tokens = true;  // looked at once, after the loop, so that the loop vectorises
  for (size_t i = 0; i < size_; ++i) {
    tokens[i] = static_cast<uint32_t>(values[i]);
    all_tokens &= is_token(values[i]);
  }
  if (all_tokens) return tokens;

  for (size_t i = 0; i < size_; ++i)
    if (!is_token(values[i])) refuse(std::to_string(values[i]), i);
  refuse_changed();
}

std::vector<uint32_t> TokenIds::copy() const {
  if (dtype_ == nb::dtype<int32_t>() || dtype_ == nb::dtype<uint32_t>()) {
    const auto* values = static_cast<const uint32_t*>(data_);
    std::vector<uint32_t> tokens;
    tokens.reserve(size_);
    // Piece by piece, each looked at while it is in the nearest cache; and as a copy, since the
    // array may be written meanwhile.
    constexpr size_t kPiece = 1024;
    for (size_t begin = 0; begin < size_; begin += kPiece) {
      const size_t end = std::min(begin + kPiece, size_);
      tokens.insert(tokens.end(), values + begin, values + end);
      check_32_bits(tokens.data() + begin, begin, end - begin);
    }
    return tokens;
  }
  if (dtype_ == nb::dtype<int64_t>()) return convert<int64_t>();
  if (dtype_ == nb::dtype<uint64_t>()) return convert<uint64_t>();
  if (dtype_ == nb::dtype<uint16_t>()) return convert<uint16_t>();
  if (dtype_ == nb::dtype<int16_t>()) return convert<int16_t>();
  if (dtype_ == nb::dtype<uint8_t>()) return convert<uint8_t>();
  if (dtype_ == nb::dtype<int8_t>()) return convert<int8_t>();
  throw UsageError(full_name() + ": expected an array of integers, got another dtype");
}

std::span<const uint32_t> TokenIds::read(std::vector<uint32_t>& room) const {
  if (dtype_ == nb::dtype<int32_t>() || dtype_ == nb::dtype<uint32_t>()) {
    check_32_bits(data_, 0, size_);
    return {static_cast<const uint32_t*>(data_), size_};
  }
  room = copy();
  return room;
}

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

}  // namespace pagedkv::bindings
