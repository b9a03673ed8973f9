// The few words that every file of the core shares.

#pragma once

#include <cstdint>

namespace pagedkv {

using Token = uint32_t;

/// Names a page of one group: the memory that holds the KV of one block. The Python side calls it
/// `block_id`.
using BlockId = int32_t;
inline constexpr BlockId kNoBlock = -1;

/// Names a node of the prefix tree: one logical block.
using NodeId = uint32_t;
inline constexpr NodeId kRoot = 0;
inline constexpr NodeId kNoNode = UINT32_MAX;

/// How much a block is worth keeping, from 0 to 100.
using Priority = uint8_t;
inline constexpr Priority kMaxPriority = 100;
inline constexpr Priority kDefaultPriority = 35;

/// Names whoever a block belongs to: its cache_salt.
using TenantId = uint32_t;
inline constexpr TenantId kNobody = 0;

}  // namespace pagedkv
