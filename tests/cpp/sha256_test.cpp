// Every path of SHA-256 that runs on this processor.

#include "pagedkv/sha256.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "hex.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

template <typename F>
void on_each_path(F&& body) {
  for (const Sha256Path& path : sha256_paths()) {
    if (*path.unavailable == '\0') {
      body(path);
    } else {
      std::fprintf(stderr, "  without %s: %s\n", path.name, path.unavailable);
    }
  }
}

std::vector<uint8_t> random_bytes(size_t size) {
  Random random(1);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = random.byte();
  return bytes;
}

Digest sha256(std::span<const uint8_t> message, const Sha256Path& path, size_t piece = SIZE_MAX) {
  Sha256 hash(path.compress);
  while (!message.empty()) {
    auto some = message.first(std::min(piece, message.size()));
    hash.update(some);
    message = message.subspan(some.size());
  }
  return hash.finish();
}

TEST(the_last_path_always_runs_and_the_first_that_runs_is_used) {
  CHECK(std::string_view(sha256_paths().back().name) == "portable");
  CHECK(*sha256_paths().back().unavailable == '\0');
  CHECK(*sha256_path().unavailable == '\0');
  for (const Sha256Path& path : sha256_paths()) {
    if (path.name == sha256_path().name) break;
    CHECK(*path.unavailable != '\0');
  }
}

TEST(the_path_is_the_one_that_the_environment_expects) {
  const char* expected = std::getenv("EXPECTED_SHA256_PATH");
  if (expected != nullptr) CHECK(std::string_view(sha256_path().name) == expected);
}

TEST(each_path_gives_the_examples_of_fips_180) {
  // NIST's examples for FIPS 180-4.
  const std::pair<std::string, std::string_view> examples[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqr"
       "lmnopqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(1'000'000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  on_each_path([&](const Sha256Path& path) {
    for (const auto& [message, digest] : examples) {
      std::span bytes{reinterpret_cast<const uint8_t*>(message.data()), message.size()};
      CHECK(hex(sha256(bytes, path)) == digest);
    }
  });
}

TEST(each_path_is_right_at_every_length_around_the_padding) {
  std::vector<uint8_t> message = random_bytes(300);
  on_each_path([&](const Sha256Path& path) {
    for (size_t piece : {SIZE_MAX, size_t{1}, size_t{55}, size_t{64}, size_t{65}, size_t{129}}) {
      Sha256 all(path.compress);
      for (size_t length = 0; length <= message.size(); ++length)
        all.update(sha256({message.data(), length}, path, piece));
      // hashlib's digest of hashlib's digests of the same messages
      CHECK(hex(all.finish()) ==
            "9af4fbd77157ec8b4cf7b6ae47843d621e91ab2c07de6ff3b75bb4a7203a7a1f");
    }
  });
}

TEST(each_path_chains_one_and_two_stretches_as_it_compresses) {
  constexpr size_t kNumMessages = 37;
  Random random(2);
  std::vector<uint32_t> words[2];
  Digest parents[2];
  for (int lane = 0; lane < 2; ++lane) {
    for (size_t i = 0; i < 16 * kNumMessages; ++i)
      words[lane].push_back(static_cast<uint32_t>(random.below(uint64_t{1} << 32)));
    for (uint8_t& byte : parents[lane]) byte = random.byte();
  }
  on_each_path([&](const Sha256Path& path) {
    if (path.chain_one == nullptr) return;
    std::vector<Digest> expected[2], digests[2];
    Sha256Stretch stretches[2];
    for (int lane = 0; lane < 2; ++lane) {
      digests[lane].resize(kNumMessages);
      stretches[lane] = {&parents[lane], words[lane].data(), digests[lane].data()};
      const Digest* parent = &parents[lane];
      for (size_t i = 0; i < kNumMessages; ++i) {
        Sha256 hash(sha256_paths().back().compress);
        hash.update(*parent);
        for (size_t j = 0; j < 16; ++j) {
          uint32_t word = words[lane][16 * i + j];
          const uint8_t bytes[] = {uint8_t(word), uint8_t(word >> 8), uint8_t(word >> 16),
                                   uint8_t(word >> 24)};
          hash.update(bytes);
        }
        expected[lane].push_back(hash.finish());
        parent = &expected[lane][i];
      }
    }
    for (size_t num_messages : {size_t{0}, size_t{1}, size_t{2}, kNumMessages}) {
      for (int lane = 0; lane < 2; ++lane) {
        std::fill(digests[lane].begin(), digests[lane].end(), Digest{});
        path.chain_one(&stretches[lane], num_messages);
        for (size_t i = 0; i < kNumMessages; ++i)
          CHECK(digests[lane][i] == (i < num_messages ? expected[lane][i] : Digest{}));
        std::fill(digests[lane].begin(), digests[lane].end(), Digest{});
      }
      path.chain_two(stretches, num_messages);
      for (int lane = 0; lane < 2; ++lane)
        for (size_t i = 0; i < kNumMessages; ++i)
          CHECK(digests[lane][i] == (i < num_messages ? expected[lane][i] : Digest{}));
    }
  });
}

}  // namespace
}  // namespace pagedkv::testing
