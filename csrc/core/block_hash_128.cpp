#include <cassert>
#include <string_view>
#include <vector>

#include "little_endian.h"
#include "pagedkv/block_hash.h"

namespace pagedkv {
namespace {

// Grows and shrinks with the blocks of one prompt; XXH3 wants its message in one piece.
using Message = std::vector<uint8_t>;

void append(Message& message, std::span<const uint8_t> bytes) {
  message.insert(message.end(), bytes.begin(), bytes.end());
}

void append_tokens(Message& message, std::span<const uint32_t> tokens) {
  const size_t num_bytes = message.size();
  message.resize(num_bytes + tokens.size_bytes());
  store_tokens(message.data() + num_bytes, tokens);
}

}  // namespace

Digest128 chain_root_128(uint32_t block_size, std::span<const uint8_t> namespace_) {
  Message message(kChainFormat.begin(), kChainFormat.end());
  const uint32_t sizes[] = {block_size, static_cast<uint32_t>(namespace_.size())};
  append_tokens(message, sizes);
  append(message, namespace_);
  return xxh3_128(message);
}

void chain_prompts_128(const Digest128& root, uint32_t block_size,
                       std::span<const ChainedPrompt128> prompts) {
  Message message;
  for (const ChainedPrompt128& prompt : prompts) {
    assert(prompt.digests.size() == prompt.tokens.size() / block_size);
    const Digest128* parent = &root;
    auto payload = prompt.payloads.begin();
    for (size_t block = 0; block < prompt.digests.size(); ++block) {
      message.assign(parent->begin(), parent->end());
      append_tokens(message, prompt.tokens.subspan(block * block_size, block_size));
      if (payload != prompt.payloads.end() && payload->block_index == block) {
        append(message, payload++->bytes);
      }
      prompt.digests[block] = xxh3_128(message);
      parent = &prompt.digests[block];
    }
  }
}

}  // namespace pagedkv
