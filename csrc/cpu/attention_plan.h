// How the work of one paged_attention call is cut into pieces.
//
// A strip is the queries of a stretch of one sequence's tokens and some KV heads; it walks over the
// splits of its keys, in order, and finishes its rows. Some splits are computed beforehand, by
// shared pieces: those of a prefix group, for the rows of several sequences at once, and those of a
// strip that would keep one thread busy for too long. Their states wait in memory and the strip
// folds them in where it comes to them, so who computed a state never shows in a result.

#pragma once

#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace pagedkv::cpu {

/// Split numbers [begin, end).
struct SplitRange {
  int32_t begin, end;
};

/// A token among the new ones of its sequence.
struct NewToken {
  int32_t sequence, index;
};

/// States that are computed beforehand, of whole splits folded into one.
struct StoredStates {
  SplitRange splits;
  int64_t first_row;    // of the plan's states: the row of kv head 0 and token 0 of the sequence
  int64_t head_rows;    // from one kv head to the next
  int64_t first_float;  // where the states begin
};

/// A piece that computes stored states.
struct SharedPiece {
  int64_t first_token;  // of the plan's tokens
  int32_t num_tokens;
  int32_t kv_head_begin, kv_head_end;
  SplitRange splits;
  int64_t first_float;
};

struct Strip {
  int32_t sequence;
  int32_t first_token, num_tokens;  // among the new ones of the sequence
  int32_t kv_head_begin, kv_head_end;
  SplitRange splits;                 // that any of its tokens sees
  int32_t first_stored, num_stored;  // of the plan's stored states, in ascending order of splits
};

struct Plan {
  std::vector<NewToken> tokens;
  std::vector<SharedPiece> shared;
  std::vector<StoredStates> stored;
  std::vector<Strip> strips;  // those without stored states first
  int64_t num_state_floats = 0;
  int32_t max_rows = 0;  // of a tile
  int num_threads = 1;   // worth using
};

StateLayout state_layout(int32_t head_dim);

/// The keys that a token sees, as positions [begin, end).
struct Seen {
  int64_t begin, end;
};
Seen seen_by(const AttentionParams& params, const NewToken& token);

/// Rewrites `plan`. The tables must have been checked.
void make_plan(const AttentionParams& params, int num_threads, Plan& plan);

}  // namespace pagedkv::cpu
