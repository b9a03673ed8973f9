// What the tables of a call may hold.

#pragma once

#include "pagedkv/kernels.h"

namespace pagedkv::cpu {

/// Throws UsageError for the first offset, length, page or group that is out of its range. Pages
/// that no query needs are not looked at.
void check_attention(const AttentionParams& params);

/// The first position that the first query of a sequence sees.
int64_t first_seen(const AttentionParams& params, int64_t first_position);

}  // namespace pagedkv::cpu
