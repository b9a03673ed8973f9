// What a block depends on besides its tokens: salt, adapter, media, embeddings, the user's own.
//
// The tree compares extras by the number that ExtrasTable gives to their bytes. The table compares
// whole byte strings, so equal numbers mean equal extras: a proof, not a hash.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pagedkv {

/// The extras of one block of a request, as pagedkv/extras.py encodes them.
struct BlockExtras {
  uint32_t block_index;
  std::string payload;    // all entries, in the order in which the digest takes them
  std::string scope;      // the request-wide entries alone (salt, adapter, the user's own)
  uint32_t first_offset;  // where the first media or embedding item begins; block_size when there
                          // is none
  // A truncation cut an item that begins in the block: nothing equals the block any more.
  bool is_torn = false;
};

/// The payload of the block with another scope in the place of its own.
std::string with_scope(const BlockExtras& extras, std::string_view scope);

using ExtrasId = uint32_t;
inline constexpr ExtrasId kNoExtras = 0;
/// Bytes that no live node carries: they match nothing.
inline constexpr ExtrasId kUnknownExtras = UINT32_MAX;

/// Byte strings, each stored once and counted.
class ExtrasTable {
 public:
  ExtrasTable();

  /// The id of `bytes`, or kUnknownExtras. Modifies nothing.
  ExtrasId find(std::string_view bytes) const;
  /// The id of `bytes`, with one reference more.
  ExtrasId intern(std::string_view bytes);
  /// Gives one reference back; the last one forgets the bytes.
  void release(ExtrasId id);

  std::string_view bytes(ExtrasId id) const { return *entries_[id].bytes; }
  size_t size() const { return ids_.size(); }
  /// All ids are below it; some may stand for no bytes now.
  size_t num_ids() const { return entries_.size(); }
  bool is_live(ExtrasId id) const { return entries_[id].bytes != nullptr; }

 private:
  struct Entry {
    const std::string* bytes;  // the key inside ids_, which never moves
    uint32_t refs;
  };
  struct Hash {
    using is_transparent = void;  // a lookup copies no bytes
    size_t operator()(std::string_view bytes) const noexcept {
      return std::hash<std::string_view>()(bytes);
    }
  };

  std::unordered_map<std::string, ExtrasId, Hash, std::equal_to<>> ids_;
  std::vector<Entry> entries_;
  std::vector<ExtrasId> unused_;
};

}  // namespace pagedkv
