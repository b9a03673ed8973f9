// Every instruction set that runs here against the portable kernels: what is written into pages is
// the same to the bit, what is attended and merged to within the rounding of the format.

#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../csrc/cpu/kernel_table.h"
#include "check.h"
#include "pagedkv/cpu.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

constexpr std::array kTokenFormats = {DType::Float32, DType::BFloat16, DType::Float16};

const cpu::Isa& portable() { return cpu::find_isa("portable", "test"); }

template <typename Use>
void for_each_isa(Use use) {
  for (const cpu::Isa& isa : cpu::isas()) {
    if (*isa.unavailable != '\0' || &isa == &portable()) continue;
    std::fprintf(stderr, "  %s\n", isa.name);
    use(cpu::find_isa(isa.name, "test"));
  }
}

int64_t size_of(DType format) {
  return format == DType::Float32                                ? 4
         : format == DType::BFloat16 || format == DType::Float16 ? 2
                                                                 : 1;
}

float read_number(const void* from, int64_t index, DType format) {
  if (format == DType::Float32) return static_cast<const float*>(from)[index];
  const uint32_t half = static_cast<const uint16_t*>(from)[index];
  if (format == DType::BFloat16) return std::bit_cast<float>(half << 16);
  const float size = std::bit_cast<float>((half & 0x7fff) << 13) * 0x1p112f;
  return half & 0x8000 ? -size : size;
}

/// Numbers between -2 and 2 that every format holds exactly.
std::vector<char> random_numbers(int64_t count, DType format, Random& random) {
  std::vector<char> bytes(count * size_of(format));
  for (int64_t i = 0; i < count; ++i) {
    const float number = (static_cast<float>(random.below(256)) - 128.0f) / 64.0f;
    const uint32_t word = std::bit_cast<uint32_t>(number);
    const uint32_t half = number == 0 ? 0 : ((word >> 13) & 0x3fff) | ((word >> 16) & 0xc000);
    const uint16_t stored = static_cast<uint16_t>(format == DType::BFloat16 ? word >> 16 : half);
    if (format == DType::Float32) {
      std::memcpy(bytes.data() + 4 * i, &number, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, &stored, 2);
    }
  }
  return bytes;
}

/// A sequence of `seq_len` tokens whose keys and values are in pages, in a shuffled order.
struct Sequence {
  static constexpr int32_t kNumHeads = 6, kNumKvHeads = 2, kBlockSize = 16, kSeqLen = 75;
  static constexpr int64_t kNumBlocks = 8;

  Sequence(DType token_format, DType page_format, int32_t head_dim, int32_t num_tokens)
      : token_format(token_format),
        page_format(page_format),
        head_dim(head_dim),
        num_tokens(num_tokens) {
    Random random(head_dim + num_tokens);
    const int64_t numbers = int64_t{kNumKvHeads} * head_dim;
    keys = random_numbers(kSeqLen * numbers, token_format, random);
    values = random_numbers(kSeqLen * numbers, token_format, random);
    queries = random_numbers(int64_t{num_tokens} * kNumHeads * head_dim, token_format, random);
    for (int32_t i = 0; i < kSeqLen; ++i)
      slots.push_back(table[i / kBlockSize] * kBlockSize + i % kBlockSize);
  }

  /// K pages, V pages and their scales, as `isa` writes them.
  struct Pages {
    std::vector<char> keys, values;
    std::vector<float> key_scales, value_scales;
    bool operator==(const Pages&) const = default;
  };

  Pages write(const cpu::Isa& isa) const {
    const int64_t token_stride = int64_t{kNumKvHeads} * head_dim;
    Pages pages;
    pages.keys.assign(kNumBlocks * kBlockSize * token_stride * size_of(page_format), 0);
    pages.values = pages.keys;
    WriteKvParams p = {};
    p.key = {const_cast<char*>(keys.data()), token_stride, head_dim};
    p.value = {const_cast<char*>(values.data()), token_stride, head_dim};
    p.key_pages = view(pages.keys);
    p.value_pages = view(pages.values);
    if (page_format != token_format) {
      pages.key_scales.assign(kNumBlocks * kBlockSize * kNumKvHeads, 0);
      pages.value_scales = pages.key_scales;
      p.key_scales = scales_view(pages.key_scales);
      p.value_scales = scales_view(pages.value_scales);
    }
    p.slot_mapping = slots.data();
    p.num_tokens = kSeqLen;
    p.num_blocks = kNumBlocks;
    p.block_size = kBlockSize;
    p.num_kv_heads = kNumKvHeads;
    p.head_dim = head_dim;
    p.token_dtype = token_format;
    p.page_dtype = page_format;
    cpu::write_kv(isa, p, 1);
    return pages;
  }

  struct Result {
    std::vector<char> out;
    std::vector<float> lse;
  };

  Result attend(const cpu::Isa& isa, Pages& pages) const {
    const int64_t token_stride = int64_t{kNumHeads} * head_dim;
    const int32_t starts[] = {0, num_tokens}, seq_len = kSeqLen;
    Result result = {std::vector<char>(queries.size(), '\xff'),
                     std::vector<float>(num_tokens * kNumHeads, NAN)};
    AttentionParams p = {};
    p.query = {const_cast<char*>(queries.data()), token_stride, head_dim};
    p.out = {result.out.data(), token_stride, head_dim};
    p.lse = result.lse.data();
    p.lse_token_stride = kNumHeads;
    p.lse_head_stride = 1;
    p.key_pages = view(pages.keys);
    p.value_pages = view(pages.values);
    if (page_format != token_format) {
      p.key_scales = scales_view(pages.key_scales);
      p.value_scales = scales_view(pages.value_scales);
    }
    p.block_table = table;
    p.block_table_stride = 5;
    p.seq_lens = &seq_len;
    p.query_start_loc = starts;
    p.num_tokens = num_tokens;
    p.num_seqs = 1;
    p.max_blocks = 5;
    p.num_blocks = kNumBlocks;
    p.num_heads = kNumHeads;
    p.num_kv_heads = kNumKvHeads;
    p.head_dim = head_dim;
    p.block_size = kBlockSize;
    p.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    p.causal = true;
    p.query_dtype = token_format;
    p.page_dtype = page_format;
    cpu::paged_attention(isa, p, 1);
    return result;
  }

  PagesView view(std::vector<char>& pages) const {
    const int64_t token_stride = int64_t{kNumKvHeads} * head_dim;
    return {pages.data(), kBlockSize * token_stride, token_stride, head_dim};
  }
  static ScalesView scales_view(std::vector<float>& scales) {
    return {scales.data(), kBlockSize * kNumKvHeads, kNumKvHeads, 1};
  }

  static constexpr int32_t table[] = {6, 0, 3, 7, 2};
  DType token_format, page_format;
  int32_t head_dim, num_tokens;
  std::vector<char> keys, values, queries;
  std::vector<int64_t> slots;
};

template <typename Use>
void for_each_sequence(Use use) {
  for (DType token_format : kTokenFormats) {
    for (DType page_format : {token_format, DType::Float8E4M3, DType::Int8}) {
      for (int32_t head_dim : {16, 80, 128}) {
        for (int32_t num_tokens : {1, 2, 9})
          use(Sequence(token_format, page_format, head_dim, num_tokens));
      }
    }
  }
}

/// Of one rounding to the format, relative.
double unit_of(DType format) {
  return format == DType::Float32 ? 0x1p-20 : format == DType::BFloat16 ? 0x1p-8 : 0x1p-11;
}

void check_close(const std::vector<char>& found, const std::vector<char>& expected, DType format) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(found.size()) / size_of(format); ++i) {
    const double number = read_number(expected.data(), i, format);
    const double difference = read_number(found.data(), i, format) - number;
    error += difference * difference;
    size += number * number;
  }
  const double bound = 2 * unit_of(format);
  CHECK(error <= bound * bound * size);
}

TEST(every_instruction_set_writes_the_same_pages) {
  for_each_isa([](const cpu::Isa& isa) {
    for_each_sequence([&](const Sequence& sequence) {
      CHECK(sequence.write(isa) == sequence.write(portable()));
    });
  });
}

TEST(every_instruction_set_attends_alike) {
  for_each_isa([](const cpu::Isa& isa) {
    for_each_sequence([&](const Sequence& sequence) {
      Sequence::Pages pages = sequence.write(portable());
      const Sequence::Result found = sequence.attend(isa, pages);
      const Sequence::Result expected = sequence.attend(portable(), pages);
      check_close(found.out, expected.out, sequence.token_format);
      for (size_t i = 0; i < found.lse.size(); ++i) {
        CHECK(std::abs(found.lse[i] - expected.lse[i]) < 1e-5f * (1 + std::abs(expected.lse[i])));
      }
    });
  });
}

TEST(every_instruction_set_merges_alike) {
  for_each_isa([](const cpu::Isa& isa) {
    for (DType format : kTokenFormats) {
      for (int32_t head_dim : {16, 80, 128}) {
        Random random(head_dim);
        const std::vector<char> outs = random_numbers(3 * head_dim, format, random);
        const float lses[] = {1.5f, -INFINITY, -0.25f};
        const auto merge = [&](const cpu::Isa& by, std::vector<char>& out) {
          std::vector<float> sums(head_dim + 16);
          float lse = NAN;
          out.assign(head_dim * size_of(format), '\xff');
          by.kernels->merge_row({outs.data(), head_dim, lses, 1, 3, out.data(), &lse, head_dim},
                                format, sums.data());
          return lse;
        };
        std::vector<char> found, expected;
        CHECK(std::abs(merge(isa, found) - merge(portable(), expected)) < 1e-5f);
        check_close(found, expected, format);
      }
    }
  });
}

TEST(every_instruction_set_copies_whole_and_no_more) {
  for_each_isa([](const cpu::Isa& isa) {
    Random random(1);
    std::vector<uint8_t> from(5000);
    for (uint8_t& byte : from) byte = random.byte();
    for (int64_t size : {0, 1, 63, 64, 1023, 1024, 4097}) {
      for (int64_t shift : {0, 1, 17, 63}) {
        std::vector<uint8_t> to(6000, 7), expected = to;
        std::memcpy(expected.data() + 64 + shift, from.data() + 3, size);
        isa.kernels->copy_streaming(to.data() + 64 + shift, from.data() + 3, size);
        CHECK(to == expected);
      }
    }
  });
}

}  // namespace
}  // namespace pagedkv::testing
