// The extras of a prompt, from Python's objects to bytes. pagedkv/extras.py has the encoding.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagedkv/block_hash.h"
#include "pagedkv/extras.h"

namespace pagedkv::bindings {

/// What the verbs and hash_blocks take besides tokens, as the caller gave it.
struct Identity {
  nanobind::handle cache_salt;  // str, bytes or None
  nanobind::handle salt_from;   // an integer or None
  nanobind::handle extras;      // an iterable of Adapter, Media, Embeddings and Extra, or None

  /// Block by block, ascending; a partly filled last block counts as one.
  /// @throws UsageError  for a bad salt, a `salt_from` without a salt, something that is no extra,
  ///                     and an item that reaches beyond `num_tokens`
  std::vector<BlockExtras> encode(size_t num_tokens, uint32_t block_size) const;

  /// Whether encode() would give the same for another prompt with the same objects, if that is not
  /// shorter.
  bool is_repeatable() const {
    return extras.is_none() || PyList_CheckExact(extras.ptr()) || PyTuple_CheckExact(extras.ptr());
  }
  bool has_objects_of(const Identity& other) const {
    return cache_salt.is(other.cache_salt) && salt_from.is(other.salt_from) &&
           extras.is(other.extras);
  }
};

/// What of them enters the digests. Valid as long as `extras` is.
std::vector<BlockPayload> payloads_of(const std::vector<BlockExtras>& extras);

}  // namespace pagedkv::bindings
