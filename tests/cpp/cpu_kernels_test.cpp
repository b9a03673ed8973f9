// The CPU kernels on buffers of exactly their size, which sanitizers watch, and on every
// instruction set that runs: against the plain meaning, and against themselves on more threads and
// in groups.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "check.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

struct Shape {
  int32_t num_heads, num_kv_heads, head_dim, block_size;
};

// Without slack at the end, unlike what a vector may have.
template <typename T>
struct Exact {
  explicit Exact(size_t size) : size(size), data(new T[size]()) {}
  T& operator[](size_t i) { return data[i]; }
  size_t size;
  std::unique_ptr<T[]> data;
};

float draw(Random& random) { return (random.byte() - 127.5f) / 64.0f; }

uint16_t to_bfloat16(float number) {
  uint32_t word;
  std::memcpy(&word, &number, 4);
  return static_cast<uint16_t>(word >> 16);
}

float from_bfloat16(uint16_t half) {
  const uint32_t word = uint32_t{half} << 16;
  float number;
  std::memcpy(&number, &word, 4);
  return number;
}

// A batch whose sequences share their first pages.
struct Batch {
  Batch(Shape shape, std::vector<int32_t> lens, std::vector<int32_t> num_new, bool is_bfloat16)
      : shape(shape),
        is_bfloat16(is_bfloat16),
        seq_lens(std::move(lens)),
        max_blocks((*std::max_element(seq_lens.begin(), seq_lens.end()) - 1) / shape.block_size +
                   1),
        num_blocks(max_blocks + 4),
        row(shape.num_kv_heads * shape.head_dim),
        keys(num_blocks * shape.block_size * row),
        values(keys.size),
        keys16(keys.size),
        values16(keys.size),
        table(seq_lens.size() * max_blocks) {
    for (const int32_t count : num_new) starts.push_back(starts.back() + count);
    Random random(7);
    query = std::vector<float>(starts.back() * shape.num_heads * shape.head_dim);
    for (float& number : query) number = from_bfloat16(to_bfloat16(draw(random)));
    for (const float number : query) query16.push_back(to_bfloat16(number));
    for (size_t i = 0; i < keys.size; ++i) {
      keys16[i] = to_bfloat16(draw(random));
      values16[i] = to_bfloat16(draw(random));
      keys[i] = from_bfloat16(keys16[i]);
      values[i] = from_bfloat16(values16[i]);
    }
    for (size_t s = 0; s < seq_lens.size(); ++s) {
      for (int64_t i = 0; i < max_blocks; ++i) {
        table[s * max_blocks + i] = static_cast<int32_t>((i * 7 + 3) % num_blocks);
      }
    }
  }

  AttentionParams params(void* out, float* lse) {
    AttentionParams p = {};
    const int64_t heads = shape.num_heads, dim = shape.head_dim;
    p.query = {is_bfloat16 ? static_cast<void*>(query16.data()) : query.data(), heads * dim, dim};
    p.out = {out, heads * dim, dim};
    p.lse = lse;
    p.lse_token_stride = heads;
    p.lse_head_stride = 1;
    const PagesView view = {nullptr, shape.block_size * row, row, dim};
    p.key_pages = p.value_pages = view;
    p.key_pages.data = is_bfloat16 ? static_cast<void*>(keys16.data.get()) : keys.data.get();
    p.value_pages.data = is_bfloat16 ? static_cast<void*>(values16.data.get()) : values.data.get();
    p.block_table = table.data.get();
    p.block_table_stride = max_blocks;
    p.seq_lens = seq_lens.data();
    p.query_start_loc = starts.data();
    p.num_tokens = starts.back();
    p.num_seqs = static_cast<int64_t>(seq_lens.size());
    p.max_blocks = max_blocks;
    p.num_blocks = num_blocks;
    p.num_heads = shape.num_heads;
    p.num_kv_heads = shape.num_kv_heads;
    p.head_dim = shape.head_dim;
    p.block_size = shape.block_size;
    p.scale = 1.0f / std::sqrt(static_cast<float>(dim));
    p.causal = true;
    p.query_dtype = p.page_dtype = is_bfloat16 ? DType::BFloat16 : DType::Float32;
    return p;
  }

  // The plain meaning for one token and head.
  std::vector<double> attended(size_t s, int32_t token, int32_t head) {
    const int64_t dim = shape.head_dim, position = seq_lens[s] - starts[s + 1] + token;
    const int64_t kv_head = head / (shape.num_heads / shape.num_kv_heads);
    const auto at = [&](int64_t key) {
      const int64_t page = table[s * max_blocks + key / shape.block_size];
      return (page * shape.block_size + key % shape.block_size) * row + kv_head * dim;
    };
    std::vector<double> out(dim);
    double sum = 0;
    for (int64_t key = 0; key <= position; ++key) {
      double logit = 0;
      for (int64_t d = 0; d < dim; ++d) {
        logit += query[(token * shape.num_heads + head) * dim + d] * double{keys[at(key) + d]};
      }
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) out[d] += weight * values[at(key) + d];
    }
    for (double& number : out) number /= sum;
    return out;
  }

  Shape shape;
  bool is_bfloat16;
  std::vector<int32_t> seq_lens, starts = {0};
  int64_t max_blocks, num_blocks, row;
  Exact<float> keys, values;
  Exact<uint16_t> keys16, values16;
  Exact<int32_t> table;
  std::vector<float> query;
  std::vector<uint16_t> query16;
};

template <typename Use>
void for_each_isa(Use use) {
  for (const cpu::Isa& isa : cpu::isas()) {
    if (*isa.unavailable != '\0') continue;
    std::fprintf(stderr, "  %s\n", isa.name);
    use(isa);
  }
}

TEST(attention_is_its_meaning_on_every_instruction_set) {
  for_each_isa([](const cpu::Isa& isa) {
    for (const Shape& shape :
         {Shape{4, 2, 64, 16}, {3, 1, 80, 8}, {2, 2, 20, 32}, {12, 1, 16, 16}}) {
      Batch batch(shape, {600, 17, 40}, {1, 3, 21}, false);
      std::vector<float> out(batch.query.size(), NAN),
          lse(batch.starts.back() * shape.num_heads, NAN);
      cpu::paged_attention(isa, batch.params(out.data(), lse.data()), 2);
      for (size_t s = 0; s < 3; ++s) {
        for (int32_t token = batch.starts[s]; token < batch.starts[s + 1]; ++token) {
          const int32_t head = token % shape.num_heads;
          const std::vector<double> expected = batch.attended(s, token, head);
          for (int32_t d = 0; d < shape.head_dim; ++d) {
            const float got = out[(token * shape.num_heads + head) * shape.head_dim + d];
            CHECK(std::abs(got - expected[d]) < 1e-5);
          }
        }
      }
    }
  });
}

TEST(threads_and_groups_change_no_bit) {
  for_each_isa([](const cpu::Isa& isa) {
    for (const bool is_bfloat16 : {false, true}) {
      Batch batch({4, 2, 64, 16}, {1600, 1300, 1580, 700}, {1, 2, 1, 30}, is_bfloat16);
      std::vector<float> alone(batch.query.size()), shared(batch.query.size());
      std::vector<float> lse(batch.starts.back() * 4), shared_lse(lse.size());
      cpu::paged_attention(isa, batch.params(alone.data(), lse.data()), 1);
      const std::vector<int32_t> groups = {0, 4, 0, 40, 4, 6, 60, 98}, rows = {0, 1, 2, 3, 0, 2};
      for (const int num_threads : {1, 2, 3}) {
        for (const int64_t num_groups : {0, 1, 2}) {
          AttentionParams p = batch.params(shared.data(), shared_lse.data());
          p.prefix_groups = groups.data();
          p.prefix_rows = rows.data();
          p.num_groups = num_groups;
          p.num_prefix_rows = static_cast<int64_t>(rows.size());
          std::fill(shared.begin(), shared.end(), NAN);
          cpu::paged_attention(isa, p, num_threads);
          const size_t bytes = shared.size() * (is_bfloat16 ? 2 : 4);
          CHECK(std::memcmp(shared.data(), alone.data(), bytes) == 0);
          CHECK(std::memcmp(shared_lse.data(), lse.data(), lse.size() * 4) == 0);
        }
      }
    }
  });
}

TEST(a_bad_page_is_refused) {
  Batch batch({4, 2, 64, 16}, {100}, {1}, false);
  std::vector<float> out(batch.query.size());
  for (const int32_t bad : {-1, 1000}) {
    batch.table[3] = bad;
    CHECK_THROWS(UsageError,
                 cpu::paged_attention(cpu::isas().back(), batch.params(out.data(), nullptr), 1));
  }
}

TEST(numbers_of_8_bits_survive_being_written_and_read) {
  for_each_isa([](const cpu::Isa& isa) {
    constexpr int kDim = 20, kHeads = 3, kTokens = 5;
    for (const DType dtype : {DType::Int8, DType::Float8E4M3}) {
      Exact<float> tokens(kTokens * kHeads * kDim), scales(kTokens * kHeads);
      Exact<uint8_t> pages(kTokens * kHeads * kDim);
      Random random(3);
      for (size_t i = 0; i < tokens.size; ++i) tokens[i] = draw(random);
      const std::vector<int64_t> slots = {4, 2, 0, 1, 3};
      WriteKvParams p = {};
      p.key = p.value = {tokens.data.get(), kHeads * kDim, kDim};
      p.key_pages = p.value_pages = {pages.data.get(), kHeads * kDim, kHeads * kDim, kDim};
      p.key_scales = p.value_scales = {scales.data.get(), kHeads, kHeads, 1};
      p.slot_mapping = slots.data();
      p.num_tokens = p.num_blocks = kTokens;
      p.block_size = 1;
      p.num_kv_heads = kHeads;
      p.head_dim = kDim;
      p.token_dtype = DType::Float32;
      p.page_dtype = dtype;
      cpu::write_kv(isa, p, 1);
      // One token that is its own only key gets its value back.
      std::vector<float> out(tokens.size), query(tokens.size, 0.5f);
      std::vector<int32_t> table(kTokens), lens(kTokens, 1), starts(kTokens + 1);
      for (int i = 0; i < kTokens; ++i)
        table[i] = static_cast<int32_t>(slots[i]), starts[i + 1] = i + 1;
      AttentionParams a = {};
      a.query = {query.data(), kHeads * kDim, kDim};
      a.out = {out.data(), kHeads * kDim, kDim};
      a.key_pages = p.key_pages, a.value_pages = p.value_pages;
      a.key_scales = p.key_scales, a.value_scales = p.value_scales;
      a.block_table = table.data(), a.block_table_stride = 1;
      a.seq_lens = lens.data(), a.query_start_loc = starts.data();
      a.num_tokens = a.num_seqs = a.num_blocks = kTokens, a.max_blocks = 1;
      a.num_heads = a.num_kv_heads = kHeads, a.head_dim = kDim, a.block_size = 1;
      a.scale = 1.0f, a.causal = true, a.page_dtype = dtype;
      cpu::paged_attention(isa, a, 1);
      for (size_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - tokens[i]) < 0.07f);
    }
  });
}

TEST(rings_of_copies_read_before_they_write) {
  for_each_isa([](const cpu::Isa& isa) {
    std::vector<int64_t> blocks = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4};
    const std::vector<int64_t> sources = {0, 1, 2, 3, 3}, destinations = {1, 2, 0, 4, 3};
    CopyBlocksParams p = {};
    p.blocks = {blocks.data(), 5, 16, 16, 0, {}, {}};
    p.sources = sources.data();
    p.destinations = destinations.data();
    p.num_copies = 5;
    cpu::copy_blocks(isa, p, 2);
    CHECK(blocks == std::vector<int64_t>{2, 2, 0, 0, 1, 1, 3, 3, 3, 3});
  });
}

}  // namespace
}  // namespace pagedkv::testing
