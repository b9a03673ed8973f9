#include "attention_plan.h"

#include <algorithm>
#include <cstring>

#include "attention_checks.h"

namespace pagedkv::cpu {
namespace {

constexpr int64_t kTileRows = 256;  // of one tile: its weights and sums stay in the L2 cache
constexpr int64_t kMaxGroupRows =
    64;  // of a sequence and KV head; more rows fill a tile by themselves
constexpr int64_t kMaxStateFloats = 16 << 20;
// Work is counted in (row, key, number of head_dim) triples, of which one takes some 0.05 ns.
// Reading a key costs as much as multiplying it with four rows.
constexpr int64_t kMinRowsPerKey = 4;
constexpr int64_t kInlineWork = 1'000'000;  // waking a thread takes as long
constexpr int64_t kWorkPerThread = 500'000;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t balanced(int64_t total, int64_t most) { return ceil_div(total, ceil_div(total, most)); }

SplitRange splits_of(const Seen& seen) {
  if (seen.begin >= seen.end) return {0, 0};
  return {static_cast<int32_t>(seen.begin / kSplitTokens),
          static_cast<int32_t>(ceil_div(seen.end, kSplitTokens))};
}

class Planner {
 public:
  Planner(const AttentionParams& params, int num_threads, Plan& plan)
      : p_(params),
        plan_(plan),
        group_(params.num_heads / params.num_kv_heads),
        stride_(state_layout(params.head_dim).stride_floats),
        num_threads_(num_threads) {
    plan_.tokens.clear();
    plan_.shared.clear();
    plan_.stored.clear();
    plan_.strips.clear();
    plan_.num_state_floats = 0;
    plan_.max_rows = 0;
  }

  void run() {
    choose_threads();
    for (int64_t i = 0; i < p_.num_groups; ++i) add_group(p_.prefix_groups + 4 * i);
    std::ranges::sort(grouped(), {}, [](const Grouped& g) {
      return std::pair(g.sequence, g.states.splits.begin);
    });
    for (int64_t i = 0; i < p_.num_seqs; ++i) add_sequence(static_cast<int32_t>(i));
    std::ranges::stable_partition(plan_.strips, [](const Strip& s) { return s.num_stored == 0; });
  }

 private:
  struct Grouped {
    int32_t sequence;
    StoredStates states;
  };
  // Kept between calls for their memory.
  static std::vector<Grouped>& grouped() {
    thread_local std::vector<Grouped> kept;
    return kept;
  }

  int32_t num_new(int64_t sequence) const {
    return p_.query_start_loc[sequence + 1] - p_.query_start_loc[sequence];
  }

  Seen seen_by_range(int32_t sequence, int32_t first, int32_t last) const {
    return {seen_by(p_, {sequence, first}).begin, seen_by(p_, {sequence, last - 1}).end};
  }

  int64_t work(int64_t num_tokens, int64_t num_kv_heads, int64_t num_keys) const {
    return std::max(num_tokens * group_, kMinRowsPerKey) * num_kv_heads * num_keys * p_.head_dim;
  }

  void choose_threads() {
    grouped().clear();
    total_work_ = 0;
    num_units_ = 0;
    for (int32_t i = 0; i < p_.num_seqs; ++i) {
      const int32_t count = num_new(i);
      if (count == 0) continue;
      const Seen seen = seen_by_range(i, 0, count);
      if (seen.begin >= seen.end) continue;
      // Of a causal triangle half is seen.
      const int64_t keys = seen.end - seen.begin - (p_.causal ? count / 2 : 0);
      total_work_ += work(count, p_.num_kv_heads, keys);
      const SplitRange splits = splits_of(seen);
      num_units_ += (splits.end - splits.begin) * ceil_div(count * group_, kTileRows);
    }
    plan_.num_threads =
        total_work_ < kInlineWork
            ? 1
            : static_cast<int>(std::min<int64_t>(num_threads_, 1 + total_work_ / kWorkPerThread));
    num_threads_ = plan_.num_threads;
  }

  // ---- prefix groups

  void add_group(const int32_t* g) {
    const int64_t block_size = p_.block_size;
    const SplitRange splits = {static_cast<int32_t>(ceil_div(g[2] * block_size, kSplitTokens)),
                               static_cast<int32_t>(g[3] * block_size / kSplitTokens)};
    if (splits.begin >= splits.end) return;
    const int64_t first_token = static_cast<int64_t>(plan_.tokens.size());
    const int64_t num_before = static_cast<int64_t>(grouped().size());
    bool is_start = true;
    const int32_t* pages = nullptr;
    for (int32_t i = g[0]; i < g[1]; ++i) {
      const int32_t sequence = p_.prefix_rows[i];
      if (!joins(sequence, splits, pages, num_before)) continue;
      const int64_t first_row = (static_cast<int64_t>(plan_.tokens.size()) - first_token) * group_;
      grouped().push_back({sequence, {splits, first_row, 0, 0}});
      for (int32_t t = 0; t < num_new(sequence); ++t) {
        plan_.tokens.push_back({sequence, t});
        is_start &= seen_by(p_, {sequence, t}).begin >= splits.begin * kSplitTokens;
      }
    }
    const int64_t num_tokens = static_cast<int64_t>(plan_.tokens.size()) - first_token;
    const int64_t num_members = static_cast<int64_t>(grouped().size()) - num_before;
    if (num_members < 2 || !store_group(first_token, num_tokens, splits, is_start, num_before)) {
      plan_.tokens.resize(first_token);
      grouped().resize(num_before);
    }
  }

  // Whether a sequence may take part. The range is a hint: a sequence that holds other pages there,
  // or had some of the splits computed already, is left out. `pages` is set by the first that
  // joins.
  bool joins(int32_t sequence, const SplitRange& splits, const int32_t*& pages,
             int64_t num_before) const {
    const int32_t count = num_new(sequence);
    if (count == 0 || count * group_ > kMaxGroupRows) return false;
    const Seen seen = seen_by_range(sequence, 0, count);
    // Every split is seen in full by somebody, so that all of the pages have been checked.
    if (seen.begin >= seen.end || seen.begin > splits.begin * kSplitTokens ||
        seen.end < splits.end * kSplitTokens) {
      return false;
    }
    for (int64_t i = 0; i < static_cast<int64_t>(grouped().size()); ++i) {
      const Grouped& other = grouped()[i];
      if (other.sequence != sequence) continue;
      if (i >= num_before ||
          (other.states.splits.begin < splits.end && splits.begin < other.states.splits.end)) {
        return false;
      }
    }
    const int64_t first = splits.begin * kSplitTokens / p_.block_size;
    const int64_t last = ceil_div(splits.end * kSplitTokens, p_.block_size);
    const int32_t* mine = p_.block_table + sequence * p_.block_table_stride + first;
    if (pages == nullptr) pages = mine;
    return std::memcmp(pages, mine, (last - first) * sizeof *mine) == 0;
  }

  bool store_group(int64_t first_token, int64_t num_tokens, const SplitRange& splits, bool is_start,
                   int64_t num_before) {
    const int64_t num_kv_heads = p_.num_kv_heads;
    const int64_t tile_tokens = balanced(num_tokens, std::max<int64_t>(1, kTileRows / group_));
    const int64_t num_tiles = ceil_div(num_tokens, tile_tokens);
    int64_t tile_heads =
        num_tiles > 1 ? 1
                      : std::clamp<int64_t>(kTileRows / (tile_tokens * group_), 1, num_kv_heads);
    // One thread may walk over all of the splits and fold them, if they are the first that its rows
    // see; then only one state a row is kept.
    const int64_t num_walks = num_threads_ == 1 ? 1 : 2 * num_threads_;
    const bool folds = is_start && num_kv_heads * num_tiles >= num_walks;
    if (folds) tile_heads = std::min(tile_heads, num_kv_heads * num_tiles / num_walks);
    const int32_t step = folds ? splits.end - splits.begin : 1;
    const int64_t head_rows = num_tokens * group_;
    const int64_t floats = head_rows * num_kv_heads * stride_;
    if (plan_.num_state_floats + floats * ((splits.end - splits.begin) / step) > kMaxStateFloats) {
      return false;
    }
    const int64_t num_after = static_cast<int64_t>(grouped().size());
    for (int32_t split = splits.begin; split < splits.end; split += step) {
      const SplitRange range = {split, split + step};
      const int64_t first_float = plan_.num_state_floats;
      plan_.num_state_floats += floats;
      for (int64_t head = 0; head < num_kv_heads; head += tile_heads) {
        const int64_t head_end = std::min(head + tile_heads, num_kv_heads);
        for (int64_t token = 0; token < num_tokens; token += tile_tokens) {
          const int64_t count = std::min(tile_tokens, num_tokens - token);
          add_shared({first_token + token, static_cast<int32_t>(count), static_cast<int32_t>(head),
                      static_cast<int32_t>(head_end), range,
                      first_float + (head * head_rows + token * group_) * stride_});
        }
      }
      for (int64_t i = num_before; i < num_after; ++i) {
        Grouped member = grouped()[i];
        member.states.splits = range;
        member.states.head_rows = head_rows;
        member.states.first_float = first_float;
        if (split == splits.begin) {
          grouped()[i] = member;
        } else {
          grouped().push_back(member);
        }
      }
    }
    return true;
  }

  void add_shared(const SharedPiece& piece) {
    plan_.shared.push_back(piece);
    note_rows(piece.num_tokens, piece.kv_head_end - piece.kv_head_begin);
  }

  void note_rows(int64_t num_tokens, int64_t num_kv_heads) {
    const int64_t rows = num_tokens * num_kv_heads * group_;
    plan_.max_rows = std::max(plan_.max_rows, static_cast<int32_t>(rows));
  }

  // ---- sequences

  void add_sequence(int32_t sequence) {
    const int32_t count = num_new(sequence);
    if (count == 0) return;
    const auto mine = std::ranges::equal_range(grouped(), sequence, {}, &Grouped::sequence);
    const int64_t most = std::max<int64_t>(1, kTileRows / group_);
    const int32_t tokens = static_cast<int32_t>(balanced(count, most));
    int64_t heads = std::clamp<int64_t>(kTileRows / (tokens * group_), 1, p_.num_kv_heads);
    if (num_units_ > 0 && num_units_ < num_threads_) {  // too few splits for all of the threads
      heads = std::min(heads, ceil_div(p_.num_kv_heads, ceil_div(num_threads_, num_units_)));
    }
    heads = balanced(p_.num_kv_heads, heads);
    for (int64_t head = 0; head < p_.num_kv_heads; head += heads) {
      // The last tokens see the most keys, so they begin first.
      for (int32_t last = count; last > 0; last -= std::min(last, tokens)) {
        const int32_t first = std::max(0, last - tokens);
        Strip strip = {sequence,
                       first,
                       last - first,
                       static_cast<int32_t>(head),
                       static_cast<int32_t>(std::min<int64_t>(head + heads, p_.num_kv_heads)),
                       splits_of(seen_by_range(sequence, first, last)),
                       static_cast<int32_t>(plan_.stored.size()),
                       0};
        for (const Grouped& grouped : mine) plan_.stored.push_back(grouped.states);
        split_up(strip);
        strip.num_stored = static_cast<int32_t>(plan_.stored.size()) - strip.first_stored;
        plan_.strips.push_back(strip);
        note_rows(strip.num_tokens, strip.kv_head_end - strip.kv_head_begin);
      }
    }
  }

  // Has parts of a strip computed beforehand when the strip alone would outlast all others.
  void split_up(const Strip& strip) {
    if (num_threads_ == 1) return;
    const int32_t first_own = static_cast<int32_t>(plan_.stored.size());
    const auto is_stored = [&](int32_t split) {
      for (int32_t i = strip.first_stored; i < first_own; ++i) {
        const SplitRange& range = plan_.stored[i].splits;
        if (range.begin <= split && split < range.end) return true;
      }
      return false;
    };
    int32_t num_own = 0;
    for (int32_t split = strip.splits.begin; split < strip.splits.end; ++split) {
      num_own += !is_stored(split);
    }
    const int64_t heads = strip.kv_head_end - strip.kv_head_begin;
    const int64_t per_split = work(strip.num_tokens, heads, kSplitTokens);
    const int64_t target = std::max(total_work_ / (4 * num_threads_), kWorkPerThread / 2);
    const int64_t per_piece = std::max<int64_t>(1, target / per_split);
    if (num_own < 2 * per_piece) return;
    const int64_t rows = heads * strip.num_tokens * group_;
    const int64_t head_rows = int64_t{strip.num_tokens} * group_;
    if (plan_.num_state_floats + num_own * rows * stride_ > kMaxStateFloats) return;
    int64_t first_token = -1;
    for (int32_t split = strip.splits.begin; split < strip.splits.end;) {
      if (is_stored(split)) {
        ++split;
        continue;
      }
      // Only the first splits that a row sees may be folded before they are stored.
      int32_t end = split + 1;
      if (split == strip.splits.begin) {
        while (end < split + per_piece && end < strip.splits.end && !is_stored(end)) ++end;
      }
      if (first_token < 0) {
        first_token = static_cast<int64_t>(plan_.tokens.size());
        for (int32_t t = 0; t < strip.num_tokens; ++t) {
          plan_.tokens.push_back({strip.sequence, strip.first_token + t});
        }
      }
      const int64_t first_float = plan_.num_state_floats;
      plan_.num_state_floats += rows * stride_;
      plan_.stored.push_back({{split, end},
                              -(strip.kv_head_begin * head_rows + strip.first_token * group_),
                              head_rows,
                              first_float});
      add_shared({first_token,
                  strip.num_tokens,
                  strip.kv_head_begin,
                  strip.kv_head_end,
                  {split, end},
                  first_float});
      split = end;
    }
    std::sort(plan_.stored.begin() + strip.first_stored, plan_.stored.end(),
              [](const StoredStates& a, const StoredStates& b) {
                return a.splits.begin < b.splits.begin;
              });
  }

  const AttentionParams& p_;
  Plan& plan_;
  int64_t group_, stride_;
  int num_threads_;
  int64_t total_work_ = 0;
  int64_t num_units_ = 0;  // tiles of one split, of all KV heads
};

}  // namespace

StateLayout state_layout(int32_t head_dim) {
  const int32_t acc_floats = static_cast<int32_t>(ceil_div(head_dim, 16) * 16);
  return {acc_floats, acc_floats + kAccPadding};
}

Seen seen_by(const AttentionParams& p, const NewToken& token) {
  const int64_t seq_len = p.seq_lens[token.sequence];
  if (seq_len == 0) return {0, 0};
  const int64_t num_new =
      int64_t{p.query_start_loc[token.sequence + 1]} - p.query_start_loc[token.sequence];
  const int64_t position = seq_len - num_new + token.index;
  int64_t end = seq_len;
  if (p.causal) {
    end = position + 1;
  } else if (p.window != 0) {
    end = std::min(end, position + p.window);
  }
  return {first_seen(p, position), end};
}

void make_plan(const AttentionParams& params, int num_threads, Plan& plan) {
  Planner(params, num_threads, plan).run();
}

}  // namespace pagedkv::cpu
