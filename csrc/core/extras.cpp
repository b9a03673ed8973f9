#include "pagedkv/extras.h"

#include <algorithm>
#include <utility>

#include "little_endian.h"
#include "mix.h"

namespace pagedkv {
namespace {

/// The entries of encoded extras, each tag u8 | u32le(length) | payload.
std::vector<std::string_view> entries_of(std::string_view bytes) {
  std::vector<std::string_view> entries;
  while (bytes.size() >= 5) {
    uint32_t length = load_le<uint32_t>(reinterpret_cast<const uint8_t*>(bytes.data()) + 1);
    entries.push_back(bytes.substr(0, 5 + size_t{length}));
    bytes.remove_prefix(entries.back().size());
  }
  return entries;
}

}  // namespace

std::string with_scope(const BlockExtras& extras, std::string_view scope) {
  std::vector<std::string_view> entries = entries_of(scope);
  std::vector<std::string_view> own = entries_of(extras.scope);
  for (std::string_view entry : entries_of(extras.payload))
    if (std::find(own.begin(), own.end(), entry) == own.end()) entries.push_back(entry);
  std::sort(entries.begin(), entries.end(), [](std::string_view a, std::string_view b) {
    return a[0] != b[0] ? static_cast<uint8_t>(a[0]) < static_cast<uint8_t>(b[0])
                        : a.substr(5) < b.substr(5);
  });
  std::string payload;
  for (std::string_view entry : entries) payload += entry;
  return payload;
}

ExtrasTable::ExtrasTable(uint64_t seed) : seed_(seed), entries_(1), slots_(16, kUnknownExtras) {
  entries_[kNoExtras].num_refs = 1;  // never released: most blocks carry no extras
}

size_t ExtrasTable::slot_of(std::string_view bytes, uint64_t hash) const {
  size_t slot = hash & (slots_.size() - 1);
  for (; slots_[slot] != kUnknownExtras; slot = next(slot)) {
    const Entry& entry = entries_[slots_[slot]];
    if (entry.hash == hash && entry.bytes == bytes) break;
  }
  return slot;
}

ExtrasId ExtrasTable::find(std::string_view bytes) const {
  return bytes.empty() ? kNoExtras : slots_[slot_of(bytes, hash_bytes(bytes, seed_))];
}

ExtrasId ExtrasTable::intern(std::string_view bytes) {
  if (bytes.empty()) return kNoExtras;
  uint64_t hash = hash_bytes(bytes, seed_);
  size_t slot = slot_of(bytes, hash);
  if (slots_[slot] == kUnknownExtras) {
    if (2 * size_ >= slots_.size()) {
      grow();
      slot = slot_of(bytes, hash);
    }
    if (unused_.empty()) {
      entries_.emplace_back();
      unused_.reserve(entries_.capacity());  // so that release() can't fail
      unused_.push_back(static_cast<ExtrasId>(entries_.size() - 1));
    }
    Entry& entry = entries_[unused_.back()];
    entry.bytes += bytes;
    entry.hash = hash;
    slots_[slot] = unused_.back();
    unused_.pop_back();
    ++size_;
  }
  ++entries_[slots_[slot]].num_refs;
  return slots_[slot];
}

void ExtrasTable::grow() {
  std::vector<ExtrasId> before(2 * slots_.size(), kUnknownExtras);
  before.swap(slots_);
  for (ExtrasId id : before) {
    if (id == kUnknownExtras) continue;
    size_t slot = home(id);
    while (slots_[slot] != kUnknownExtras) slot = next(slot);
    slots_[slot] = id;
  }
}

void ExtrasTable::forget(ExtrasId id) {
  size_t hole = home(id);
  while (slots_[hole] != id) hole = next(hole);
  // Whoever was pushed beyond the hole moves into it (Knuth, The Art of Computer Programming 3,
  // 6.4, algorithm R).
  const size_t mask = slots_.size() - 1;
  for (size_t slot = next(hole); slots_[slot] != kUnknownExtras; slot = next(slot)) {
    if (((slot - home(slots_[slot])) & mask) < ((slot - hole) & mask)) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole] = kUnknownExtras;
  entries_[id] = {};
  unused_.push_back(id);
  --size_;
}

}  // namespace pagedkv
