// The chain of digests: the vectors of docs/concepts/digests.md, and every way of computing them.

#include "pagedkv/block_hash.h"

#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "hex.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes to_bytes(std::string_view text) { return {text.begin(), text.end()}; }

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Bytes u32le(uint32_t x) {
  return {uint8_t(x), uint8_t(x >> 8), uint8_t(x >> 16), uint8_t(x >> 24)};
}

Bytes entry(uint8_t tag, const Bytes& payload) {
  return Bytes{tag} + u32le(static_cast<uint32_t>(payload.size())) + payload;
}

std::vector<uint32_t> first_tokens(size_t num_tokens) {
  std::vector<uint32_t> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

std::vector<std::string> chained(const Digest& root, const std::vector<uint32_t>& tokens,
                                 const std::vector<BlockPayload>& payloads = {}) {
  std::vector<Digest> digests(tokens.size() / 16);
  const ChainedPrompt prompt{tokens, payloads, digests};
  chain_prompts(root, 16, {&prompt, 1});
  std::vector<std::string> texts;
  for (const Digest& digest : digests) texts.push_back(hex(digest));
  return texts;
}

using Texts = std::vector<std::string>;

TEST(the_chain_gives_the_published_digests) {
  CHECK(chained(chain_root(16, {}), first_tokens(48)) ==
        Texts{"5c8fad469754e2ee77b05d7eba3ad4d292c9fe64aebe7ca07588067b9ca8eb0d",
              "24c308327d20df5499ef377c9b8f02d43bc40873e43a1cd744b627e239c0e0dc",
              "74562b5701642701fed483b4842a7eeaad902834d1f396a1539f014ba1af7681"});
}

TEST(a_salt_gives_the_published_digests_wherever_it_enters) {
  Bytes salt = entry(1, to_bytes("tenant-1"));
  CHECK(chained(chain_root(16, {}), first_tokens(48), {{0, salt}}) ==
        Texts{"710e940fe3a1f5d03597629361ce9ee87271d1ce399c13b15011de569a7850b1",
              "1989411660443cc59c039fde27e86f5153bb23170586bda218fbc3d3bf0b9e43",
              "6b468bdb82596bce662869c0cb6d988d8379ebd5c8b3c7d4dcd686894eaf7bf5"});
  CHECK(chained(chain_root(16, {}), first_tokens(48), {{1, salt}}) ==
        Texts{"5c8fad469754e2ee77b05d7eba3ad4d292c9fe64aebe7ca07588067b9ca8eb0d",
              "c7877534dc2947f518ae9bc1b940ebd7939005f0f6cfb522689118968adf7101",
              "47c16febb0cde199381395d120fd58ceea7e758cbbaf3bb260f37124b9b1b388"});
}

TEST(a_namespace_an_adapter_and_media_give_the_published_digests) {
  Bytes adapter = entry(2, u32le(3) + to_bytes("sql") + Bytes{1, 2});
  Bytes content(32);
  std::iota(content.begin(), content.end(), 0);
  Bytes first = adapter + entry(3, u32le(10) + content);
  Bytes second = entry(3, u32le(static_cast<uint32_t>(-6)) + content);
  CHECK(chained(chain_root(16, to_bytes("model")), first_tokens(32), {{0, first}, {1, second}}) ==
        Texts{"b469c7964f42aec8371c39a5860d58b9ec87108629e61a20291f29043ad2ec35",
              "1124f035f4541be089f45f990cdb8d348b9141c43918d468ed64e24e4dd890c4"});
}

TEST(the_chain_of_xxh3_gives_the_published_digests) {
  std::vector<uint32_t> tokens = first_tokens(48);
  std::vector<Digest128> digests(3);
  const ChainedPrompt128 prompt{tokens, {}, digests};
  chain_prompts_128(chain_root_128(16, {}), 16, {&prompt, 1});
  CHECK(hex(digests[0]) == "c11942e2cfeb85123f9c9e15a0d392d9");
  CHECK(hex(digests[1]) == "2e4d6a0af07ef0d24cebe65ce2e731fa");
  CHECK(hex(digests[2]) == "d7dc86ab1154984b1f50a40423868796");
}

/// The format as it is written down, with nothing but Sha256.
std::vector<Digest> spelt_out(const Digest& root, uint32_t block_size,
                              const std::vector<uint32_t>& tokens,
                              const std::vector<BlockPayload>& payloads) {
  std::vector<Digest> digests;
  for (size_t block = 0; block < tokens.size() / block_size; ++block) {
    Sha256 hash(sha256_paths().back().compress);
    hash.update(block == 0 ? root : digests.back());
    for (size_t i = 0; i < block_size; ++i) hash.update(u32le(tokens[block * block_size + i]));
    for (const BlockPayload& payload : payloads)
      if (payload.block_index == block) hash.update(payload.bytes);
    digests.push_back(hash.finish());
  }
  return digests;
}

TEST(every_path_chains_any_prompts_together_as_the_format_says) {
  Random random(3);
  for (int round = 0; round < 300; ++round) {
    uint32_t block_size = random.one_in(3) ? 1 + uint32_t(random.below(100)) : 16;
    Digest root = chain_root(block_size, {});
    size_t num_prompts = random.below(6);
    std::vector<std::vector<uint32_t>> tokens(num_prompts);
    std::vector<std::vector<Bytes>> bytes(num_prompts);
    std::vector<std::vector<BlockPayload>> payloads(num_prompts);
    std::vector<std::vector<Digest>> digests(num_prompts);
    std::vector<ChainedPrompt> prompts;
    for (size_t p = 0; p < num_prompts; ++p) {
      tokens[p].resize(random.below(20 * block_size));
      for (uint32_t& token : tokens[p]) token = uint32_t(random.below(uint64_t{1} << 32));
      digests[p].resize(tokens[p].size() / block_size);
      bytes[p].resize(digests[p].size());
      for (size_t block = 0; block < digests[p].size(); ++block) {
        if (!random.one_in(4)) continue;
        bytes[p][block].assign(random.below(200), uint8_t(p));
        payloads[p].push_back({block, bytes[p][block]});
      }
      prompts.push_back({tokens[p], payloads[p], digests[p]});
    }
    for (const Sha256Path& path : sha256_paths()) {
      if (*path.unavailable != '\0') continue;
      for (auto& of_prompt : digests) std::fill(of_prompt.begin(), of_prompt.end(), Digest{});
      chain_prompts(root, block_size, prompts, path);
      for (size_t p = 0; p < num_prompts; ++p)
        CHECK(digests[p] == spelt_out(root, block_size, tokens[p], payloads[p]));
    }
  }
}

TEST(scattered_blocks_with_extras_of_any_length_chain_as_one_by_one) {
  Random random(7);
  for (uint32_t block_size : {16u, 4u}) {
    for (size_t longest : {0, 1, 22, 23, 24, 86, 87, 88, 150, 151, 152, 5000}) {
      constexpr size_t kNumBlocks = 9;
      std::vector<uint32_t> places{7, 3, 11, 0, 1, 2, 10, 4, 8};
      std::vector<uint32_t> tokens(12 * block_size);
      for (uint32_t& token : tokens) token = static_cast<uint32_t>(random.below(uint64_t{1} << 32));
      std::vector<Bytes> extras(kNumBlocks);
      std::vector<BlockPayload> payloads;
      for (size_t i = 0; i < kNumBlocks; ++i) {
        if (random.one_in(2)) continue;
        for (size_t size = longest; size > 0; --size) extras[i].push_back(random.byte());
        payloads.push_back({i, extras[i]});
      }
      Digest root{};
      root[0] = random.byte();
      std::vector<Digest> digests(12);
      chain_places(root, block_size, tokens.data(), payloads, places, digests.data());
      Digest parent = root;
      std::vector<uint32_t> in_order;
      for (size_t i = 0; i < kNumBlocks; ++i) {
        std::span<const uint32_t> own{tokens.data() + places[i] * block_size, block_size};
        in_order.insert(in_order.end(), own.begin(), own.end());
        Sha256 hash(sha256_paths().back().compress);
        hash.update(parent);
        for (uint32_t token : own) hash.update(u32le(token));
        hash.update(extras[i]);
        parent = hash.finish();
        CHECK(digests[places[i]] == parent);
      }
      // The blocks of a prompt lie in order; its extras may reach beyond the last whole one.
      std::vector<Digest> chained(kNumBlocks - 1);
      in_order.pop_back();
      const ChainedPrompt prompt{in_order, payloads, chained};
      chain_prompts(root, block_size, {&prompt, 1});
      for (size_t i = 0; i < chained.size(); ++i) CHECK(chained[i] == digests[places[i]]);
    }
  }
}

}  // namespace
}  // namespace pagedkv::testing
