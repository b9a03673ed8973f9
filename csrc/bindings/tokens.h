// Token ids as they come from Python.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace pagedkv::bindings {

/// What as_tokens in pagedkv/tokens.py gives: one dimension, contiguous, any dtype.
using TokenArray =
    nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

/// The ids as 32 bits.
/// @param name  the argument's name in messages
/// @throws UsageError  when the dtype is not of integers, or naming the first id outside
///                     0 .. 2**32 - 1 and its index
std::vector<uint32_t> to_tokens(const TokenArray& array, std::string_view name = "token_ids");

/// Token ids that are read where they lie when they already have 32 bits.
struct Tokens {
  std::vector<uint32_t> copy;  // empty when the caller's array is read
  std::span<const uint32_t> ids;
};

/// The same as to_tokens, valid as long as the array's memory and this object.
Tokens borrow_tokens(const TokenArray& array, std::string_view name = "token_ids");

/// The leading elements of `list` that are token ids: integers of any type, bool excepted, from 0
/// to 2**32 - 1. A result shorter than the list points at the first element that is none.
nanobind::ndarray<nanobind::numpy, uint32_t, nanobind::ndim<1>> leading_tokens(
    const nanobind::list& list);

}  // namespace pagedkv::bindings
