#include "tables.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <utility>

namespace nb = nanobind;

namespace pagedkv::bindings {

struct Tables::Memory {
  struct Group {
    std::vector<int32_t> block_table;
    std::vector<int64_t> slot_mapping;
    std::vector<FilledRow> filled;  // by row of block_table
    PrefixPlan prefixes;
  };

  std::vector<int32_t> seq_lens, query_start_loc;
  std::vector<int64_t> positions, token_ids;
  std::vector<Group> groups;
  std::vector<GroupBuffers> buffers;  // of the groups
};

namespace {

template <typename T>
size_t grown(const std::vector<T>& values, size_t size) {
  return size <= values.size() ? values.size() : std::max(size, 2 * values.size());
}

template <typename T, typename... Sizes>
nb::object view(T* values, nb::handle owner, Sizes... shape) {
  return nb::cast(nb::ndarray<nb::numpy, T>(values, {static_cast<size_t>(shape)...}, owner));
}

/// Keeps the memory for as long as an array is there.
template <typename Memory>
nb::capsule owner_of(const std::shared_ptr<Memory>& memory) {
  auto* kept = new std::shared_ptr<Memory>(memory);
  return nb::capsule(kept,
                     [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
}

}  // namespace

void Tables::shape(size_t num_rows, size_t num_columns, size_t num_tokens) {
  if (memory_ && num_rows == num_rows_ && num_columns == num_columns_ && num_tokens == num_tokens_)
    return;
  arrays_.clear();
  Memory* m = memory_.get();
  if (m == nullptr || num_rows * num_columns > m->groups[0].block_table.size() ||
      num_rows >= m->seq_lens.size() || num_tokens > m->positions.size()) {
    auto memory = std::make_shared<Memory>();
    memory->groups.resize(num_groups_);
    if (m == nullptr) m = memory.get();
    size_t num_cells = grown(m->groups[0].block_table, num_rows * num_columns);
    size_t room_rows = grown(m->seq_lens, num_rows + 1);
    size_t room_tokens = grown(m->positions, num_tokens);
    memory->seq_lens.resize(room_rows);
    memory->query_start_loc.resize(room_rows);
    memory->positions.resize(room_tokens);
    memory->token_ids.resize(room_tokens);
    for (size_t g = 0; g < num_groups_; ++g) {
      Memory::Group& group = memory->groups[g];
      group.block_table.resize(num_cells);
      group.slot_mapping.resize(room_tokens);
      group.prefixes = m->groups[g].prefixes;
      memory->buffers.push_back({.block_table = group.block_table.data(),
                                 .slot_mapping = group.slot_mapping.data(),
                                 .prefixes = &group.prefixes});
    }
    prefixes_.clear();
    memory_ = std::move(memory);
    num_columns_ = 0;
    m = memory_.get();
  }
  nb::capsule owner = owner_of(memory_);
  arrays_ = {view(m->seq_lens.data(), owner, num_rows),
             view(m->query_start_loc.data(), owner, num_rows + 1),
             view(m->positions.data(), owner, num_tokens),
             view(m->token_ids.data(), owner, num_tokens)};
  for (size_t g = 0; g < num_groups_; ++g) {
    Memory::Group& group = m->groups[g];
    if (num_columns != num_columns_) group.filled.clear();
    // Rows beyond the last step's may hold what was true of another one.
    group.filled.resize(std::min(num_rows, group.filled.size()));
    group.filled.resize(num_rows, FilledRow{.table_id = 0, .num_columns = num_columns});
    m->buffers[g].filled = group.filled.data();
    // Later steps believe what the table holds, so nobody else may write it.
    const int32_t* block_table = group.block_table.data();
    arrays_.push_back(view(block_table, owner, num_rows, num_columns));
    arrays_.push_back(view(group.slot_mapping.data(), owner, num_tokens));
  }
  num_rows_ = num_rows, num_columns_ = num_columns, num_tokens_ = num_tokens;
}

bool Tables::is_unused() const {
  auto is_ours_alone = [](const nb::object& array) { return Py_REFCNT(array.ptr()) == 1; };
  return std::ranges::all_of(arrays_, is_ours_alone) &&
         std::ranges::all_of(prefixes_, is_ours_alone);
}

TableBuffers Tables::buffers(size_t prefix_tokens) {
  Memory& m = *memory_;
  return {.groups = m.buffers,
          .num_columns = num_columns_,
          .seq_lens = m.seq_lens.data(),
          .query_start_loc = m.query_start_loc.data(),
          .positions = m.positions.data(),
          .token_ids = m.token_ids.data(),
          .prefix_tokens = prefix_tokens};
}

nb::tuple Tables::arrays() {
  prefixes_.resize(2 * num_groups_);
  num_plans_.resize(num_groups_);
  for (size_t g = 0; g < num_groups_; ++g) {
    const PrefixPlan& plan = memory_->groups[g].prefixes;
    if (prefixes_[2 * g].is_valid() && num_plans_[g] == plan.num_plans) continue;
    nb::capsule owner = owner_of(memory_);
    auto* groups = reinterpret_cast<const int32_t*>(plan.found.groups.data());
    prefixes_[2 * g] = view(groups, owner, plan.found.groups.size(), 4);
    prefixes_[2 * g + 1] = view(plan.found.order.data(), owner, plan.found.order.size());
    num_plans_[g] = plan.num_plans;
  }
  nb::list others;
  for (size_t g = 1; g < num_groups_; ++g)
    others.append(nb::make_tuple(arrays_[4 + 2 * g], arrays_[5 + 2 * g], prefixes_[2 * g],
                                 prefixes_[2 * g + 1]));
  return nb::make_tuple(arrays_[4], arrays_[5], arrays_[0], arrays_[1], arrays_[2], arrays_[3],
                        prefixes_[0], prefixes_[1], nb::tuple(others));
}

Tables TablesInUse::take(size_t num_groups) {
  // The oldest ones: whoever pipelines steps gets the tables of the same step again.
  auto unused = std::ranges::find_if(kept_, &Tables::is_unused);
  if (unused == kept_.end()) return Tables(num_groups);
  Tables tables = std::move(*unused);
  kept_.erase(unused);
  return tables;
}

void TablesInUse::give_back(Tables tables) {
  if (kept_.size() == kMaxKept) kept_.erase(kept_.begin());
  kept_.push_back(std::move(tables));
}

}  // namespace pagedkv::bindings
