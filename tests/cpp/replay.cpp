// Plays verbs without a fuzzer.
//
//   replay FILE...                      the inputs in these files, as a fuzzer left them
//   replay --random COUNT [SEED]        random ones
//   replay --write FOLDER COUNT [SEED]  writes random ones, for a fuzzer to begin with

#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "play.h"
#include "random.h"

namespace {

using pagedkv::testing::Played;
using pagedkv::testing::Random;
using Bytes = std::vector<uint8_t>;

Bytes random_input(uint64_t seed) {
  Random random(seed);
  Bytes bytes(16 + random.below(1000));
  for (uint8_t& byte : bytes) byte = random.byte();
  return bytes;
}

std::optional<uint64_t> to_number(std::string_view text) {
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int refuse(const char* what) {
  std::fprintf(
      stderr,
      "replay: expected FILE..., --random COUNT [SEED] or --write FOLDER COUNT [SEED], %s\n", what);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) return refuse("got nothing");
  bool is_random = arguments[0] == "--random", writes = arguments[0] == "--write";
  size_t first_number = is_random ? 1 : 2;
  uint64_t count = 0, seed = 1;
  if (is_random || writes) {
    if (arguments.size() <= first_number) return refuse("got too few arguments");
    auto number = to_number(arguments[first_number]);
    if (!number) return refuse("got a COUNT that is no number");
    count = *number;
    if (arguments.size() > first_number + 1) {
      number = to_number(arguments[first_number + 1]);
      if (!number) return refuse("got a SEED that is no number");
      seed = *number;
    }
  }

  Played all;
  auto play = [&](const Bytes& bytes) {
    Played one = pagedkv::testing::Play(bytes).run();
    all.num_calls += one.num_calls;
    all.num_refused += one.num_refused;
    all.num_copies += one.num_copies;
    all.num_evicted += one.num_evicted;
    all.num_cached_tokens += one.num_cached_tokens;
  };
  for (uint64_t i = 0; i < count; ++i) {
    Bytes bytes = random_input(seed + i);
    if (is_random) {
      play(bytes);
      continue;
    }
    std::ofstream file(arguments[1] + "/random-" + std::to_string(seed + i), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
    if (!file.flush()) return refuse("got a FOLDER that can't be written to");
  }
  if (writes) return 0;
  if (!is_random) {
    for (const std::string& name : arguments) {
      std::ifstream file(name, std::ios::binary);
      if (!file) return refuse("got a FILE that can't be read");
      play(Bytes(std::istreambuf_iterator<char>(file), {}));
      ++count;
    }
  }
  std::fprintf(stderr, "%zu inputs: %zu calls, %zu refused, %zu copies, %zu evicted, %zu cached\n",
               size_t(count), all.num_calls, all.num_refused, all.num_copies, all.num_evicted,
               all.num_cached_tokens);
  return 0;
}
