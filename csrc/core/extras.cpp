#include "pagedkv/extras.h"

#include <algorithm>

#include "little_endian.h"

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

ExtrasTable::ExtrasTable() {
  auto [it, inserted] = ids_.emplace(std::string(), kNoExtras);
  entries_.push_back({&it->first, 1});  // never released: most blocks carry no extras
}

ExtrasId ExtrasTable::find(std::string_view bytes) const {
  if (bytes.empty()) return kNoExtras;
  auto it = ids_.find(bytes);
  return it == ids_.end() ? kUnknownExtras : it->second;
}

ExtrasId ExtrasTable::intern(std::string_view bytes) {
  if (bytes.empty()) return kNoExtras;
  auto [it, inserted] = ids_.try_emplace(std::string(bytes), kUnknownExtras);
  if (inserted) {
    if (unused_.empty()) {
      it->second = static_cast<ExtrasId>(entries_.size());
      entries_.push_back({&it->first, 0});
      unused_.reserve(entries_.capacity());  // so that release() can't fail
    } else {
      it->second = unused_.back();
      unused_.pop_back();
      entries_[it->second] = {&it->first, 0};
    }
  }
  ++entries_[it->second].refs;
  return it->second;
}

void ExtrasTable::release(ExtrasId id) {
  if (id == kNoExtras || --entries_[id].refs > 0) return;
  ids_.erase(ids_.find(*entries_[id].bytes));
  entries_[id].bytes = nullptr;
  unused_.push_back(id);
}

}  // namespace pagedkv
