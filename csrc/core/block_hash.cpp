#include "pagedkv/block_hash.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <vector>

#include "little_endian.h"

namespace pagedkv {
namespace {

constexpr size_t kUsualBlockSize = 16;

// A usual block as one padded message of two compressions: 32 + 64 bytes, 0x80, zeros, the length
// in bits. It spares the bookkeeping of Sha256.
Digest hash_usual_block(const Digest& parent, std::span<const uint32_t> tokens,
                        const Sha256Path& path) {
  constexpr size_t kNumBytes = sizeof(Digest) + 4 * kUsualBlockSize;
  constexpr size_t kNumBits = 8 * kNumBytes;
  static_assert(kNumBytes + 9 <= 128);

  uint8_t message[128] = {};
  std::memcpy(message, parent.data(), sizeof(Digest));
  store_tokens(message + sizeof(Digest), tokens);
  message[kNumBytes] = 0x80;
  message[126] = kNumBits >> 8;
  message[127] = kNumBits & 0xff;
  return sha256_padded(message, 2, path.compress);
}

void hash_usual_blocks(const Sha256Stretch& stretch, size_t num_blocks, const Sha256Path& path) {
  if (path.chain_one != nullptr) return path.chain_one(&stretch, num_blocks);
  assert(stretch.places == nullptr && stretch.tails.empty());
  const Digest* parent = stretch.parent;
  for (size_t i = 0; i < num_blocks; ++i) {
    stretch.digests[i] =
        hash_usual_block(*parent, {stretch.words + kUsualBlockSize * i, kUsualBlockSize}, path);
    parent = &stretch.digests[i];
  }
}

void update_tokens(Sha256& hash, std::span<const uint32_t> tokens) {
  uint8_t bytes[256];
  while (!tokens.empty()) {
    const auto some = tokens.first(std::min(tokens.size(), sizeof bytes / 4));
    store_tokens(bytes, some);
    hash.update({bytes, some.size_bytes()});
    tokens = tokens.subspan(some.size());
  }
}

// A block of any size, or with extras. Most are short enough to be laid out whole, padding and all,
// which takes half the time of three updates.
Digest hash_any_block(const Digest& parent, std::span<const uint32_t> tokens,
                      std::span<const uint8_t> extras) {
  constexpr size_t kRoom = 512;
  const size_t num_bytes = sizeof(Digest) + tokens.size_bytes() + extras.size();
  if (num_bytes + 9 <= kRoom) {
    const size_t num_blocks = (num_bytes + 9 + 63) / 64, end = 64 * num_blocks;
    uint8_t message[kRoom];
    std::memcpy(message, parent.data(), sizeof(Digest));
    store_tokens(message + sizeof(Digest), tokens);
    std::copy(extras.begin(), extras.end(), message + num_bytes - extras.size());
    std::memset(message + num_bytes, 0, end - num_bytes);
    message[num_bytes] = 0x80;
    message[end - 2] = static_cast<uint8_t>(8 * num_bytes >> 8);
    message[end - 1] = static_cast<uint8_t>(8 * num_bytes & 0xff);
    return sha256_padded(message, num_blocks);
  }
  Sha256 hash;
  hash.update(parent);
  update_tokens(hash, tokens);
  hash.update(extras);
  return hash.finish();
}

// The extras of blocks of 16 tokens, each padded as the end of its block's message.
class Tails {
 public:
  // The blocks are counted from `first_block` on; those from `end_block` on are left out.
  Tails(std::span<const BlockPayload> payloads, size_t first_block, size_t end_block) {
    size_t num_bytes = 0;
    for (const BlockPayload& payload : payloads) num_bytes += size_of(payload.bytes.size());
    bytes_.resize(num_bytes);
    tails_.reserve(payloads.size());
    uint8_t* out = bytes_.data();
    for (const auto& [block_index, extras] : payloads) {
      if (block_index >= end_block) break;
      const size_t size = size_of(extras.size());
      std::copy(extras.begin(), extras.end(), out);
      out[extras.size()] = 0x80;  // zeros follow, and the length in bits
      uint64_t num_bits = 8 * (sizeof(Digest) + 4 * kUsualBlockSize + extras.size());
      for (uint8_t* byte = out + size; num_bits != 0; num_bits >>= 8)
        *--byte = static_cast<uint8_t>(num_bits);
      tails_.push_back({block_index - first_block, out, size / 64});
      out += size;
    }
  }
  operator std::span<const Sha256Tail>() const { return tails_; }

 private:
  static size_t size_of(size_t num_bytes) { return 32 + (num_bytes + 9 + 31) / 64 * 64; }

  std::vector<uint8_t> bytes_;
  std::vector<Sha256Tail> tails_;
};

// One prompt on its way. A usual block has 16 tokens and no extras.
class Lane {
 public:
  Lane(const Digest& root, uint32_t block_size) : root_(root), block_size_(block_size) {}

  void start(const ChainedPrompt& prompt) {
    assert(prompt.digests.size() == prompt.tokens.size() / block_size_);
    prompt_ = prompt;
    block_ = 0;
  }

  bool is_done() const { return block_ == prompt_.digests.size(); }

  size_t num_usual_blocks() const {
    if (block_size_ != kUsualBlockSize) return 0;
    const size_t end = prompt_.payloads.empty() ? SIZE_MAX : prompt_.payloads[0].block_index;
    assert(end >= block_ && "payloads ascend");
    return std::min(end, prompt_.digests.size()) - block_;
  }

  // The next `num_blocks`, to be computed by the caller.
  Sha256Stretch take_usual_blocks(size_t num_blocks) {
    const Sha256Stretch stretch = {&parent(), prompt_.tokens.data() + block_ * block_size_,
                                   prompt_.digests.data() + block_};
    block_ += num_blocks;
    return stretch;
  }

  void hash_unusual_block() {
    std::span<const uint8_t> extras;
    if (!prompt_.payloads.empty() && prompt_.payloads[0].block_index == block_) {
      extras = prompt_.payloads[0].bytes;
      prompt_.payloads = prompt_.payloads.subspan(1);
    }
    const auto tokens = prompt_.tokens.subspan(block_ * block_size_, block_size_);
    prompt_.digests[block_] = chain_next(parent(), tokens, extras);
    ++block_;
  }

  void hash_rest(const Sha256Path& path) {
    if (path.chain_one != nullptr && block_size_ == kUsualBlockSize && !is_done()) {
      const Tails tails(prompt_.payloads, block_, prompt_.digests.size());
      const size_t num_blocks = prompt_.digests.size() - block_;
      Sha256Stretch stretch = take_usual_blocks(num_blocks);
      stretch.tails = tails;
      return path.chain_one(&stretch, num_blocks);
    }
    while (!is_done()) {
      if (const size_t num_blocks = num_usual_blocks()) {
        hash_usual_blocks(take_usual_blocks(num_blocks), num_blocks, path);
      } else {
        hash_unusual_block();
      }
    }
  }

 private:
  const Digest& parent() const { return block_ == 0 ? root_ : prompt_.digests[block_ - 1]; }

  const Digest& root_;
  const size_t block_size_;
  ChainedPrompt prompt_{};  // payloads: of block_ and behind it
  size_t block_ = 0;
};

}  // namespace

Digest chain_root(uint32_t block_size, std::span<const uint8_t> namespace_) {
  uint8_t sizes[8];
  store_u32le(sizes, block_size);
  store_u32le(sizes + 4, static_cast<uint32_t>(namespace_.size()));

  Sha256 hash;
  hash.update({reinterpret_cast<const uint8_t*>(kChainFormat.data()), kChainFormat.size()});
  hash.update(sizes);
  hash.update(namespace_);
  return hash.finish();
}

Digest chain_next(const Digest& parent, std::span<const uint32_t> tokens,
                  std::span<const uint8_t> extras) {
  if (tokens.size() == kUsualBlockSize && extras.empty()) {
    Digest digest;
    hash_usual_blocks({&parent, tokens.data(), &digest}, 1, sha256_path());
    return digest;
  }
  return hash_any_block(parent, tokens, extras);
}

void chain_places(const Digest& parent, uint32_t block_size, const uint32_t* tokens,
                  std::span<const BlockPayload> payloads, std::span<const uint32_t> places,
                  Digest* digests) {
  const Sha256Path& path = sha256_path();
  if (path.chain_one != nullptr && block_size == kUsualBlockSize) {
    const Tails tails(payloads, 0, places.size());
    const Sha256Stretch stretch = {&parent, tokens, digests, places.data(), tails};
    return path.chain_one(&stretch, places.size());
  }
  const Digest* above = &parent;
  auto payload = payloads.begin();
  for (size_t i = 0; i < places.size(); ++i) {
    std::span<const uint8_t> extras;
    if (payload != payloads.end() && payload->block_index == i) extras = payload++->bytes;
    Digest& own = digests[places[i]];
    own = chain_next(*above, {tokens + size_t{places[i]} * block_size, block_size}, extras);
    above = &own;
  }
}

void chain_prompts(const Digest& root, uint32_t block_size, std::span<const ChainedPrompt> prompts,
                   const Sha256Path& path) {
  Lane lanes[2] = {{root, block_size}, {root, block_size}};
  auto next = prompts.begin();
  const auto refill = [&](Lane& lane) {
    while (lane.is_done() && next != prompts.end()) lane.start(*next++);
    return !lane.is_done();
  };

  // While there are two prompts they go side by side, but for blocks that are not usual.
  while (path.chain_two != nullptr && refill(lanes[0]) && refill(lanes[1])) {
    const size_t one = lanes[0].num_usual_blocks(), two = lanes[1].num_usual_blocks();
    if (const size_t num_blocks = std::min(one, two)) {
      const Sha256Stretch stretches[2] = {lanes[0].take_usual_blocks(num_blocks),
                                          lanes[1].take_usual_blocks(num_blocks)};
      path.chain_two(stretches, num_blocks);
    } else {
      lanes[one == 0 ? 0 : 1].hash_unusual_block();
    }
  }
  do {
    lanes[0].hash_rest(path);
    lanes[1].hash_rest(path);
  } while (refill(lanes[0]));
}

}  // namespace pagedkv
