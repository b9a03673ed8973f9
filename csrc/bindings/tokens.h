// Token ids as they come from Python.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pagedkv::bindings {

/// The token ids of one prompt, where Python keeps them: any object that as_tokens in
/// pagedkv/tokens.py takes. Their values are looked at by copy() and read(), which need no GIL.
class TokenIds {
 public:
  /// @param name   the argument's name in messages
  /// @param index  its place in a list of prompts, then called `name[index]`
  explicit TokenIds(nanobind::handle token_ids, const char* name = "token_ids",
                    Py_ssize_t index = -1);

  size_t size() const { return size_; }

  /// The ids as 32 bits.
  /// @throws UsageError  when the dtype is not of integers, or naming the first id outside
  ///                     0 .. 2**32 - 1 and its index
  std::vector<uint32_t> copy() const;

  /// The same, read where they lie when they have 32 bits already; else put into `room`. Valid as
  /// long as this object and `room` are.
  std::span<const uint32_t> read(std::vector<uint32_t>& room) const;

 private:
  template <typename T>
  std::vector<uint32_t> convert() const;
  // Of `size` ids, of which the first is the prompt's number `first`.
  void check_32_bits(const void* data, size_t first, size_t size) const;
  [[noreturn]] void refuse_changed() const;
  [[noreturn]] void refuse(const std::string& value, size_t i) const;
  std::string full_name() const;

  nanobind::object owner_;
  const void* data_;
  size_t size_;
  nanobind::dlpack::dtype dtype_;
  const char* name_;
  Py_ssize_t index_;
};

/// Must run when the module is loaded.
void find_numpy();

/// Whether TokenIds reads an object as it is, without asking as_tokens: a numpy array of one
/// dimension, contiguous and aligned, of a usual dtype.
bool is_plain_array(nanobind::handle object);

enum class ArrayType { kInt32, kInt64 };

/// A new numpy array of one dimension with a copy of the values; an invalid object where numpy's
/// arrays are laid out in an unknown way. Made by numpy itself, which for a small array takes a
/// third of the time that nanobind does.
nanobind::object new_array(const void* values, size_t size, ArrayType type);

/// The leading elements of `list` that are token ids: integers of any type, bool excepted, from 0
/// to 2**32 - 1. A result shorter than the list points at the first element that is none.
nanobind::ndarray<nanobind::numpy, uint32_t, nanobind::ndim<1>> leading_tokens(
    const nanobind::list& list);

}  // namespace pagedkv::bindings
