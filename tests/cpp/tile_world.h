// Pages, queries and options for the kernels that compute one tile, made up at random.

#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "random.h"
#include "tile_kernels.h"

namespace pagedkv::testing {

constexpr uint16_t kBFloat16NaN = 0x7fc0, kBFloat16Infinity = 0x7f80;

inline float from_bfloat16(uint16_t number) { return std::bit_cast<float>(uint32_t{number} << 16); }
inline uint16_t to_bfloat16(float number) {
  const uint32_t word = std::bit_cast<uint32_t>(number);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

struct TileOptions {
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t seq_len, num_tokens;  // the tokens are the last of the sequence
  bool causal = true;
  int32_t window = 0;
  float soft_cap = 0;
  bool alibi = false, bool_mask = false, float_mask = false;
};

/// One sequence. Slots that no token sees hold NaN.
class TileWorld {
 public:
  TileWorld(const TileOptions& options, uint64_t seed) : o(options), random(seed) {
    const int64_t blocks = (o.seq_len + o.block_size - 1) / o.block_size,
                  num_blocks = 2 * blocks + 1;
    const int64_t token_numbers = int64_t{o.num_kv_heads} * o.head_dim;
    keys.assign(num_blocks * o.block_size * token_numbers, kBFloat16NaN);
    values = keys;
    for (int64_t i = 0; i < blocks; ++i)
      table.push_back(static_cast<int32_t>(2 * i + random.below(2)));
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    for (int32_t position = first_seen(); position < o.seq_len; ++position) {
      for (int64_t i = 0; i < token_numbers; ++i) {
        key(position)[i] = number();
        value(position)[i] = number();
      }
    }
    for (int64_t i = 0; i < o.num_tokens * int64_t{o.num_heads} * o.head_dim; ++i)
      queries.push_back(number());
    for (int32_t i = 0; i < o.num_heads; ++i)
      slopes.push_back(std::exp2(-8.0f * (i + 1) / o.num_heads));
    bools = std::make_unique<bool[]>(o.num_tokens * o.num_tokens);
    for (int32_t i = 0; i < o.num_tokens * o.num_tokens; ++i) {
      bools[i] = !random.one_in(3);
      floats.push_back(random.one_in(4) ? -std::numeric_limits<float>::infinity()
                                        : from_bfloat16(number()));
    }
    fill_params();
  }

  int32_t group() const { return o.num_heads / o.num_kv_heads; }
  int64_t stride() const { return o.head_dim + cpu::kAccPadding; }
  int32_t first_new() const { return o.seq_len - o.num_tokens; }
  uint16_t* key(int32_t position) { return at(keys, position); }
  uint16_t* value(int32_t position) { return at(values, position); }

  bool sees(int32_t token, int32_t position) const {
    const int32_t own = first_new() + token;
    if (o.causal && position > own) return false;
    if (o.window && (position <= own - o.window || position >= own + o.window)) return false;
    if (position < first_new()) return true;
    const int32_t cell = token * o.num_tokens + position - first_new();
    if (o.bool_mask && !bools[cell]) return false;
    return !o.float_mask || !std::isinf(floats[cell]);
  }

  cpu::TileToken tile_token(int32_t token, int64_t split_begin) const {
    const int64_t own = first_new() + token;
    const int64_t begin = o.window ? own - o.window + 1 : 0;
    int64_t end = o.causal ? own + 1 : o.seq_len;
    if (o.window && own + o.window < end) end = own + o.window;
    const auto within = [&](int64_t position) {
      return static_cast<int32_t>(
          std::min(std::max(position - split_begin, int64_t{0}), kSplitTokens));
    };
    const bool has_mask = o.bool_mask || o.float_mask;
    return {token,
            own,
            within(begin),
            within(end),
            has_mask ? within(first_new()) : static_cast<int32_t>(kSplitTokens),
            split_begin - first_new()};
  }

  /// The states of the tokens [first, last), whose rows come head by head.
  std::vector<float> states(const cpu::Kernels& kernels, int64_t split, int32_t first,
                            int32_t last) {
    std::vector<cpu::TileToken> tokens;
    for (int32_t i = first; i < last; ++i) tokens.push_back(tile_token(i, split * kSplitTokens));
    const int32_t rows = o.num_heads * (last - first);
    std::vector<float> states(rows * stride(), std::numeric_limits<float>::quiet_NaN());
    const int64_t bytes = (kernels.scratch_bytes(params, rows) + 63) / 64 * 64;
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    std::memset(scratch.get(), 0xff, bytes);  // NaN
    kernels.attend({&params, table.data(), split * kSplitTokens, o.seq_len, 0, o.num_kv_heads,
                    tokens.data(), last - first, states.data()},
                   scratch.get());
    return states;
  }

  /// The state of one row, as bits; the same numbers for every row that sees nothing.
  std::vector<uint32_t> row(const std::vector<float>& states, int32_t num_tokens, int32_t token,
                            int32_t head) const {
    const int64_t row = (head / group() * int64_t{num_tokens} + token) * group() + head % group();
    const float* state = states.data() + row * stride();
    if (std::isinf(state[o.head_dim])) return {0};
    std::vector<uint32_t> bits(o.head_dim + 2);
    std::memcpy(bits.data(), state, bits.size() * sizeof(uint32_t));
    return bits;
  }

  const TileOptions o;
  Random random;
  std::vector<uint16_t> keys, values, queries;
  std::vector<int32_t> table;
  std::vector<float> slopes, floats;
  std::unique_ptr<bool[]> bools;
  AttentionParams params = {};

 private:
  int32_t first_seen() const { return o.window ? std::max(0, first_new() - o.window + 1) : 0; }

  uint16_t number() {
    return to_bfloat16((static_cast<float>(random.below(4096)) - 2048.0f) / 1024.0f);
  }

  uint16_t* at(std::vector<uint16_t>& pages, int32_t position) {
    const int64_t slot =
        int64_t{table[position / o.block_size]} * o.block_size + position % o.block_size;
    return pages.data() + slot * o.num_kv_heads * o.head_dim;
  }

  void fill_params() {
    const int64_t head_stride = o.head_dim, token_stride = o.num_kv_heads * head_stride;
    params.query = {queries.data(), o.num_heads * head_stride, head_stride};
    params.key_pages = {keys.data(), o.block_size * token_stride, token_stride, head_stride};
    params.value_pages = {values.data(), o.block_size * token_stride, token_stride, head_stride};
    params.block_table = table.data();
    params.alibi_slopes = o.alibi ? slopes.data() : nullptr;
    params.bool_mask = o.bool_mask ? bools.get() : nullptr;
    params.float_mask = o.float_mask ? floats.data() : nullptr;
    params.mask_stride = o.num_tokens;
    params.num_heads = o.num_heads;
    params.num_kv_heads = o.num_kv_heads;
    params.head_dim = o.head_dim;
    params.block_size = o.block_size;
    params.scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim));
    params.soft_cap = o.soft_cap;
    params.window = o.window;
    params.causal = o.causal;
    params.query_dtype = params.page_dtype = DType::BFloat16;
  }
};

}  // namespace pagedkv::testing
