// Groups of rows that begin with the same pages, held against all that the rows have in common.

#include "pagedkv/prefix_groups.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

using Pages = std::vector<BlockId>;

/// Checks that every claim is true and that together they save what can be saved.
void check_groups(const std::vector<Pages>& tables, size_t multiple) {
  std::vector<PrefixRow> rows;
  for (const Pages& pages : tables) rows.push_back({pages.data(), pages.size()});
  PrefixGroups found{.groups = {{9, 9, 9, 9}}, .order = {9}};  // of an earlier call
  find_prefix_groups(rows, multiple, found, 1);

  CHECK(std::set(found.order.begin(), found.order.end()).size() == found.order.size());
  std::set<std::pair<int32_t, int32_t>> cells;  // of rows and columns
  size_t num_saved = 0;
  for (const PrefixGroup& group : found.groups) {
    CHECK(0 <= group.rows_begin && group.rows_begin + 1 < group.rows_end);
    CHECK(static_cast<size_t>(group.rows_end) <= found.order.size());
    CHECK(0 <= group.first_block && group.first_block < group.last_block);
    CHECK(group.first_block % multiple == 0 && group.last_block % multiple == 0);
    const Pages& first = tables.at(found.order[group.rows_begin]);
    for (int32_t i = group.rows_begin; i < group.rows_end; ++i) {
      const Pages& pages = tables.at(found.order[i]);
      CHECK(pages.size() >= static_cast<size_t>(group.last_block));
      CHECK(std::equal(pages.begin(), pages.begin() + group.last_block, first.begin()));
      for (int32_t column = group.first_block; column < group.last_block; ++column)
        CHECK(cells.insert({found.order[i], column}).second);
    }
    num_saved += (group.rows_end - group.rows_begin - 1) * (group.last_block - group.first_block);
  }

  size_t num_reads = 0;
  std::set<Pages> beginnings;
  for (const Pages& pages : tables) {
    for (size_t end = multiple; end <= pages.size(); end += multiple, ++num_reads)
      beginnings.insert({pages.begin(), pages.begin() + end});
  }
  CHECK(num_saved == (num_reads - beginnings.size()) * multiple);
}

TEST(prefix_groups_save_all_that_can_be_saved) {
  Random random(7);
  for (int i = 0; i < 3'000; ++i) {
    std::vector<Pages> tables;
    for (size_t num_rows = random.below(12); tables.size() < num_rows;) {
      Pages pages;
      if (!tables.empty() && !random.one_in(4)) {
        const Pages& other = tables[random.below(tables.size())];
        pages.assign(other.begin(), other.begin() + random.below(other.size() + 1));
      }
      // Few pages, so that equal ones also stand behind different ones.
      for (size_t n = random.below(10); n > 0; --n) pages.push_back(random.below(3));
      pages.shrink_to_fit();  // so that a sanitizer sees a read behind the end
      tables.push_back(std::move(pages));
    }
    check_groups(tables, 1 + random.below(4));
  }
}

TEST(groups_that_save_less_than_is_asked_for_are_left_out_in_favour_of_those_inside) {
  const Pages a{1, 2}, b{1, 2}, c{1, 3, 4, 5}, d{1, 3, 4, 5};
  const PrefixRow rows[] = {{a.data(), 2}, {b.data(), 2}, {c.data(), 4}, {d.data(), 4}};
  auto ranges = [&](size_t min_saved) {
    PrefixGroups found;
    find_prefix_groups(rows, 1, found, min_saved);
    std::multiset<std::pair<int32_t, int32_t>> columns;
    for (const PrefixGroup& group : found.groups)
      columns.insert({group.first_block, group.last_block});
    return columns;
  };
  using Ranges = std::multiset<std::pair<int32_t, int32_t>>;
  CHECK(ranges(1) == Ranges{{0, 1}, {1, 2}, {1, 4}});
  CHECK(ranges(2) == Ranges{{0, 1}, {1, 4}});
  CHECK(ranges(3) == Ranges{{0, 1}, {1, 4}});
  CHECK(ranges(4) == Ranges{{0, 4}});
  CHECK(ranges(5).empty());
}

TEST(a_chain_of_groups_may_be_as_deep_as_there_are_rows) {
  std::vector<Pages> tables;
  for (size_t i = 0; i < 2'000; ++i) tables.emplace_back(1 + i / 2, 5);
  std::vector<PrefixRow> rows;
  for (const Pages& pages : tables) rows.push_back({pages.data(), pages.size()});
  PrefixGroups found;
  find_prefix_groups(rows, 1, found, 1);
  CHECK(found.groups.size() == 1'000);
  CHECK(found.groups.back().rows_end - found.groups.back().rows_begin == 2);
}

TEST(no_rows_make_no_groups) {
  check_groups({}, 1);
  check_groups({{}}, 3);
  check_groups({{1}, {}, {2}}, 1);
}

}  // namespace
}  // namespace pagedkv::testing
