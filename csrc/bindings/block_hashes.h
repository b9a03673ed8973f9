// BlockHash, the class of Python's digests: bytes with a short repr.
//
// A class written in Python costs 20 ns when one of its objects is freed, and more when one is
// made: together a third of what hashing the block takes.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pagedkv/sha256.h"

namespace pagedkv::bindings {

/// A BlockHash of Python.
class BlockHash : public nanobind::bytes {
 public:
  NB_OBJECT(BlockHash, nanobind::bytes, "pagedkv._core.BlockHash", is_block_hash)

  BlockHash(const uint8_t* digest, size_t size);
  explicit BlockHash(const Digest& digest) : BlockHash(digest.data(), digest.size()) {}

 private:
  static bool is_block_hash(PyObject* object);
};

using BlockHashList = nanobind::typed<nanobind::list, BlockHash>;

/// @param digests  `num_digests` of `size` bytes, one behind the other
BlockHashList block_hash_list(const uint8_t* digests, size_t size, size_t num_digests);

template <typename AnyDigest>
BlockHashList block_hash_list(const std::vector<AnyDigest>& digests) {
  return block_hash_list(reinterpret_cast<const uint8_t*>(digests.data()), sizeof(AnyDigest),
                         digests.size());
}

}  // namespace pagedkv::bindings
