// paged_attention: carries out the plan on the threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>

#include "attention_checks.h"
#include "attention_plan.h"
#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "thread_pool.h"
#include "work_memory.h"

namespace pagedkv::cpu {
namespace {

class Attention {
 public:
  Attention(const Kernels& kernels, const AttentionParams& params, const Plan& plan, float* states)
      : k_(kernels),
        p_(params),
        plan_(plan),
        states_(states),
        group_(params.num_heads / params.num_kv_heads),
        layout_(state_layout(params.head_dim)),
        scratch_bytes_(kernels.scratch_bytes(params, plan.max_rows)),
        state_bytes_(int64_t{plan.max_rows} * layout_.stride_floats * sizeof(float)),
        num_shared_(static_cast<int64_t>(plan.shared.size())),
        shared_left_(num_shared_) {}

  int64_t num_pieces() const { return num_shared_ + static_cast<int64_t>(plan_.strips.size()); }

  void run(int64_t piece) {
    if (piece < num_shared_) {
      // Counted even if it fails, since others wait for it.
      struct Count {
        std::atomic<int64_t>& left;
        ~Count() { left.fetch_sub(1, std::memory_order_release); }
      } count{shared_left_};
      run_shared(plan_.shared[piece]);
    } else {
      run_strip(plan_.strips[piece - num_shared_]);
    }
  }

 private:
  // What a thread needs to compute tiles.
  struct Work {
    TileToken* tokens;
    void* scratch;
    float *sums, *fresh;  // states of max_rows rows
  };

  Work make_work(int64_t num_tokens) const {
    const int64_t token_bytes = round_to_line(num_tokens * sizeof(TileToken));
    char* memory = work_memory(token_bytes + scratch_bytes_ + 2 * round_to_line(state_bytes_));
    Work work;
    work.tokens = reinterpret_cast<TileToken*>(memory);
    work.scratch = memory + token_bytes;
    work.sums = reinterpret_cast<float*>(memory + token_bytes + scratch_bytes_);
    work.fresh = reinterpret_cast<float*>(memory + token_bytes + scratch_bytes_ +
                                          round_to_line(state_bytes_));
    return work;
  }

  TileToken tile_token(const NewToken& token, int64_t split_begin) const {
    const Seen seen = seen_by(p_, token);
    const int32_t start = p_.query_start_loc[token.sequence];
    const int64_t first_new =
        p_.seq_lens[token.sequence] - (int64_t{p_.query_start_loc[token.sequence + 1]} - start);
    const auto within = [&](int64_t position) {
      return static_cast<int32_t>(std::clamp<int64_t>(position - split_begin, 0, kSplitTokens));
    };
    const bool has_mask = p_.bool_mask || p_.float_mask;
    return {start + token.index,
            first_new + token.index,
            within(seen.begin),
            within(seen.end),
            has_mask ? within(first_new) : static_cast<int32_t>(kSplitTokens),
            split_begin - first_new};
  }

  // Computes the states of the given tokens over one split.
  template <typename TokenAt>
  void attend(int64_t split, int32_t num_tokens, TokenAt token_at, int32_t kv_head_begin,
              int32_t kv_head_end, const Work& work, float* states) const {
    const int64_t split_begin = split * kSplitTokens;
    int64_t end = 0;
    for (int32_t i = 0; i < num_tokens; ++i) {
      const NewToken token = token_at(i);
      work.tokens[i] = tile_token(token, split_begin);
      end = std::max(end, seen_by(p_, token).end);
    }
    const SplitTile tile = {
        &p_,           p_.block_table + token_at(0).sequence * p_.block_table_stride,
        split_begin,   end,
        kv_head_begin, kv_head_end,
        work.tokens,   num_tokens,
        states};
    k_.attend(tile, work.scratch);
  }

  void run_shared(const SharedPiece& piece) const {
    const Work work = make_work(piece.num_tokens);
    const int64_t num_rows =
        int64_t{piece.kv_head_end - piece.kv_head_begin} * piece.num_tokens * group_;
    float* states = states_ + piece.first_float;
    for (int32_t split = piece.splits.begin; split < piece.splits.end; ++split) {
      const bool is_first = split == piece.splits.begin;
      attend(
          split, piece.num_tokens, [&](int32_t i) { return plan_.tokens[piece.first_token + i]; },
          piece.kv_head_begin, piece.kv_head_end, work, is_first ? states : work.fresh);
      if (!is_first) k_.fold(states, work.fresh, num_rows, layout_);
    }
  }

  void run_strip(const Strip& strip) {
    const Work work = make_work(strip.num_tokens);
    const int64_t head_rows = strip.num_tokens * group_;
    const int64_t num_heads = strip.kv_head_end - strip.kv_head_begin;
    const auto token_at = [&](int32_t i) {
      return NewToken{strip.sequence, strip.first_token + i};
    };
    bool is_empty = true;
    int32_t next_stored = strip.first_stored;
    const int32_t end_stored = strip.first_stored + strip.num_stored;
    if (next_stored != end_stored) wait_for_shared();
    for (int32_t split = strip.splits.begin; split < strip.splits.end;) {
      while (next_stored != end_stored && plan_.stored[next_stored].splits.end <= split)
        ++next_stored;
      if (next_stored != end_stored && plan_.stored[next_stored].splits.begin <= split) {
        const StoredStates& stored = plan_.stored[next_stored];
        if (is_empty) clear(work.sums, num_heads * head_rows);
        for (int64_t head = 0; head < num_heads; ++head) {
          const int64_t row = (strip.kv_head_begin + head) * stored.head_rows + stored.first_row +
                              strip.first_token * group_;
          k_.fold(work.sums + head * head_rows * layout_.stride_floats,
                  states_ + stored.first_float + row * layout_.stride_floats, head_rows, layout_);
        }
        split = stored.splits.end;
      } else {
        attend(split, strip.num_tokens, token_at, strip.kv_head_begin, strip.kv_head_end, work,
               is_empty ? work.sums : work.fresh);
        if (!is_empty) k_.fold(work.sums, work.fresh, num_heads * head_rows, layout_);
        ++split;
      }
      is_empty = false;
    }
    if (is_empty) clear(work.sums, num_heads * head_rows);
    if (p_.seq_lens[strip.sequence] == 0) {
      if (strip.kv_head_begin != 0) return;
      clear_tokens(p_.query_start_loc[strip.sequence] + strip.first_token, strip.num_tokens);
      return;
    }
    for (int32_t i = 0; i < strip.num_tokens; ++i) work.tokens[i] = tile_token(token_at(i), 0);
    k_.finish(
        {&p_, strip.kv_head_begin, strip.kv_head_end, work.tokens, strip.num_tokens, work.sums});
  }

  void clear(float* states, int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; ++row) {
      states[row * layout_.stride_floats + layout_.acc_floats] =
          -std::numeric_limits<float>::infinity();
    }
  }

  // They were all begun before any strip that needs them.
  void wait_for_shared() const {
    for (int i = 0; shared_left_.load(std::memory_order_acquire) != 0; ++i) {
      if (i > 100) std::this_thread::yield();
    }
  }

 public:
  // Tokens of padding: zeros that weigh nothing.
  void clear_tokens(int64_t first, int64_t count) const {
    const int64_t size = p_.query_dtype == DType::Float32 ? 4 : 2;
    for (int64_t token = first; token < first + count; ++token) {
      for (int64_t head = 0; head < p_.num_heads; ++head) {
        char* out = static_cast<char*>(p_.out.data) +
                    (token * p_.out.token_stride + head * p_.out.head_stride) * size;
        std::memset(out, 0, p_.head_dim * size);
        if (p_.lse) {
          p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride] =
              -std::numeric_limits<float>::infinity();
        }
      }
    }
  }

 private:
  const Kernels& k_;
  const AttentionParams& p_;
  const Plan& plan_;
  float* const states_;
  const int64_t group_;
  const StateLayout layout_;
  const int64_t scratch_bytes_, state_bytes_;
  const int64_t num_shared_;
  std::atomic<int64_t> shared_left_;
};

}  // namespace

void paged_attention(const Isa& isa, const AttentionParams& params, int num_threads) {
  check_attention(params);
  thread_local Plan plan;
  thread_local WorkMemory states;
  make_plan(params, num_threads, plan);
  Attention attention(
      *isa.kernels, params, plan,
      reinterpret_cast<float*>(states.at_least(plan.num_state_floats * sizeof(float))));
  ThreadPool::run(plan.num_threads, attention.num_pieces(),
                  [&](int64_t piece) { attention.run(piece); });
  const int64_t num_tokens = params.query_start_loc[params.num_seqs];
  attention.clear_tokens(num_tokens, params.num_tokens - num_tokens);
}

}  // namespace pagedkv::cpu
