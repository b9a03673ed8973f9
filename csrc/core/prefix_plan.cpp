// The prefix groups of a step. They are found anew only when its rows have changed.

#include <algorithm>

#include "pagedkv/block_pool.h"

namespace pagedkv {

/// Whether groups that an earlier step found are those of this one too.
///
/// They are when the rows hold the tables of then. Pages that were added or filled since are their
/// rows' own: what others hold too is never written, and a copy in its place makes another table.
bool BlockPool::is_true(const PrefixPlan& prefixes, const Step& step, size_t multiple) const {
  if (multiple == 0) return prefixes.found.groups.empty();
  return prefixes.multiple == multiple &&
         std::ranges::equal(prefixes.table_ids, step.rows, {}, {},
                            [](const StepRow& row) { return row.sequence->table_id; });
}

/// Compares pages, not nodes: one node may have several pages. Only whole blocks whose K/V was
/// there before the step count: every query of the row sees all of them, and nobody writes them.
void BlockPool::plan_prefixes(const Step& step, size_t g, size_t multiple,
                              PrefixPlan& prefixes) const {
  prefixes.table_ids.clear();  // true of no step until all is found
  prefixes.found = {};
  ++prefixes.num_plans;
  std::vector<PrefixRow> rows;
  rows.reserve(step.rows.size());
  for (const StepRow& row : step.rows) {
    const Sequence& sequence = *row.sequence;
    rows.push_back({sequence.tables[g].data(), sequence.num_with_kv / block_size()});
  }
  if (multiple > 0) find_prefix_groups(rows, multiple, prefixes.found);
  prefixes.multiple = multiple;
  prefixes.table_ids.reserve(rows.size());
  for (const StepRow& row : step.rows) prefixes.table_ids.push_back(row.sequence->table_id);
}

}  // namespace pagedkv
