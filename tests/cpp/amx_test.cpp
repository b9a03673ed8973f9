// Attention in tile registers: on the processor's where it has some, else on the model of them.

#include <cstdio>
#include <string>

#include "check.h"
#include "tile_world.h"

namespace pagedkv::testing {
namespace {

const TileKernels& tiles() {
  const TileKernels* processors = processor_tiles();
  return processors ? *processors : model_tiles;
}

const std::vector<TileOptions>& worlds() {
  static const std::vector<TileOptions> all = [] {
    std::vector<TileOptions> worlds = {
        {.num_heads = 4,
         .num_kv_heads = 1,
         .head_dim = 128,
         .block_size = 16,
         .seq_len = 70,
         .num_tokens = 11},
        {.num_heads = 9,
         .num_kv_heads = 3,
         .head_dim = 64,
         .block_size = 32,
         .seq_len = 512,
         .num_tokens = 5},
        {.num_heads = 3,
         .num_kv_heads = 3,
         .head_dim = 32,
         .block_size = 8,
         .seq_len = 45,
         .num_tokens = 45},
        {.num_heads = 14,
         .num_kv_heads = 2,
         .head_dim = 96,
         .block_size = 64,
         .seq_len = 130,
         .num_tokens = 3},
        {.num_heads = 12,
         .num_kv_heads = 1,
         .head_dim = 32,
         .block_size = 16,
         .seq_len = 33,
         .num_tokens = 6},
        {.num_heads = 1,
         .num_kv_heads = 1,
         .head_dim = 256,
         .block_size = 16,
         .seq_len = 17,
         .num_tokens = 17},
        {.num_heads = 2,
         .num_kv_heads = 1,
         .head_dim = 64,
         .block_size = 128,
         .seq_len = 1,
         .num_tokens = 1},
    };
    TileOptions base = {.num_heads = 8,
                        .num_kv_heads = 2,
                        .head_dim = 64,
                        .block_size = 16,
                        .seq_len = 150,
                        .num_tokens = 21};
    const auto with = [&](auto change) {
      worlds.push_back(base);
      change(worlds.back());
    };
    with([](TileOptions& o) { o.causal = false; });
    with([](TileOptions& o) { o.window = 40; });
    with([](TileOptions& o) { o.window = 1; });
    with([](TileOptions& o) { o.causal = false, o.window = 5; });
    with([](TileOptions& o) { o.soft_cap = 2; });
    with([](TileOptions& o) { o.alibi = true; });
    with([](TileOptions& o) { o.bool_mask = true; });
    with([](TileOptions& o) { o.float_mask = true; });
    with([](TileOptions& o) {
      o.causal = false, o.bool_mask = true, o.seq_len = 37, o.num_tokens = 37;
    });
    with([](TileOptions& o) { o.seq_len = 700; });
    return worlds;
  }();
  return all;
}

int64_t num_splits(const TileWorld& world) {
  return (world.o.seq_len + kSplitTokens - 1) / kSplitTokens;
}

/// What attention is, in double; the output of one row and its log of the sum of exponentials.
std::pair<std::vector<double>, double> defined(TileWorld& world, int32_t token, int32_t head) {
  const TileOptions& o = world.o;
  const int32_t kv_head = head / world.group();
  const uint16_t* query = world.queries.data() + (int64_t{token} * o.num_heads + head) * o.head_dim;
  std::vector<double> logits(o.seq_len, -INFINITY), out(o.head_dim);
  double max = -INFINITY, sum = 0;
  for (int32_t position = 0; position < o.seq_len; ++position) {
    if (!world.sees(token, position)) continue;
    double x = 0;
    const uint16_t* key = world.key(position) + kv_head * o.head_dim;
    for (int32_t d = 0; d < o.head_dim; ++d)
      x += double{from_bfloat16(query[d])} * from_bfloat16(key[d]);
    x *= world.params.scale;
    if (o.soft_cap != 0) x = o.soft_cap * std::tanh(x / o.soft_cap);
    if (o.alibi) x += world.slopes[head] * (position - (world.first_new() + token));
    if (o.float_mask && position >= world.first_new()) {
      x += world.floats[token * o.num_tokens + position - world.first_new()];
    }
    logits[position] = x;
    max = std::max(max, x);
  }
  for (int32_t position = 0; position < o.seq_len; ++position) {
    if (std::isinf(logits[position])) continue;
    const double weight = std::exp(logits[position] - max);
    const uint16_t* value = world.value(position) + kv_head * o.head_dim;
    for (int32_t d = 0; d < o.head_dim; ++d) out[d] += weight * from_bfloat16(value[d]);
    sum += weight;
  }
  for (double& number : out) number /= sum;
  return {out, max + std::log(sum)};
}

TEST(attention_in_tiles_is_what_the_definition_says) {
  for (const TileOptions& options : worlds()) {
    TileWorld world(options, 1);
    const TileOptions& o = world.o;
    std::vector<cpu::TileToken> tokens;
    for (int32_t i = 0; i < o.num_tokens; ++i) tokens.push_back(world.tile_token(i, 0));
    std::vector<float> states = world.states(*tiles().kernels, 0, 0, o.num_tokens);
    for (int64_t split = 1; split < num_splits(world); ++split) {
      const std::vector<float> more = world.states(*tiles().kernels, split, 0, o.num_tokens);
      tiles().kernels->fold(states.data(), more.data(), int64_t{o.num_heads} * o.num_tokens,
                            {o.head_dim, static_cast<int32_t>(world.stride())});
    }
    std::vector<uint16_t> out(world.queries.size());
    std::vector<float> lse(o.num_tokens * o.num_heads);
    world.params.out = {out.data(), world.params.query.token_stride,
                        world.params.query.head_stride};
    world.params.lse = lse.data();
    world.params.lse_token_stride = o.num_heads;
    world.params.lse_head_stride = 1;
    tiles().kernels->finish(
        {&world.params, 0, o.num_kv_heads, tokens.data(), o.num_tokens, states.data()});
    for (int32_t row = 0; row < o.num_tokens * o.num_heads; ++row) {
      const auto [expected, expected_lse] = defined(world, row / o.num_heads, row % o.num_heads);
      if (std::isinf(expected_lse)) {
        CHECK(std::isinf(lse[row]));
        continue;
      }
      CHECK(std::abs(lse[row] - expected_lse) < 1e-5 * (1 + std::abs(expected_lse)));
      double error = 0, size = 0;
      for (int32_t d = 0; d < o.head_dim; ++d) {
        const double found = from_bfloat16(out[int64_t{row} * o.head_dim + d]);
        error += (found - expected[d]) * (found - expected[d]);
        size += expected[d] * expected[d];
      }
      CHECK(error < 25e-6 * size);  // numbers of 8 bits: of weights and of the result
    }
  }
}

void check_same_bits(const TileWorld& world, const std::vector<float>& all,
                     const std::vector<float>& part, int32_t first, int32_t last) {
  for (int32_t token = first; token < last; ++token) {
    for (int32_t head = 0; head < world.o.num_heads; ++head) {
      CHECK(world.row(all, world.o.num_tokens, token, head) ==
            world.row(part, last - first, token - first, head));
    }
  }
}

TEST(a_row_in_tiles_has_the_same_bits_whatever_rows_are_beside_it) {
  for (const TileOptions& options : worlds()) {
    TileWorld world(options, 2);
    for (int64_t split = 0; split < num_splits(world); ++split) {
      const std::vector<float> all = world.states(*tiles().kernels, split, 0, world.o.num_tokens);
      for (int32_t count : {1, 2, 7}) {
        for (int32_t first = 0; first < world.o.num_tokens; first += count) {
          const int32_t last = std::min(first + count, world.o.num_tokens);
          check_same_bits(world, all, world.states(*tiles().kernels, split, first, last), first,
                          last);
        }
      }
    }
  }
}

TEST(tiny_and_zero_numbers_have_the_same_bits_whatever_rows_are_beside_them) {
  TileWorld world({.num_heads = 4,
                   .num_kv_heads = 1,
                   .head_dim = 64,
                   .block_size = 16,
                   .seq_len = 60,
                   .num_tokens = 12},
                  3);
  for (uint16_t& number :
       world.values) {  // from subnormal to a few times the smallest normal number
    const uint16_t tiny =
        static_cast<uint16_t>(world.random.below(0x240) | (world.random.below(2) << 15));
    if (number != kBFloat16NaN) number = world.random.one_in(4) ? tiny & 0x8000 : tiny;
  }
  const std::vector<float> all = world.states(*tiles().kernels, 0, 0, 12);
  for (int32_t token = 0; token < 12; ++token) {
    check_same_bits(world, all, world.states(*tiles().kernels, 0, token, token + 1), token,
                    token + 1);
  }
  for (float number : all) CHECK(std::fpclassify(number) != FP_SUBNORMAL);
}

TEST(what_only_other_tokens_see_reaches_no_row) {
  for (const TileOptions& options : worlds()) {
    TileWorld clean(options, 4), spoilt(options, 4);
    for (int32_t position = clean.first_new(); position < options.seq_len; ++position) {
      const int32_t at = position % options.head_dim;
      spoilt.value(position)[at] = position % 2 ? kBFloat16NaN : kBFloat16Infinity;
      spoilt.key(position)[at] = position % 3 ? kBFloat16NaN : kBFloat16Infinity;
    }
    for (int64_t split = 0; split < num_splits(clean); ++split) {
      const std::vector<float> expected =
          clean.states(*tiles().kernels, split, 0, options.num_tokens);
      const std::vector<float> found =
          spoilt.states(*tiles().kernels, split, 0, options.num_tokens);
      for (int32_t token = 0; token < options.num_tokens; ++token) {
        bool sees_spoilt = false;
        for (int32_t i = clean.first_new(); i < options.seq_len; ++i)
          sees_spoilt |= clean.sees(token, i);
        if (sees_spoilt) continue;
        for (int32_t head = 0; head < options.num_heads; ++head) {
          CHECK(clean.row(expected, options.num_tokens, token, head) ==
                spoilt.row(found, options.num_tokens, token, head));
        }
      }
    }
  }
}

TEST(an_infinite_value_makes_only_its_own_dimension_infinite) {
  for (int32_t num_tokens : {1, 12}) {
    TileWorld world({.num_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 64,
                     .block_size = 16,
                     .seq_len = 50,
                     .num_tokens = num_tokens},
                    5);
    world.value(20)[7] = kBFloat16Infinity;
    const std::vector<float> states = world.states(*tiles().kernels, 0, 0, num_tokens);
    for (int64_t row = 0; row < int64_t{4} * num_tokens; ++row) {
      int num_infinite = 0;
      for (int32_t d = 0; d < 64; ++d) {
        const float number = states[row * world.stride() + d];
        CHECK(!std::isnan(number));
        num_infinite += std::isinf(number);
      }
      CHECK(num_infinite == (row < 2 * num_tokens));  // the rows of KV head 0
    }
  }
}

TEST(the_processors_tiles_give_the_models_bits) {
  const TileKernels* tiles = processor_tiles();
  if (tiles == nullptr) return;
  Random random(6);
  for (int round = 0; round < 40; ++round) {
    alignas(64) uint16_t a[512], b[512];
    alignas(64) float c[256], expected[256];
    for (int i = 0; i < 512; ++i) {
      // Every exponent; then those around where products become subnormal; then subnormal numbers.
      const auto any = [&](uint64_t base, uint64_t range) {
        return static_cast<uint16_t>(((base + random.below(range)) << 7) | random.below(128) |
                                     (random.below(2) << 15));
      };
      a[i] = round % 4 == 0 ? any(90, 80) : round % 4 == 1 ? any(60, 8) : any(0, 128);
      b[i] = round % 4 == 0 ? any(90, 80) : round % 4 == 1 ? any(60, 8) : any(0, 128);
    }
    for (int i = 0; i < 256; ++i) {
      c[i] = expected[i] = std::bit_cast<float>(static_cast<uint32_t>(
          round % 2 ? random.below(0x03000000) : (100u << 23) + random.below(0x10000000)));
    }
    model_tiles.dot(a, b, expected);
    tiles->dot(a, b, c);
    CHECK(std::memcmp(c, expected, sizeof c) == 0);
  }
  std::fprintf(stderr, "  on the processor's tile registers\n");
}

TEST(the_processors_tiles_give_the_models_states) {
  if (processor_tiles() == nullptr) return;
  TileWorld world({.num_heads = 8,
                   .num_kv_heads = 2,
                   .head_dim = 64,
                   .block_size = 16,
                   .seq_len = 90,
                   .num_tokens = 5},
                  7);
  for (int32_t count : {1, 5}) {
    const std::vector<float> found = world.states(*tiles().kernels, 0, 0, count);
    const std::vector<float> expected = world.states(*model_tiles.kernels, 0, 0, count);
    for (int32_t token = 0; token < count; ++token) {
      for (int32_t head = 0; head < 8; ++head) {
        CHECK(world.row(found, count, token, head) == world.row(expected, count, token, head));
      }
    }
  }
}

TEST(a_chain_of_the_model_rounds_once_a_step_and_flushes_what_is_subnormal) {
  alignas(64) uint16_t a[512] = {}, b[512] = {};
  alignas(64) float c[256] = {};
  const auto put = [](uint16_t* tile, int row, int pair, float first, float second) {
    tile[row * 32 + 2 * pair] = to_bfloat16(first);
    tile[row * 32 + 2 * pair + 1] = to_bfloat16(second);
  };
  // Row 0: 1 + 2^-24 is a tie to 1; the other chain keeps 2^-24, and a second one makes it 2^-23,
  // so that both chains together are 1 + 2^-23. A single chain would have dropped every one of
  // them.
  put(a, 0, 0, 1, 0x1p-12f), put(b, 0, 0, 1, 0x1p-12f);
  put(a, 0, 1, 0x1p-12f, 0x1p-12f), put(b, 1, 0, 0x1p-12f, 0x1p-12f);
  // Row 1: a product below the normal numbers is lost, though its sum with the next one would not
  // be.
  put(a, 1, 0, 0x1p-70f, 0), put(a, 1, 1, 0, 0), put(a, 1, 2, 0x1p-70f, 0);
  b[2 * 16 * 0 + 2] = to_bfloat16(0x1p-57f), b[32 * 2 + 2] = to_bfloat16(0x1p-57f);
  // Row 2: a subnormal number counts as zero.
  a[2 * 32] = 1, b[4] = to_bfloat16(0x1p100f);
  c[2 * 16 + 3] = 0x1p-130f;
  model_tiles.dot(a, b, c);
  CHECK(c[0] == 1.0f + 0x1p-23f);
  CHECK(c[16 + 1] == 0.0f);
  CHECK(c[2 * 16 + 2] == 0.0f);
  CHECK(c[2 * 16 + 3] == 0.0f);
}

}  // namespace
}  // namespace pagedkv::testing
