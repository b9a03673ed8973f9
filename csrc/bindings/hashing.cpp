// Digests for pagedkv/hashing.py. Loops over blocks run without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bindings.h"
#include "pagedkv/block_hash.h"
#include "pagedkv/error.h"
#include "pagedkv/sha256.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

std::span<const uint8_t> as_span(const nb::bytes& bytes) {
  return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

nb::bytes as_bytes(const Digest& digest) { return nb::bytes(digest.data(), digest.size()); }

// One prompt on its way through the loop that holds no GIL.
struct Prompt {
  std::vector<uint32_t> tokens;
  std::vector<BlockPayload> payloads;
  std::vector<Digest> digests;
};

Prompt make_prompt(const TokenArray& token_ids, std::string_view name, uint32_t block_size,
                   const std::vector<size_t>& block_indices,
                   const std::vector<nb::bytes>& payloads) {
  Prompt prompt;
  prompt.tokens = to_tokens(token_ids, name);
  prompt.digests.resize(prompt.tokens.size() / block_size);
  for (size_t i = 0; i < std::min(block_indices.size(), payloads.size()); ++i) {
    prompt.payloads.push_back({block_indices[i], as_span(payloads[i])});
  }
  return prompt;
}

nb::list as_list(const std::vector<Digest>& digests) {
  nb::list list;
  for (const Digest& digest : digests) list.append(as_bytes(digest));
  return list;
}

nb::list hash_blocks(const TokenArray& token_ids, uint32_t block_size, const nb::bytes& namespace_,
                     const std::vector<size_t>& block_indices,
                     const std::vector<nb::bytes>& payloads) {
  Prompt prompt = make_prompt(token_ids, "token_ids", block_size, block_indices, payloads);
  {
    nb::gil_scoped_release release;
    const Digest root = chain_root(block_size, as_span(namespace_));
    chain_prompt(root, block_size, prompt.tokens, prompt.payloads, prompt.digests);
  }
  return as_list(prompt.digests);
}

nb::list hash_blocks_batch(const std::vector<TokenArray>& prompts, uint32_t block_size,
                           const nb::bytes& namespace_,
                           const std::vector<std::vector<size_t>>& block_indices,
                           const std::vector<std::vector<nb::bytes>>& payloads) {
  std::vector<Prompt> batch;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string name = "prompts[" + std::to_string(i) + "]";
    batch.push_back(make_prompt(prompts[i], name, block_size, block_indices.at(i), payloads.at(i)));
  }
  {
    nb::gil_scoped_release release;
    const Digest root = chain_root(block_size, as_span(namespace_));
    for (Prompt& prompt : batch) {
      chain_prompt(root, block_size, prompt.tokens, prompt.payloads, prompt.digests);
    }
  }
  nb::list lists;
  for (const Prompt& prompt : batch) lists.append(as_list(prompt.digests));
  return lists;
}

std::map<std::string, std::string> sha256_isas() {
  std::map<std::string, std::string> reasons;
  for (const Sha256Path& path : sha256_paths()) reasons[path.name] = path.unavailable;
  return reasons;
}

nb::bytes sha256(const nb::bytes& data, const std::string& isa, size_t chunk_size) {
  const auto path = std::ranges::find(sha256_paths(), isa, &Sha256Path::name);
  if (path == sha256_paths().end()) {
    throw UsageError("isa: expected a name of sha256_isas(), got '" + isa + "'");
  }
  if (*path->unavailable != '\0') {
    throw UsageError("isa: expected one that runs here, got '" + isa + "', " + path->unavailable);
  }

  nb::gil_scoped_release release;
  Sha256 hash(path->compress);
  std::span<const uint8_t> rest = as_span(data);
  while (chunk_size != 0 && rest.size() > chunk_size) {
    hash.update(rest.first(chunk_size));
    rest = rest.subspan(chunk_size);
  }
  hash.update(rest);
  const Digest digest = hash.finish();

  nb::gil_scoped_acquire acquire;
  return as_bytes(digest);
}

}  // namespace

void bind_hashing(nb::module_& m) {
  m.def(
      "hash_blocks", &hash_blocks, "token_ids"_a.noconvert(), "block_size"_a, "namespace"_a,
      "block_indices"_a, "payloads"_a,
      "Digests of the whole blocks of one prompt. `block_indices` ascend and name the blocks that\n"
      "have extras; `payloads` are their encodings.");
  m.def("hash_blocks_batch", &hash_blocks_batch, "prompts"_a, "block_size"_a, "namespace"_a,
        "block_indices"_a, "payloads"_a, "hash_blocks for many prompts in one call.");
  m.def("leading_tokens", &leading_tokens, "token_ids"_a,
        "The leading elements of a list that are token ids; fewer than all when one is none.");
  m.def("sha256", &sha256, "data"_a, "isa"_a, "chunk_size"_a = 0,
        "SHA-256 by the path `isa`, given in chunks of `chunk_size` bytes (0: at once).");
  m.def("sha256_isas", &sha256_isas,
        "Every path of SHA-256 and why it can't run here, \"\" when it can.");
  m.def("sha256_isa", [] { return sha256_path().name; }, "The path in use.");
}

}  // namespace pagedkv::bindings
