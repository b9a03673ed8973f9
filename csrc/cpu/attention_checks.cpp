#include "attention_checks.h"

#include <algorithm>
#include <string>

#include "pagedkv/error.h"

namespace pagedkv::cpu {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& expected, int64_t got) {
  throw UsageError(what + ": expected " + expected + ", got " + std::to_string(got) +
                   ", in paged_attention");
}

std::string indexed(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

void check_row(const AttentionParams& p, int64_t row) {
  const int64_t num_new = int64_t{p.query_start_loc[row + 1]} - p.query_start_loc[row];
  const int64_t seq_len = p.seq_lens[row];
  if (num_new == 0 || seq_len == 0) return;
  const int64_t max_len = p.max_blocks * p.block_size;
  if (seq_len < num_new || seq_len > max_len) {
    refuse(indexed("seq_lens", row),
           "from its " + std::to_string(num_new) + " queries to the table's " +
               std::to_string(max_len) + " tokens",
           seq_len);
  }
  if ((p.bool_mask || p.float_mask) && p.max_new < num_new) {
    refuse("mask",
           "a column for each of the " + std::to_string(num_new) + " new keys of sequence " +
               std::to_string(row),
           p.max_new);
  }
  const int32_t* pages = p.block_table + row * p.block_table_stride;
  const int64_t first = first_seen(p, seq_len - num_new) / p.block_size;
  const int64_t last = (seq_len - 1) / p.block_size;
  // Without a branch inside, so that it runs at the speed of memory.
  const auto num_blocks = static_cast<uint64_t>(p.num_blocks);
  bool is_wrong = false;
  for (int64_t i = first; i <= last; ++i) {
    is_wrong |= static_cast<uint64_t>(int64_t{pages[i]}) >= num_blocks;
  }
  if (!is_wrong) return;
  const int32_t wrong = *std::find_if(pages + first, pages + last + 1, [&](int32_t page) {
    return page < 0 || page >= p.num_blocks;
  });
  refuse(indexed("block_table", row), "block ids from 0 to " + std::to_string(p.num_blocks - 1),
         wrong);
}

void check_group(const AttentionParams& p, int64_t group) {
  const int32_t* g = p.prefix_groups + 4 * group;
  const auto ascend = [&](int32_t begin, int32_t end, int64_t limit, const char* what) {
    if (begin >= 0 && begin <= end && end <= limit) return;
    refuse(indexed("prefix_groups", group),
           std::string(what) + " that ascend from 0 to at most " + std::to_string(limit),
           begin < 0 || begin > limit ? begin : end);
  };
  ascend(g[0], g[1], p.num_prefix_rows, "rows");
  ascend(g[2], g[3], p.max_blocks, "blocks");
  for (int32_t i = g[0]; i < g[1]; ++i) {
    if (p.prefix_rows[i] >= 0 && p.prefix_rows[i] < p.num_seqs) continue;
    refuse(indexed("prefix_rows", i),
           "rows of the block table from 0 to " + std::to_string(p.num_seqs - 1), p.prefix_rows[i]);
  }
}

}  // namespace

int64_t first_seen(const AttentionParams& params, int64_t first_position) {
  return params.window == 0 ? 0 : std::max<int64_t>(0, first_position - params.window + 1);
}

void check_attention(const AttentionParams& p) {
  const int32_t* starts = p.query_start_loc;
  for (int64_t i = 0; i <= p.num_seqs; ++i) {
    const bool fits = i == 0 ? starts[0] == 0 : starts[i] >= starts[i - 1];
    if (!fits || starts[i] > p.num_tokens) {
      refuse(indexed("query_start_loc", i),
             "offsets that ascend from 0 to at most " + std::to_string(p.num_tokens), starts[i]);
    }
  }
  for (int64_t row = 0; row < p.num_seqs; ++row) check_row(p, row);
  for (int64_t group = 0; group < p.num_groups; ++group) check_group(p, group);
}

}  // namespace pagedkv::cpu
