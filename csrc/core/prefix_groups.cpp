#include "pagedkv/prefix_groups.h"

#include <algorithm>
#include <limits>

namespace pagedkv {
namespace {

/// Rows that hold the same pages in the columns [0, end), and of these in [first, grouped) make a
/// group, unless it is empty. first, grouped and what ends a row are multiples of what is asked
/// for.
struct Class {
  size_t rows_begin, rows_end;  // in the order of rows
  size_t first, grouped, end;
};

class Finder {
 public:
  Finder(std::span<const PrefixRow> rows, size_t multiple, PrefixGroups& found, size_t min_saved)
      : rows_(rows), multiple_(multiple), found_(found), min_saved_(min_saved) {}

  void find() {
    for (size_t row = 0; row < rows_.size(); ++row)
      if (size_of(row) > 0) found_.order.push_back(static_cast<int32_t>(row));
    keys_.resize(found_.order.size());
    // Depth first, so that an outer group comes before those inside.
    open_.push_back({0, found_.order.size(), 0, 0, 0});
    while (!open_.empty()) {
      Class one = open_.back();
      open_.pop_back();
      if (one.first < one.grouped)
        found_.groups.push_back(
            {static_cast<int32_t>(one.rows_begin), static_cast<int32_t>(one.rows_end),
             static_cast<int32_t>(one.first), static_cast<int32_t>(one.grouped)});
      divide(one);
    }
  }

 private:
  static constexpr uint32_t kEnded = std::numeric_limits<uint32_t>::max();  // comes after all pages

  size_t size_of(size_t row) const { return rows_[row].num_pages / multiple_ * multiple_; }

  /// Sorts a class by the next page, and opens a class for each that several rows hold.
  void divide(const Class& one) {
    for (size_t i = one.rows_begin; i < one.rows_end; ++i) {
      uint32_t row = found_.order[i];
      uint32_t page = kEnded;
      if (one.end < size_of(row)) page = static_cast<uint32_t>(rows_[row].pages[one.end]);
      keys_[i] = uint64_t{page} << 32 | row;
    }
    std::sort(keys_.begin() + one.rows_begin, keys_.begin() + one.rows_end);
    for (size_t i = one.rows_begin; i < one.rows_end; ++i)
      found_.order[i] = static_cast<int32_t>(keys_[i]);
    for (size_t begin = one.rows_begin, end; begin < one.rows_end; begin = end) {
      uint32_t page = keys_[begin] >> 32;
      if (page == kEnded) break;
      for (end = begin + 1; end < one.rows_end && keys_[end] >> 32 == page; ++end) {
      }
      if (end - begin > 1) open(begin, end, one);
    }
  }

  /// Opens the class of rows of `outer` that have one more page in common, as far as they go.
  void open(size_t rows_begin, size_t rows_end, const Class& outer) {
    const BlockId* pages = rows_[found_.order[rows_begin]].pages;
    size_t end = size_of(found_.order[rows_begin]);
    for (size_t i = rows_begin + 1; i < rows_end; ++i) {
      const BlockId* others = rows_[found_.order[i]].pages;
      end = std::min(end, size_of(found_.order[i]));
      size_t num_same = outer.end + 1;
      if (std::equal(pages + num_same, pages + end, others + num_same)) continue;  // one memcmp
      end = std::mismatch(pages + num_same, pages + end, others + num_same).first - pages;
    }
    size_t grouped = end / multiple_ * multiple_;
    // What is left out here may be worth a group of fewer rows that share more.
    if ((grouped - outer.grouped) / multiple_ * (rows_end - rows_begin - 1) < min_saved_)
      grouped = outer.grouped;
    open_.push_back({rows_begin, rows_end, outer.grouped, grouped, end});
  }

  std::span<const PrefixRow> rows_;
  size_t multiple_;
  PrefixGroups& found_;
  size_t min_saved_;
  std::vector<Class> open_;     // a stack
  std::vector<uint64_t> keys_;  // by place in the order: next page, row
};

}  // namespace

void find_prefix_groups(std::span<const PrefixRow> rows, size_t multiple, PrefixGroups& found,
                        size_t min_saved_pieces) {
  found.groups.clear();
  found.order.clear();
  Finder(rows, multiple, found, min_saved_pieces).find();
  if (found.groups.empty()) found.order.clear();
}

}  // namespace pagedkv
