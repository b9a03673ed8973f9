// What the drivers in this folder ask of one instruction set.
//
// A driver splits the work, keeps the states and runs the threads; a kernel computes one piece of
// it and knows neither threads nor Python. Each instruction set fills one `Kernels`, in a file
// compiled with flags of its own, so this header holds declarations only: an inline function here
// would be compiled once with AVX and once without, and the linker would keep either for both.

#pragma once

#include <cstdint>

#include "pagedkv/dense.h"
#include "pagedkv/kernels.h"

namespace pagedkv::cpu {

/// One query token of a tile and what it sees of the tile's split.
struct TileToken {
  int64_t token;     // row of `query`
  int64_t position;  // of the token in its sequence
  // Visible keys, as offsets [begin, end) into the split; empty when begin >= end.
  int32_t begin, end;
  // Keys from this offset on have a column in the mask: offset k stands in column k + mask_shift.
  int32_t mask_begin;
  int64_t mask_shift;
};

/// The states of some query rows over one split of kSplitTokens keys.
///
/// A row is a (kv head, token, query head of the kv head's group), in this order, the last fastest.
/// A row's state is `acc_stride` numbers and then the largest logit and the sum of the exponentials
/// relative to it; a largest logit of -inf says that the row sees nothing, and its other numbers
/// may then be anything. In which order the numbers of `acc` stand for head_dim is the kernels'
/// affair.
struct SplitTile {
  const AttentionParams* params;
  const int32_t* pages;  // the row of the block table
  int64_t split_begin;   // position of the split's first key
  int64_t prefetch_end;  // pages may be fetched ahead up to this position
  int32_t kv_head_begin, kv_head_end;
  const TileToken* tokens;
  int32_t num_tokens;
  float* states;
};

/// Numbers of a row's state: those of `acc`, padded to whole registers, then max, sum and padding.
constexpr int32_t kAccPadding = 16;
struct StateLayout {
  int32_t acc_floats, stride_floats;
};

/// Rows of finished states on their way into `out` and `lse`.
struct FinishRows {
  const AttentionParams* params;
  int32_t kv_head_begin, kv_head_end;
  const TileToken* tokens;
  int32_t num_tokens;
  const float* states;
};

/// `num_heads` rows of head_dim numbers on their way into pages, for one token.
struct WriteRows {
  const void* tokens;
  int64_t tokens_head_stride;
  void* pages;
  int64_t pages_head_stride;
  float* scales;  // of the token's first head; null when there are none
  int64_t scales_head_stride;
  bool computes_scales;
  int32_t num_heads, head_dim;
};

/// One (token, head) of merge_attention_states.
struct MergeRow {
  const void* outs;  // of the first state; the next ones lie `state_stride` elements on
  int64_t state_stride;
  const float* lses;
  int64_t lse_state_stride;
  int64_t num_states;
  void* out;
  float* lse;  // optional
  int32_t head_dim;
};

/// Some rows of weights and all tokens of a product.
struct ProductTile {
  const float* x;  // [num_tokens, num_in], padded with zeros to whole registers
  int64_t x_stride, num_tokens, num_in;
  const void* weights;
  DType weight_dtype;
  int64_t row_begin, row_end;
  const float *scales, *bias;  // each optional
  void* out;
  int64_t out_stride;
  bool out_is_bfloat16;
};

/// What a decoder needs besides attention; ranges are of rows or tokens.
struct DenseKernels {
  void (*multiply)(const ProductTile& tile);
  void (*widen)(const void* from, float* to, int64_t count);  // bfloat16 to float32
  void (*normalise)(const NormParams& params, int64_t begin, int64_t end);
  void (*rotate)(const RotateParams& params, int64_t begin, int64_t end);
  void (*gate)(const GateParams& params, int64_t begin, int64_t end);
  /// Tokens [begin, end) by the panels [first, last); null where there are no such instructions.
  void (*multiply_pairs)(const PairProductParams& params, int64_t first, int64_t last,
                         int64_t begin, int64_t end);
};

/// Copies of more than this much in all would push everything else out of the caches, and reading
/// what is only to be overwritten costs bandwidth.
constexpr int64_t kStreamingBytes = 4 << 20;

struct Kernels {
  /// Bytes of working memory that `attend` needs for tiles up to this size.
  int64_t (*scratch_bytes)(const AttentionParams& params, int32_t num_rows);
  void (*attend)(const SplitTile& tile, void* scratch);
  /// Folds the states of later keys into those of earlier ones.
  void (*fold)(float* into, const float* from, int64_t num_rows, StateLayout layout);
  void (*finish)(const FinishRows& rows);
  void (*quantise_rows)(const WriteRows& rows, DType token_dtype, DType page_dtype);
  void (*merge_row)(const MergeRow& row, DType dtype, float* scratch);
  /// Copies past the caches; for more than kStreamingBytes.
  void (*copy_streaming)(void* destination, const void* source, int64_t num_bytes);
  const DenseKernels* dense;
};

// Null where the compiler's target has no such instructions.
namespace portable {
extern const Kernels* const kernels;
}
namespace neon {
extern const Kernels* const kernels;
}
namespace avx2 {
extern const Kernels* const kernels;
}
namespace avx512 {
extern const Kernels* const kernels;
}
namespace avx512_bf16 {
extern const Kernels* const kernels;
}
namespace amx {
extern const Kernels* const kernels;
}

}  // namespace pagedkv::cpu
