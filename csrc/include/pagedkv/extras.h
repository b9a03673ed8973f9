// What a block depends on besides its tokens: salt, adapter, media, embeddings, the user's own.
//
// The tree compares extras by the number that ExtrasTable gives to their bytes. The table compares
// whole byte strings, so equal numbers mean equal extras: a proof, not a hash.

#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/short_bytes.h"

namespace pagedkv {

/// The extras of one block of a request, as pagedkv/extras.py encodes them.
struct BlockExtras {
  uint32_t block_index;
  ShortBytes payload;     // all entries, in the order in which the digest takes them
  std::string scope;      // the request-wide entries alone (salt, adapter, the user's own)
  uint32_t first_offset;  // where the first media or embedding item begins; block_size when there
                          // is none
  // A truncation cut an item that begins in the block: nothing equals the block any more.
  bool is_torn = false;

  /// Whether the block has nothing of its own: a salt or an adapter alone.
  bool is_scope() const { return std::string_view(payload) == std::string_view(scope); }
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
  /// @param seed  of the hash, so that others can't choose what collides
  explicit ExtrasTable(uint64_t seed = 0);

  /// The id of `bytes`, or kUnknownExtras. Modifies nothing.
  ExtrasId find(std::string_view bytes) const;
  /// The id of `bytes`, with one reference more.
  ExtrasId intern(std::string_view bytes);
  /// The same for what somebody has a reference of.
  ExtrasId share(ExtrasId id) {
    if (id != kNoExtras) ++entries_[id].num_refs;
    return id;
  }
  /// Gives one reference back; the last one forgets the bytes.
  void release(ExtrasId id) {
    if (id != kNoExtras && --entries_[id].num_refs == 0) forget(id);
  }

  /// Valid until the next intern().
  std::string_view bytes(ExtrasId id) const {
    return id == kNoExtras ? std::string_view() : entries_[id].bytes;  // most have none
  }
  size_t size() const { return size_; }
  /// All ids are below it; some may stand for no bytes now.
  size_t num_ids() const { return entries_.size(); }
  bool is_live(ExtrasId id) const { return entries_[id].num_refs > 0; }

 private:
  struct Entry {
    ShortBytes bytes;
    uint64_t hash = 0;
    size_t num_refs = 0;
  };

  /// Open addressing in a power of two of slots, at most half of them used.
  struct Slots : std::vector<ExtrasId> {  // kUnknownExtras: empty
    size_t num_used = 0;

    size_t mask() const { return size() - 1; }
    size_t next(size_t slot) const { return (slot + 1) & mask(); }
  };

  Slots& slots_for(uint64_t hash) { return slots_[hash >> 54]; }
  const Slots& slots_for(uint64_t hash) const { return slots_[hash >> 54]; }
  /// The slot of `bytes`, or the empty one where they belong.
  size_t slot_of(const Slots& slots, std::string_view bytes, uint64_t hash) const;
  void grow(Slots& slots);
  void forget(ExtrasId id);

  uint64_t seed_;
  size_t size_ = 1;            // the empty string is always there, and in no slot
  std::deque<Entry> entries_;  // by id
  // Many tables, each of which grows for itself: one would take long to, now and then.
  std::vector<Slots> slots_;
  std::vector<ExtrasId> unused_;
};

}  // namespace pagedkv
