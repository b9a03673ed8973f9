// XXH3, 128 bits, seed 0, default secret (the published specification: doc/xxhash_spec.md of
// the xxHash project).
// Fast and well distributed, but not cryptographic: whoever chooses the input can make two collide.

#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace pagedkv {

/// In canonical order: the high half first, big-endian.
using Digest128 = std::array<uint8_t, 16>;

Digest128 xxh3_128(std::span<const uint8_t> data);

}  // namespace pagedkv
