#include "pagedkv/extras.h"

namespace pagedkv {

ExtrasTable::ExtrasTable() {
  auto [it, inserted] = ids_.emplace(std::string(), kNoExtras);
  entries_.push_back({&it->first, 1});  // never released: most blocks carry no extras
}

ExtrasId ExtrasTable::find(std::string_view bytes) const {
  if (bytes.empty()) return kNoExtras;
  auto it = ids_.find(std::string(bytes));
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
