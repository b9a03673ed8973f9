// Which rows of a step begin with the same pages, so that a kernel can read those once for all.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

/// A group saves reads: of what its rows share, all but one row's. One that saves fewer than so
/// many pieces, each of `multiple` pages, is left out, since setting it up costs as much as it
/// saves.
inline constexpr size_t kMinSavedPieces = 2;

/// The rows order[rows_begin .. rows_end) hold the same pages in the columns [first_block,
/// last_block) and in all before them.
struct PrefixGroup {
  int32_t rows_begin, rows_end, first_block, last_block;
};
static_assert(sizeof(PrefixGroup) == 4 * sizeof(int32_t));  // read as int32 [num_groups, 4]

/// The leading pages of a row that may be shared: whole blocks that all its queries see and that
/// the step doesn't write.
struct PrefixRow {
  const BlockId* pages;  // [num_pages]
  size_t num_pages;
};

/// Groups of rows, and the order of rows that they count in. Of a row's groups the ranges of
/// columns are disjoint, and the rows of the deeper one are among those of the other.
struct PrefixGroups {
  std::vector<PrefixGroup> groups;  // outer ones before those inside
  std::vector<int32_t> order;       // each row at most once, also some that are in no group
};

/// Finds the groups whose columns begin and end at multiples of `multiple` pages. Looks once at
/// each page that a row shares with another one, and at one more. What an outer group was left out
/// for is of those inside.
void find_prefix_groups(std::span<const PrefixRow> rows, size_t multiple, PrefixGroups& found,
                        size_t min_saved_pieces = kMinSavedPieces);

}  // namespace pagedkv
