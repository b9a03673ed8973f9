#include "pagedkv/xxh3.h"

#include <vector>

#include "check.h"
#include "hex.h"
#include "pagedkv/sha256.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

TEST(xxh3_is_right_at_every_length_where_its_algorithm_changes) {
  Random random(1);
  std::vector<uint8_t> message(4096);
  for (uint8_t& byte : message) byte = random.byte();
  Sha256 all;
  for (size_t length = 0; length <= 2048; ++length) all.update(xxh3_128({message.data(), length}));
  // SHA-256 of what xxHash's own library gives for the same messages, one after the other
  CHECK(hex(all.finish()) == "145c1b4deaa2310bd32bdb1fb3268512c561c36c58a5b4da5aa1b71e35b9f5e9");
  CHECK(hex(xxh3_128(message)) == "8ed76d948ea60535bae147895f38d606");
  CHECK(hex(xxh3_128({})) == "99aa06d3014798d86001c324468d497f");
}

}  // namespace
}  // namespace pagedkv::testing
