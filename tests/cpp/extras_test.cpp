// The table of byte strings, and the strings themselves.

#include "pagedkv/extras.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

std::string any_string(Random& random, size_t longest) {
  // Few different ones, long and short.
  return std::string(random.below(longest), static_cast<char>('a' + random.below(3)));
}

TEST(short_bytes_keep_what_they_are_given_whatever_its_length) {
  Random random(1);
  std::string meant;
  ShortBytes bytes;
  for (int i = 0; i < 5'000; ++i) {
    switch (random.below(5)) {
      case 0: {
        std::string more = any_string(random, 60);
        meant += more;
        bytes += more;
        break;
      }
      case 1: {
        ShortBytes copy = bytes;
        CHECK(std::string_view(copy) == meant);
        bytes = std::move(copy);
        CHECK(copy.empty());
        break;
      }
      case 2: {
        ShortBytes moved = std::move(bytes);
        CHECK(bytes.empty());
        bytes = moved;
        break;
      }
      case 3:
        bytes = ShortBytes(meant = any_string(random, 100));
        break;
      default: {
        const ShortBytes& itself = bytes;
        bytes = itself;
      }
    }
    CHECK(std::string_view(bytes) == meant && bytes.size() == meant.size());
    CHECK(bytes.empty() == meant.empty());
  }
}

TEST(equal_bytes_have_one_id_until_the_last_reference_is_given_back) {
  for (uint64_t seed : {0, 1}) {
    Random random(2);
    ExtrasTable table(seed);
    std::map<std::string, std::pair<ExtrasId, size_t>> meant;  // the id and its references
    for (int i = 0; i < 30'000; ++i) {
      std::string bytes = any_string(random, 80);
      auto known = meant.find(bytes);
      if (bytes.empty()) {
        CHECK(table.intern(bytes) == kNoExtras && table.find(bytes) == kNoExtras);
        table.release(kNoExtras);
        continue;
      }
      CHECK(table.find(bytes) == (known == meant.end() ? kUnknownExtras : known->second.first));
      if (known == meant.end() || random.one_in(3)) {
        ExtrasId id = table.intern(bytes);
        if (known != meant.end()) CHECK(id == known->second.first);
        auto& [own, num_refs] = meant[bytes];
        own = id;
        ++num_refs;
      } else {
        table.release(known->second.first);
        if (--known->second.second == 0) {
          CHECK(!table.is_live(known->second.first));
          meant.erase(known);
        }
      }
      CHECK(table.size() == 1 + meant.size());
      if (i % 100 > 0) continue;
      for (const auto& [text, entry] : meant) {
        CHECK(table.find(text) == entry.first && table.bytes(entry.first) == text);
        CHECK(table.is_live(entry.first) && entry.first < table.num_ids());
      }
    }
  }
}

}  // namespace
}  // namespace pagedkv::testing
