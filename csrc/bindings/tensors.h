// What a kernel has to know of a tensor, read where torch keeps it.
//
// torch gives it to C by a table of functions, DLPack's exchange API, in a fraction of the time
// that a tensor's methods take. A torch that has no such table is asked by the methods.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "pagedkv/kernels.h"

namespace pagedkv::bindings {

/// The dtypes of kernels, and the others that they are given numbers in.
enum class Element : int32_t {
  Float32 = static_cast<int32_t>(DType::Float32),
  BFloat16 = static_cast<int32_t>(DType::BFloat16),
  Float16 = static_cast<int32_t>(DType::Float16),
  Float8E4M3 = static_cast<int32_t>(DType::Float8E4M3),
  Int8 = static_cast<int32_t>(DType::Int8),
  Int32,
  Int64,
  Bool,
  Other
};

/// A device, by DLPack's numbers.
struct Place {
  int32_t type, index;
  bool operator==(const Place&) const = default;
};

/// A tensor's memory; good until somebody changes the tensor.
class TensorView {
 public:
  void* data = nullptr;
  int64_t num_dims = 0;
  const int64_t *shape = nullptr, *strides = nullptr;  // in elements
  Element element = Element::Other;
  int64_t element_bytes = 0;
  Place place = {};

  TensorView() = default;
  /// Raises what torch raises for what is no tensor, or none with memory.
  explicit TensorView(nanobind::handle tensor);
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  /// Returns false, and sets Python's error, for what is no tensor, or none with memory.
  bool read(nanobind::handle tensor);

  DType dtype() const { return static_cast<DType>(element); }

 private:
  bool has_memory(bool points_somewhere) const;

  std::vector<int64_t> own_;  // shape and strides that torch gave as Python's numbers
};

/// The numbers of a tensor of up to two dimensions, row after row without gaps. They stay where
/// they are if they lie so, or are copied.
template <typename T>
class DenseNumbers {
 public:
  const T* of(const TensorView& tensor);

 private:
  std::vector<char> copy_;
};

template <typename T>
const T* DenseNumbers<T>::of(const TensorView& tensor) {
  const auto* data = static_cast<const T*>(tensor.data);
  const int64_t last = tensor.num_dims - 1;
  const int64_t num_rows = last == 0 ? 1 : tensor.shape[0], num_columns = tensor.shape[last];
  const int64_t row_stride = tensor.strides[0], stride = tensor.strides[last];
  if ((num_columns <= 1 || stride == 1) && (num_rows <= 1 || row_stride == num_columns)) {
    return data;
  }
  copy_.resize(num_rows * num_columns * sizeof(T));
  T* to = reinterpret_cast<T*>(copy_.data());
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < num_columns; ++i) *to++ = data[row * row_stride + i * stride];
  }
  return reinterpret_cast<const T*>(copy_.data());
}

}  // namespace pagedkv::bindings
