// Bytes played as calls of the pool's verbs, on a pool of a few small blocks.
//
// Any bytes make a play: a byte that is out of range is taken modulo, missing ones count as 0.
// After every call the pool audits itself, each refused call is seen to have changed nothing, and
// all pages are compared with what was noted beside the pool.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pagedkv::testing {

struct Played {
  size_t num_calls = 0, num_refused = 0, num_copies = 0, num_evicted = 0, num_cached_tokens = 0;
};

Played play(std::span<const uint8_t> bytes);

}  // namespace pagedkv::testing
