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

ExtrasTable::ExtrasTable(uint64_t seed) : seed_(seed), entries_(1), slots_(1 << 10) {
  entries_[kNoExtras].num_refs = 1;  // never released: most blocks carry no extras
}

size_t ExtrasTable::slot_of(const Slots& slots, std::string_view bytes, uint64_t hash) const {
  size_t slot = hash & slots.mask();
  for (; slots[slot] != kUnknownExtras; slot = slots.next(slot)) {
    const Entry& entry = entries_[slots[slot]];
    if (entry.hash == hash && entry.bytes == bytes) break;
  }
  return slot;
}

ExtrasId ExtrasTable::find(std::string_view bytes) const {
  if (bytes.empty()) return kNoExtras;
  uint64_t hash = hash_bytes(bytes, seed_);
  const Slots& slots = slots_for(hash);
  return slots.empty() ? kUnknownExtras : slots[slot_of(slots, bytes, hash)];
}

ExtrasId ExtrasTable::intern(std::string_view bytes) {
  if (bytes.empty()) return kNoExtras;
  uint64_t hash = hash_bytes(bytes, seed_);
  Slots& slots = slots_for(hash);
  if (slots.empty()) grow(slots);
  size_t slot = slot_of(slots, bytes, hash);
  if (slots[slot] == kUnknownExtras) {
    if (2 * slots.num_used >= slots.size()) {
      grow(slots);
      slot = slot_of(slots, bytes, hash);
    }
    if (unused_.empty()) {
      entries_.emplace_back();
      if (unused_.capacity() < entries_.size()) unused_.reserve(2 * entries_.size());
      unused_.push_back(static_cast<ExtrasId>(entries_.size() - 1));  // release() can't fail now
    }
    Entry& entry = entries_[unused_.back()];
    entry.bytes += bytes;
    entry.hash = hash;
    slots[slot] = unused_.back();
    unused_.pop_back();
    ++slots.num_used;
    ++size_;
  }
  ++entries_[slots[slot]].num_refs;
  return slots[slot];
}

void ExtrasTable::grow(Slots& slots) {
  std::vector<ExtrasId> before(slots.empty() ? 8 : 2 * slots.size(), kUnknownExtras);
  before.swap(slots);
  for (ExtrasId id : before) {
    if (id == kUnknownExtras) continue;
    size_t slot = entries_[id].hash & slots.mask();
    while (slots[slot] != kUnknownExtras) slot = slots.next(slot);
    slots[slot] = id;
  }
}

void ExtrasTable::forget(ExtrasId id) {
  Slots& slots = slots_for(entries_[id].hash);
  size_t hole = entries_[id].hash & slots.mask();
  while (slots[hole] != id) hole = slots.next(hole);
  // Whoever was pushed beyond the hole moves into it (Knuth, The Art of Computer Programming 3,
  // 6.4, algorithm R).
  for (size_t slot = slots.next(hole); slots[slot] != kUnknownExtras; slot = slots.next(slot)) {
    size_t home = entries_[slots[slot]].hash & slots.mask();
    if (((slot - home) & slots.mask()) < ((slot - hole) & slots.mask())) continue;
    slots[hole] = slots[slot];
    hole = slot;
  }
  slots[hole] = kUnknownExtras;
  entries_[id] = {};
  unused_.push_back(id);
  --slots.num_used;
  --size_;
}

}  // namespace pagedkv
