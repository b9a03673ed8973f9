// merge_attention_states: partial results over disjoint keys into one.

#include <algorithm>

#include "attention_plan.h"
#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "thread_pool.h"
#include "work_memory.h"

namespace pagedkv::cpu {

void merge_attention_states(const Isa& isa, const MergeStatesParams& p, int num_threads) {
  constexpr int64_t kNumbersPerThread = 64 << 10;
  constexpr int64_t kTokensPerPiece = 16;
  const int64_t size = p.dtype == DType::Float32 ? 4 : 2;
  const int64_t numbers = p.num_states * p.num_tokens * p.num_heads * p.head_dim;
  const int64_t threads = std::min<int64_t>(num_threads, 1 + numbers / kNumbersPerThread);
  const int64_t num_pieces = (p.num_tokens + kTokensPerPiece - 1) / kTokensPerPiece;
  ThreadPool::run(static_cast<int>(threads), num_pieces, [&](int64_t piece) {
    auto* scratch =
        reinterpret_cast<float*>(work_memory(state_layout(p.head_dim).acc_floats * sizeof(float)));
    const int64_t end = std::min(p.num_tokens, (piece + 1) * kTokensPerPiece);
    for (int64_t token = piece * kTokensPerPiece; token < end; ++token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t first = token * p.outs_token_stride + head * p.outs_head_stride;
        MergeRow row = {};
        row.outs = static_cast<const char*>(p.outs) + first * size;
        row.state_stride = p.outs_state_stride;
        row.lses = p.lses + token * p.lses_token_stride + head * p.lses_head_stride;
        row.lse_state_stride = p.lses_state_stride;
        row.num_states = p.num_states;
        row.out = static_cast<char*>(p.out.data) +
                  (token * p.out.token_stride + head * p.out.head_stride) * size;
        if (p.lse) row.lse = p.lse + token * p.lse_token_stride + head * p.lse_head_stride;
        row.head_dim = p.head_dim;
        isa.kernels->merge_row(row, p.dtype, scratch);
      }
    }
  });
}

}  // namespace pagedkv::cpu
