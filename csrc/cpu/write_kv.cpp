// write_kv: new tokens into their slots.

#include <algorithm>
#include <cstring>
#include <string>

#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"
#include "thread_pool.h"

namespace pagedkv::cpu {
namespace {

constexpr int64_t kBytesPerThread = 256 << 10;

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return 4;
    case DType::BFloat16:
    case DType::Float16:
      return 2;
    default:
      return 1;
  }
}

void check_slots(const WriteKvParams& p) {
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    const int64_t slot = p.slot_mapping[i];
    if (slot >= -1 && slot < num_slots) continue;
    throw UsageError("slot_mapping: expected slots from -1 to " + std::to_string(num_slots - 1) +
                     ", got " + std::to_string(slot) + ", in write_kv");
  }
}

void copy_rows(const WriteRows& rows, int64_t size) {
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    std::memcpy(static_cast<char*>(rows.pages) + head * rows.pages_head_stride * size,
                static_cast<const char*>(rows.tokens) + head * rows.tokens_head_stride * size,
                rows.head_dim * size);
  }
}

// Writes some heads of every token, in the order of the tokens: the last of equal slots stays.
void write_heads(const Kernels& kernels, const WriteKvParams& p, bool is_value, int32_t head_begin,
                 int32_t head_end) {
  const TokensView& tokens = is_value ? p.value : p.key;
  const PagesView& pages = is_value ? p.value_pages : p.key_pages;
  const ScalesView& scales = is_value ? p.value_scales : p.key_scales;
  const int64_t token_size = size_of(p.token_dtype), page_size = size_of(p.page_dtype);
  WriteRows rows = {};
  rows.tokens_head_stride = tokens.head_stride;
  rows.pages_head_stride = pages.head_stride;
  rows.scales_head_stride = scales.head_stride;
  rows.computes_scales = scales.token_stride != 0;
  rows.num_heads = head_end - head_begin;
  rows.head_dim = p.head_dim;
  // Tokens of the pages' own format are stored as they are, scales or not. Heads that lie side by
  // side on both sides are then one.
  const bool is_copy = p.token_dtype == p.page_dtype;
  if (is_copy && tokens.head_stride == p.head_dim && pages.head_stride == p.head_dim) {
    rows.head_dim *= rows.num_heads;
    rows.num_heads = 1;
  }
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    const int64_t slot = p.slot_mapping[i];
    if (slot < 0) continue;
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    rows.tokens = static_cast<const char*>(tokens.data) +
                  (i * tokens.token_stride + head_begin * tokens.head_stride) * token_size;
    rows.pages =
        static_cast<char*>(pages.data) + (block * pages.block_stride + offset * pages.token_stride +
                                          head_begin * pages.head_stride) *
                                             page_size;
    if (is_copy) {
      copy_rows(rows, page_size);
      continue;
    }
    if (scales.data != nullptr) {
      rows.scales = scales.data + block * scales.block_stride + offset * scales.token_stride +
                    head_begin * scales.head_stride;
    }
    kernels.quantise_rows(rows, p.token_dtype, p.page_dtype);
  }
}

}  // namespace

void write_kv(const Isa& isa, const WriteKvParams& p, int num_threads) {
  check_slots(p);
  const int64_t bytes = 2 * p.num_tokens * p.num_kv_heads * p.head_dim * size_of(p.token_dtype);
  const int64_t threads = std::min<int64_t>(num_threads, 1 + bytes / kBytesPerThread);
  // Half of the pieces are keys, half values.
  const int64_t parts = std::min<int64_t>((threads + 1) / 2, p.num_kv_heads);
  ThreadPool::run(static_cast<int>(threads), 2 * parts, [&](int64_t piece) {
    const int64_t part = piece % parts;
    write_heads(*isa.kernels, p, piece >= parts,
                static_cast<int32_t>(part * p.num_kv_heads / parts),
                static_cast<int32_t>((part + 1) * p.num_kv_heads / parts));
  });
}

}  // namespace pagedkv::cpu
