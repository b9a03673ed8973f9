#include "pagedkv/sha256.h"

#include <algorithm>
#include <cstring>

#include "sha256_paths.h"

namespace pagedkv {
namespace {

constexpr size_t kBlockBytes = 64;

Digest to_digest(const std::array<uint32_t, 8>& state) {
  Digest digest;
  for (size_t i = 0; i < state.size(); ++i) {
    digest[4 * i] = static_cast<uint8_t>(state[i] >> 24);
    digest[4 * i + 1] = static_cast<uint8_t>(state[i] >> 16);
    digest[4 * i + 2] = static_cast<uint8_t>(state[i] >> 8);
    digest[4 * i + 3] = static_cast<uint8_t>(state[i]);
  }
  return digest;
}

}  // namespace

std::span<const Sha256Path> sha256_paths() {
  static const std::array<Sha256Path, 3> paths = {{
      {"x86-sha-ni", sha256_x86::compress, sha256_x86::chain_one, sha256_x86::chain_two,
       sha256_x86::unavailable()},
      {"armv8-sha2", sha256_arm::compress, nullptr, nullptr, sha256_arm::unavailable()},
      {"portable", sha256_portable::compress, nullptr, nullptr, ""},
  }};
  return paths;
}

const Sha256Path& sha256_path() {
  static const Sha256Path& chosen = *std::ranges::find_if(
      sha256_paths(), [](const Sha256Path& path) { return *path.unavailable == '\0'; });
  return chosen;
}

Digest sha256_padded(const uint8_t* blocks, size_t num_blocks, Sha256Compress compress) {
  std::array<uint32_t, 8> state = kSha256Start;
  compress(state.data(), blocks, num_blocks);
  return to_digest(state);
}

void Sha256::update(std::span<const uint8_t> data) {
  if (data.empty()) return;
  const size_t num_pending = num_bytes_ % kBlockBytes;
  num_bytes_ += data.size();
  if (num_pending != 0) {
    const size_t taken = std::min(kBlockBytes - num_pending, data.size());
    std::memcpy(pending_.data() + num_pending, data.data(), taken);
    if (num_pending + taken < kBlockBytes) return;
    compress_(state_.data(), pending_.data(), 1);
    data = data.subspan(taken);
  }
  const size_t num_blocks = data.size() / kBlockBytes;
  if (num_blocks != 0) compress_(state_.data(), data.data(), num_blocks);
  data = data.subspan(num_blocks * kBlockBytes);
  std::ranges::copy(data, pending_.begin());
}

Digest Sha256::finish() {
  const uint64_t num_bits = 8 * num_bytes_;
  // 0x80, then zeros until the length in bits ends a block.
  std::array<uint8_t, kBlockBytes + 8> padding = {0x80};
  const size_t num_zeros = (2 * kBlockBytes - 9 - num_bytes_ % kBlockBytes) % kBlockBytes;
  for (size_t i = 0; i < 8; ++i) {
    padding[1 + num_zeros + i] = static_cast<uint8_t>(num_bits >> (56 - 8 * i));
  }
  update({padding.data(), 1 + num_zeros + 8});
  return to_digest(state_);
}

}  // namespace pagedkv
