// Digest format 1: the name of a block is the SHA-256 of its parent's name, its tokens and its
// extras.
//
//   root      = SHA256("pagedkv.block.v1" | u32le(block_size) | u32le(len(namespace)) | namespace)
//   digest[0] = SHA256(root        | u32le(token) * block_size | extras[0])
//   digest[i] = SHA256(digest[i-1] | u32le(token) * block_size | extras[i])
//
// pagedkv/hashing.py has the same in Python, pagedkv/extras.py the encoding of extras.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/sha256.h"
#include "pagedkv/xxh3.h"

namespace pagedkv {

inline constexpr std::string_view kChainFormat = "pagedkv.block.v1";

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

/// The digests of blocks that follow each other in a prompt and lie anywhere.
/// @param tokens    [.., block_size]: block i's are in the row places[i]
/// @param payloads  ascending; blocks without extras are not listed
/// @param digests   [..]: block i's is written to digests[places[i]]
void chain_places(const Digest& parent, uint32_t block_size, const uint32_t* tokens,
                  std::span<const BlockPayload> payloads, std::span<const uint32_t> places,
                  Digest* digests);

/// A prompt and the place for the digests of its whole blocks.
template <typename AnyDigest>
struct ChainedPromptOf {
  std::span<const uint32_t> tokens;        // [num_tokens]; a partly filled last block is left out
  std::span<const BlockPayload> payloads;  // ascending; blocks without extras are not listed
  std::span<AnyDigest> digests;            // [num_tokens / block_size], overwritten
};
using ChainedPrompt = ChainedPromptOf<Digest>;
using ChainedPrompt128 = ChainedPromptOf<Digest128>;

/// The digests of every prompt. Two prompts at a time are hashed interleaved, which on processors
/// with SHA extensions is 1.3 times as fast as one after the other.
void chain_prompts(const Digest& root, uint32_t block_size, std::span<const ChainedPrompt> prompts,
                   const Sha256Path& path = sha256_path());

// The scheme "xxh3-128": the same chain with XXH3-128 in the place of SHA-256. Not cryptographic,
// so equal digests are a hint and no proof.

Digest128 chain_root_128(uint32_t block_size, std::span<const uint8_t> namespace_);

void chain_prompts_128(const Digest128& root, uint32_t block_size,
                       std::span<const ChainedPrompt128> prompts);

}  // namespace pagedkv
