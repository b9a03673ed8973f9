// The arrays that prepare() fills. A decode step changes little of them, so they are used again.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pagedkv/block_pool.h"

namespace pagedkv::bindings {

/// numpy arrays for one step, and the memory behind them, which has room for more.
class Tables {
 public:
  explicit Tables(size_t num_groups) : num_groups_(num_groups) {}

  /// Makes arrays of these shapes. What the memory holds of block tables of the same width stays.
  void shape(size_t num_rows, size_t num_columns, size_t num_tokens);

  /// Whether nobody outside holds an array, or a view or a tensor that shares its memory.
  bool is_unused() const;

  /// Where prepare() writes; `prefix_tokens` as there.
  TableBuffers buffers(size_t prefix_tokens);

  /// What prepare() has filled, in the order of pagedkv.StepTables; of groups but the first, last,
  /// a tuple for each.
  nanobind::tuple arrays();

 private:
  struct Memory;
  size_t num_groups_;
  std::shared_ptr<Memory> memory_;
  size_t num_rows_ = 0, num_columns_ = 0, num_tokens_ = 0;
  // Those of this shape: what all groups share, then a block table and slots for each group.
  std::vector<nanobind::object> arrays_;
  std::vector<nanobind::object> prefixes_;  // two for each group: its prefix groups and their rows
  std::vector<uint64_t> num_plans_;         // when these were made
};

/// The tables of a pool's latest steps.
class TablesInUse {
 public:
  /// Tables that nobody uses, or new ones; the caller has them alone until it gives them back.
  Tables take(size_t num_groups);
  void give_back(Tables tables);

 private:
  // As many steps as an engine prepares before the first one's arrays are dropped, and some more.
  static constexpr size_t kMaxKept = 4;
  std::vector<Tables> kept_;  // the latest last
};

}  // namespace pagedkv::bindings
