// SHA-256 (FIPS 180-4): one portable path and one for each instruction set that has it in hardware.
// The path is chosen at run time; nothing is allocated.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pagedkv {

using Digest = std::array<uint8_t, 32>;

/// Folds `num_blocks` blocks of 64 bytes into the eight words of `state`.
using Sha256Compress = void (*)(uint32_t* state, const uint8_t* blocks, size_t num_blocks);

/// What a message of a stretch has behind its 96 bytes, up to the end of its padding.
struct Sha256Tail {
  size_t message;
  const uint8_t* bytes;  // [32 + 64 * num_blocks]
  size_t num_blocks;
};

/// A stretch of a chain of messages: digest i is that of digest i - 1, of 16 words, and of a tail
/// where it has one.
struct Sha256Stretch {
  const Digest* parent;   // digest -1
  const uint32_t* words;  // [num_messages, 16], each of four bytes, little-endian
  Digest* digests;        // [num_messages], overwritten
  // [num_messages]: where the words and the digest of a message lie; null: in its place
  const uint32_t* places = nullptr;
  std::span<const Sha256Tail> tails = {};  // ascending
};

/// Computes one stretch, or two at once, which then have no tails.
using Sha256Chain = void (*)(const Sha256Stretch* stretches, size_t num_messages);

/// The state before the first block (FIPS 180-4, 5.3.3).
inline constexpr std::array<uint32_t, 8> kSha256Start = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

struct Sha256Path {
  const char* name;
  Sha256Compress compress;
  Sha256Chain chain_one, chain_two;  // null where `compress` is as good
  const char* unavailable;           // why it can't run here; "" when it can
};

/// Every path that pagedkv knows, best first. The last one, "portable", always runs.
std::span<const Sha256Path> sha256_paths();

/// The first path that runs on this processor.
const Sha256Path& sha256_path();

/// The digest of `num_blocks` blocks of 64 bytes that already end in the padding of FIPS
/// 180-4, 5.1.1.
Digest sha256_padded(const uint8_t* blocks, size_t num_blocks,
                     Sha256Compress compress = sha256_path().compress);

/// A message given in pieces.
class Sha256 {
 public:
  explicit Sha256(Sha256Compress compress = sha256_path().compress) : compress_(compress) {}

  void update(std::span<const uint8_t> data);

  /// Ends the message. The object is spent afterwards.
  Digest finish();

 private:
  Sha256Compress compress_;
  uint64_t num_bytes_ = 0;
  std::array<uint32_t, 8> state_ = kSha256Start;
  std::array<uint8_t, 64> pending_;  // the first num_bytes_ % 64 of them count
};

}  // namespace pagedkv
