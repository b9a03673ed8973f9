// Pages in heaps, each ordered by a key. A page is in one heap or in none.

#pragma once

#include <compare>
#include <cstddef>
#include <utility>
#include <vector>

#include "pagedkv/types.h"

namespace pagedkv {

class PageHeaps {
 public:
  struct Key {
    uint64_t first = 0, second = 0;
    auto operator<=>(const Key&) const = default;
  };

  PageHeaps(size_t num_pages, size_t num_heaps) : places_(num_pages, 0), heaps_(num_heaps) {}

  bool is_empty(size_t heap) const { return heaps_[heap].empty(); }
  size_t size(size_t heap) const { return heaps_[heap].size(); }
  /// The page with the least key. There must be one.
  BlockId top(size_t heap) const { return heaps_[heap][0].id; }
  Key top_key(size_t heap) const { return heaps_[heap][0].key; }

  /// Puts a page that is in no heap into one. O(log n); O(1) for what is greater than most.
  void push(size_t heap, BlockId id, Key key) {
    heaps_[heap].push_back({});
    sift_up(heap, heaps_[heap].size() - 1, {key, id});
  }
  /// Takes a page out of its heap, if it is in one. O(log n).
  void remove(BlockId id) {
    for (size_t heap = 0; heap < heaps_.size(); ++heap) {
      if (!contains(heap, id)) continue;
      size_t place = places_[id];
      Entry last = heaps_[heap].back();
      heaps_[heap].pop_back();
      if (place == heaps_[heap].size()) return;
      if (place > 0 && last.key < heaps_[heap][above(place)].key) {
        sift_up(heap, place, last);
      } else {
        sift_down(heap, place, last);
      }
      return;
    }
  }
  bool contains(size_t heap, BlockId id) const {
    return places_[id] < heaps_[heap].size() && heaps_[heap][places_[id]].id == id;
  }
  /// Moves all pages of one heap to another one. Constant time where that is empty.
  void move_all(size_t from, size_t to) {
    if (heaps_[to].empty()) {
      std::swap(heaps_[from], heaps_[to]);
      return;
    }
    for (const Entry& entry : std::exchange(heaps_[from], {})) push(to, entry.id, entry.key);
  }
  /// Puts a page where it is in `from`, which has as many heaps. Those of equal keys may change
  /// places.
  void copy_page(const PageHeaps& from, BlockId id) {
    remove(id);
    for (size_t heap = 0; heap < heaps_.size(); ++heap)
      if (from.contains(heap, id)) push(heap, id, from.heaps_[heap][from.places_[id]].key);
  }

 private:
  struct Entry {
    Key key;
    BlockId id = kNoBlock;
  };
  static constexpr size_t kArity = 4;

  static size_t above(size_t place) { return (place - 1) / kArity; }

  void put(size_t heap, size_t place, const Entry& entry) {
    heaps_[heap][place] = entry;
    places_[entry.id] = static_cast<uint32_t>(place);
  }
  void sift_up(size_t heap, size_t place, const Entry& entry) {
    for (; place > 0 && entry.key < heaps_[heap][above(place)].key; place = above(place))
      put(heap, place, heaps_[heap][above(place)]);
    put(heap, place, entry);
  }
  void sift_down(size_t heap, size_t place, const Entry& entry) {
    const std::vector<Entry>& entries = heaps_[heap];
    for (size_t first; (first = kArity * place + 1) < entries.size();) {
      size_t least = first, end = std::min(first + kArity, entries.size());
      for (size_t child = first + 1; child < end; ++child)
        if (entries[child].key < entries[least].key) least = child;
      if (!(entries[least].key < entry.key)) break;
      put(heap, place, entries[least]);
      place = least;
    }
    put(heap, place, entry);
  }

  std::vector<uint32_t> places_;  // [num_pages]: where in its heap a page is, if it is in one
  std::vector<std::vector<Entry>> heaps_;
};

}  // namespace pagedkv
