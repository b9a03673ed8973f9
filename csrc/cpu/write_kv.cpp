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

// Writes some heads of every token, in the order of the tokens: the last of equal slots stays.
class HeadWriter {
 public:
  HeadWriter(const Kernels& kernels, const WriteKvParams& p, bool is_value, int32_t head_begin,
             int32_t head_end)
      : kernels_(kernels),
        p_(p),
        tokens_(is_value ? p.value : p.key),
        pages_(is_value ? p.value_pages : p.key_pages),
        scales_(is_value ? p.value_scales : p.key_scales),
        head_begin_(head_begin) {
    rows_.tokens_head_stride = tokens_.head_stride;
    rows_.pages_head_stride = pages_.head_stride;
    rows_.scales_head_stride = scales_.head_stride;
    rows_.computes_scales = scales_.token_stride != 0;
    rows_.num_heads = head_end - head_begin;
    rows_.head_dim = p.head_dim;
  }

  // Tokens of the pages' own format are stored as they are, scales or not.
  void copy(bool is_streamed) {
    // Heads that lie side by side on both sides are one, and so are the tokens of a block then.
    if (tokens_.head_stride == p_.head_dim && pages_.head_stride == p_.head_dim) {
      rows_.head_dim *= rows_.num_heads;
      rows_.num_heads = 1;
    }
    const bool is_dense = rows_.num_heads == 1 && tokens_.token_stride == rows_.head_dim &&
                          pages_.token_stride == rows_.head_dim;
    const int64_t size = size_of(p_.page_dtype), row_bytes = rows_.head_dim * size;
    for (int64_t i = 0, count; i < p_.num_tokens; i += count) {
      count = is_dense ? consecutive_slots(i) : 1;
      if (p_.slot_mapping[i] < 0) continue;
      find_rows(i);
      for (int64_t head = 0; head < rows_.num_heads; ++head) {
        void* to = static_cast<char*>(rows_.pages) + head * rows_.pages_head_stride * size;
        const void* from =
            static_cast<const char*>(rows_.tokens) + head * rows_.tokens_head_stride * size;
        if (is_streamed) {
          kernels_.copy_streaming(to, from, count * row_bytes);
        } else {
          std::memcpy(to, from, count * row_bytes);
        }
      }
    }
  }

  void quantise() {
    for (int64_t i = 0; i < p_.num_tokens; ++i) {
      if (p_.slot_mapping[i] < 0) continue;
      find_rows(i);
      kernels_.quantise_rows(rows_, p_.token_dtype, p_.page_dtype);
    }
  }

 private:
  // How many tokens from this one on go into one block, one after the other.
  int64_t consecutive_slots(int64_t first) const {
    const int64_t slot = p_.slot_mapping[first];
    if (slot < 0) return 1;
    const int64_t most = std::min(p_.num_tokens - first, p_.block_size - slot % p_.block_size);
    int64_t count = 1;
    while (count < most && p_.slot_mapping[first + count] == slot + count) ++count;
    return count;
  }

  void find_rows(int64_t token) {
    const int64_t slot = p_.slot_mapping[token];
    const int64_t block = slot / p_.block_size, offset = slot % p_.block_size;
    rows_.tokens = static_cast<const char*>(tokens_.data) +
                   (token * tokens_.token_stride + head_begin_ * tokens_.head_stride) *
                       size_of(p_.token_dtype);
    rows_.pages = static_cast<char*>(pages_.data) +
                  (block * pages_.block_stride + offset * pages_.token_stride +
                   head_begin_ * pages_.head_stride) *
                      size_of(p_.page_dtype);
    if (scales_.data == nullptr) return;
    rows_.scales = scales_.data + block * scales_.block_stride + offset * scales_.token_stride +
                   head_begin_ * scales_.head_stride;
  }

  const Kernels& kernels_;
  const WriteKvParams& p_;
  const TokensView& tokens_;
  const PagesView& pages_;
  const ScalesView& scales_;
  const int64_t head_begin_;
  WriteRows rows_ = {};
};

}  // namespace

void write_kv(const Isa& isa, const WriteKvParams& p, int num_threads) {
  check_slots(p);
  const int64_t bytes = 2 * p.num_tokens * p.num_kv_heads * p.head_dim * size_of(p.token_dtype);
  const int64_t threads = std::min<int64_t>(num_threads, 1 + bytes / kBytesPerThread);
  // Half of the pieces are keys, half values.
  const int64_t parts = std::min<int64_t>((threads + 1) / 2, p.num_kv_heads);
  ThreadPool::run(static_cast<int>(threads), 2 * parts, [&](int64_t piece) {
    const int64_t part = piece % parts;
    HeadWriter writer(*isa.kernels, p, piece >= parts,
                      static_cast<int32_t>(part * p.num_kv_heads / parts),
                      static_cast<int32_t>((part + 1) * p.num_kv_heads / parts));
    if (p.token_dtype == p.page_dtype) {
      writer.copy(bytes > kStreamingBytes);
    } else {
      writer.quantise();
    }
  });
}

}  // namespace pagedkv::cpu
