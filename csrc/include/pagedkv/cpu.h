// The operations over pages on the processor. Each checks the ids, slots and lengths that it is
// given and throws UsageError for the first bad one, before it writes anything.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/dense.h"
#include "pagedkv/kernels.h"

namespace pagedkv::cpu {

struct Kernels;

/// One instruction set.
struct Isa {
  const char* name;
  const Kernels* kernels;
  const char* unavailable;  // why it can't run here; "" when it can
};

/// Every instruction set, the fastest first.
std::span<const Isa> isas();

/// The one of this name, or the fastest that runs here when `name` is empty. Throws UsageError when
/// there is no such one or it can't run here; the message calls the name `what`.
const Isa& find_isa(std::string_view name, std::string_view what);

/// `num_threads` is the most that may work on a call, the caller included.
void write_kv(const Isa& isa, const WriteKvParams& params, int num_threads);
void paged_attention(const Isa& isa, const AttentionParams& params, int num_threads);
void copy_blocks(const Isa& isa, const CopyBlocksParams& params, int num_threads);
void gather_blocks(const Isa& isa, const MoveBlocksParams& params, int num_threads);
void scatter_blocks(const Isa& isa, const MoveBlocksParams& params, int num_threads);
void merge_attention_states(const Isa& isa, const MergeStatesParams& params, int num_threads);

// What a decoder computes between two calls of attention. Nothing is checked. The result for a
// token depends neither on the other tokens nor on the number of threads.
void multiply(const Isa& isa, const ProductParams& params, int num_threads);
/// Whether multiply_pairs() works; the others always do.
bool has_pairs(const Isa& isa);
/// Lays weights [num_out, num_in] of bfloat16 out for multiply_pairs(); surplus outputs become 0.
void pack_pairs(const uint16_t* weights, int64_t num_out, int64_t num_in, uint16_t* packed);
void multiply_pairs(const Isa& isa, const PairProductParams& params, int num_threads);
void normalise(const Isa& isa, const NormParams& params, int num_threads);
void rotate(const Isa& isa, const RotateParams& params, int num_threads);
void gate(const Isa& isa, const GateParams& params, int num_threads);

}  // namespace pagedkv::cpu
