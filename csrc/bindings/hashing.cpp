// Digests for pagedkv/hashing.py. Loops over blocks run without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "block_hashes.h"
#include "extras.h"
#include "gil.h"
#include "pagedkv/block_hash.h"
#include "pagedkv/error.h"
#include "pagedkv/sha256.h"
#include "pagedkv/xxh3.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

std::span<const uint8_t> as_span(const nb::bytes& bytes) {
  return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

// What differs between the schemes that the core knows.
struct Sha256Scheme {
  using Digest = pagedkv::Digest;
  static constexpr auto root = chain_root;
  static void chain(const Digest& root, uint32_t block_size,
                    std::span<const ChainedPrompt> prompts) {
    chain_prompts(root, block_size, prompts);
  }
};
struct Xxh3Scheme {
  using Digest = Digest128;
  static constexpr auto root = chain_root_128;
  static constexpr auto chain = chain_prompts_128;
};

// Prompts on their way through the loop that holds no GIL.
template <typename Scheme>
class Prompts {
 public:
  void add(TokenIds token_ids, uint32_t block_size, const Identity& identity) {
    const size_t num_digests = token_ids.size() / block_size;
    Prompt& prompt = prompts_.emplace_back(Prompt{std::move(token_ids), num_digests});
    prompt.digests = std::make_unique_for_overwrite<Digest[]>(num_digests);
    prompt.extras = identity.encode(prompt.tokens.size(), block_size);
    prompt.payloads = payloads_of(prompt.extras);
  }

  void hash(uint32_t block_size, std::span<const uint8_t> namespace_) {
    std::vector<ChainedPromptOf<Digest>> chained;
    GilRelease release;
    for (Prompt& prompt : prompts_) {
      chained.push_back({prompt.tokens.read(prompt.room),
                         prompt.payloads,
                         {prompt.digests.get(), prompt.num_digests}});
    }
    Scheme::chain(Scheme::root(block_size, namespace_), block_size, chained);
  }

  BlockHashList block_hashes(size_t i) const {
    const auto* digests = reinterpret_cast<const uint8_t*>(prompts_[i].digests.get());
    return block_hash_list(digests, sizeof(Digest), prompts_[i].num_digests);
  }

 private:
  using Digest = typename Scheme::Digest;
  struct Prompt {
    TokenIds tokens;
    size_t num_digests;
    std::unique_ptr<Digest[]> digests = {};
    std::vector<uint32_t> room = {};  // for tokens of other than 32 bits
    std::vector<BlockExtras> extras = {};
    std::vector<BlockPayload> payloads = {};
  };
  std::vector<Prompt> prompts_;
};

template <typename Scheme>
BlockHashList hash_blocks(nb::handle token_ids, uint32_t block_size, const nb::bytes& namespace_,
                          nb::handle cache_salt, nb::handle salt_from, nb::handle extras) {
  Prompts<Scheme> prompts;
  prompts.add(TokenIds(token_ids), block_size, {cache_salt, salt_from, extras});
  prompts.hash(block_size, as_span(namespace_));
  return prompts.block_hashes(0);
}

template <typename Scheme>
nb::typed<nb::list, BlockHashList> hash_blocks_batch(const nb::list& token_ids, uint32_t block_size,
                                                     const nb::bytes& namespace_,
                                                     nb::handle cache_salt, nb::handle salt_from,
                                                     nb::handle extras) {
  Prompts<Scheme> prompts;
  for (size_t i = 0; i < token_ids.size(); ++i) {
    TokenIds tokens(token_ids[i], "prompts", static_cast<Py_ssize_t>(i));
    prompts.add(std::move(tokens), block_size, {cache_salt, salt_from, extras});
  }
  prompts.hash(block_size, as_span(namespace_));
  nb::typed<nb::list, BlockHashList> lists;
  for (size_t i = 0; i < token_ids.size(); ++i) lists.append(prompts.block_hashes(i));
  return lists;
}

nb::bytes xxh3(const nb::bytes& data) {
  const Digest128 digest = xxh3_128(as_span(data));
  return nb::bytes(digest.data(), digest.size());
}

std::map<std::string, std::string> sha256_isas() {
  std::map<std::string, std::string> reasons;
  for (const Sha256Path& path : sha256_paths()) reasons[path.name] = path.unavailable;
  return reasons;
}

const Sha256Path& find_path(const std::string& isa) {
  const auto path = std::ranges::find(sha256_paths(), isa, &Sha256Path::name);
  if (path == sha256_paths().end()) {
    throw UsageError("isa: expected a name of sha256_isas(), got '" + isa + "'");
  }
  if (*path->unavailable != '\0') {
    throw UsageError("isa: expected one that runs here, got '" + isa + "', " + path->unavailable);
  }
  return *path;
}

nb::bytes sha256_chain(const nb::bytes& parent, nb::handle token_ids, const std::string& isa,
                       size_t num_prompts) {
  const Sha256Path& path = find_path(isa);
  Digest root{};
  std::memcpy(root.data(), parent.data(), std::min(parent.size(), root.size()));
  std::vector<uint32_t> room;
  const TokenIds source(token_ids);
  const std::span<const uint32_t> tokens = source.read(room);
  std::vector<std::vector<Digest>> digests(num_prompts, std::vector<Digest>(tokens.size() / 16));
  std::vector<ChainedPrompt> prompts;
  for (auto& chain : digests) prompts.push_back({tokens, {}, chain});
  chain_prompts(root, 16, prompts, path);
  for (const auto& chain : digests) {
    if (chain != digests[0]) throw std::logic_error("equal prompts have unequal digests");
  }
  return nb::bytes(digests.at(0).data(), digests[0].size() * sizeof(Digest));
}

nb::bytes sha256(const nb::bytes& data, const std::string& isa, size_t chunk_size) {
  const Sha256Path& path = find_path(isa);
  Digest digest;
  {
    GilRelease release;
    Sha256 hash(path.compress);
    std::span<const uint8_t> rest = as_span(data);
    while (chunk_size != 0 && rest.size() > chunk_size) {
      hash.update(rest.first(chunk_size));
      rest = rest.subspan(chunk_size);
    }
    hash.update(rest);
    digest = hash.finish();
  }
  return nb::bytes(digest.data(), digest.size());
}

template <typename Scheme>
void bind_scheme(nb::module_& m, const char* hash_blocks_name, const char* batch_name) {
  m.def(hash_blocks_name, &hash_blocks<Scheme>, "token_ids"_a.none(), "block_size"_a, "namespace"_a,
        "cache_salt"_a.none(), "salt_from"_a.none(), "extras"_a.none(),
        "Digests of the whole blocks of one prompt.");
  m.def(batch_name, &hash_blocks_batch<Scheme>, "prompts"_a, "block_size"_a, "namespace"_a,
        "cache_salt"_a.none(), "salt_from"_a.none(), "extras"_a.none(),
        "The same for many prompts in one call.");
}

}  // namespace

void bind_hashing(nb::module_& m) {
  find_numpy();
  bind_scheme<Sha256Scheme>(m, "hash_blocks", "hash_blocks_batch");
  bind_scheme<Xxh3Scheme>(m, "hash_blocks_xxh3", "hash_blocks_batch_xxh3");
  m.def("xxh3_128", &xxh3, "data"_a, "XXH3 of 128 bits, seed 0, in canonical order.");
  m.def("is_plain_array", &is_plain_array, "object"_a.none(),
        "Whether the core reads token ids from it as it is, without `as_tokens`.");
  m.def("leading_tokens", &leading_tokens, "token_ids"_a,
        "The leading elements of a list that are token ids; fewer than all when one is none.");
  m.def("sha256", &sha256, "data"_a, "isa"_a, "chunk_size"_a = 0,
        "SHA-256 by the path `isa`, given in chunks of `chunk_size` bytes (0: at once).");
  m.def(
      "sha256_chain", &sha256_chain, "parent"_a, "token_ids"_a, "isa"_a, "num_prompts"_a = 1,
      "A chain of blocks of 16 tokens by the path `isa`, computed for equal prompts in one batch.");
  m.def("sha256_isas", &sha256_isas,
        "Every path of SHA-256 and why it can't run here, \"\" when it can.");
  m.def("sha256_isa", [] { return sha256_path().name; }, "The path in use.");
}

}  // namespace pagedkv::bindings
