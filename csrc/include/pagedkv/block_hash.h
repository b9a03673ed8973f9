// Digest format 1: the name of a block is the SHA-256 of its parent's name, its tokens and its
// extras.
//
//   root      = SHA256("pagedkv.block.v1" | u32le(block_size) | u32le(len(namespace)) | namespace)
//   digest[0] = SHA256(root        | u32le(token) * block_size | extras[0])
//   digest[i] = SHA256(digest[i-1] | u32le(token) * block_size | extras[i])
//
// pagedkv/hashing.py has the same in Python, with the encoding of extras.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pagedkv/sha256.h"

namespace pagedkv {

/// The digest that stands for the empty prefix.
Digest chain_root(uint32_t block_size, std::span<const uint8_t> namespace_);

/// The digest of one whole block.
/// @param tokens  [block_size]
/// @param extras  the block's encoded extras; empty when it has none
Digest chain_next(const Digest& parent, std::span<const uint32_t> tokens,
                  std::span<const uint8_t> extras);

/// The encoded extras of one block of a prompt.
struct BlockPayload {
  size_t block_index;
  std::span<const uint8_t> bytes;
};

/// The digests of all whole blocks of a prompt.
/// @param tokens   [num_tokens]; a partly filled last block is left out
/// @param payloads ascending by block_index; blocks without extras are not listed
/// @param digests  [num_tokens / block_size], overwritten
void chain_prompt(const Digest& root, uint32_t block_size, std::span<const uint32_t> tokens,
                  std::span<const BlockPayload> payloads, std::span<Digest> digests);

}  // namespace pagedkv
