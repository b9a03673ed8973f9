// Reserve, prepare, and the two ends of a step.

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "pagedkv/error.h"
#include "plan.h"

namespace pagedkv {

size_t Step::num_tokens() const {
  size_t num_tokens = 0;
  for (const StepRow& row : rows) num_tokens += row.end - row.start;
  return num_tokens;
}

size_t Step::max_blocks() const {
  size_t max_blocks = 0;
  for (const StepRow& row : rows) {
    size_t block_size = row.sequence->pool->block_size();
    max_blocks = std::max(max_blocks, (row.end + block_size - 1) / block_size);
  }
  return max_blocks;
}

bool BlockPool::has_borrowed_tail(const Sequence& sequence) const {
  if (sequence.num_with_kv % block_size() == 0) return false;
  BlockId tail = sequence.tables[0][sequence.num_with_kv / block_size()];
  return groups_[0].node(tail) != kNoNode || groups_[0].refs(tail) > 1;
}

std::vector<BlockPool::Plan> BlockPool::plan(std::span<const std::shared_ptr<Sequence>> sequences,
                                             std::span<const int64_t> num_new_tokens) {
  std::vector<Plan> plans;
  plans.reserve(sequences.size());
  ++num_plannings_;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    check_usable(sequence, "reserve");
    if (std::exchange(sequence.last_planning, num_plannings_) == num_plannings_)
      throw UsageError("reserve: expected each sequence once, got one twice");
    size_t num_left = sequence.tokens.size() - sequence.num_computed;
    if (num_new_tokens[i] < 1 || static_cast<size_t>(num_new_tokens[i]) > num_left)
      throw UsageError("reserve: expected num_new_tokens from 1 to the " +
                       std::to_string(num_left) + " tokens not yet computed, got " +
                       std::to_string(num_new_tokens[i]) + ", at index " + std::to_string(i));

    Plan& plan = plans.emplace_back(sequence, sequence.num_computed, sequence.tables[0].size());
    size_t num_with_kv = sequence.num_with_kv;
    bool borrows = has_borrowed_tail(sequence);
    if (sequence.is_preempted) {
      plan.hit = find_for(sequence);
      num_with_kv = plan.hit.path.size() * block_size() + plan.hit.run.num_tokens;
      borrows = plan.hit.run.num_tokens > 0;
      plan.num_blocks = plan.hit.path.size() + borrows;
      plan.start = std::min(num_with_kv, sequence.tokens.size() - 1);
    }
    plan.end =
        std::min(plan.start + static_cast<size_t>(num_new_tokens[i]), sequence.tokens.size());
    size_t num_blocks_at_end = (plan.end + block_size() - 1) / block_size();
    plan.num_new_blocks = num_blocks_at_end - std::min(num_blocks_at_end, plan.num_blocks);
    if (borrows && plan.end > num_with_kv) plan.num_tail_tokens = num_with_kv % block_size();
  }
  return plans;
}

/// Sees to it that the plans fit into the pool, or throws. When pages are short, borrowed tails are
/// dropped: their pages then may be evicted, at the price of computing a few tokens again. Reuse
/// never makes a step fail that would fit without it.
void BlockPool::fit(std::vector<Plan>& plans) const {
  // All groups need the same number of pages for the same tokens.
  size_t needed = 0;
  bool is_matched = false;  // some plan will reference pages that may be evictable now
  for (const Plan& plan : plans) {
    needed += plan.num_needed();
    is_matched = is_matched || plan.sequence->is_preempted;
  }
  auto fits_at_once = [&](const PageGroup& group) {
    return needed <= group.num_free() + group.num_evictable();
  };
  if (!is_matched && std::ranges::all_of(groups_, fits_at_once)) return;

  std::vector<Room> rooms;
  for (size_t g = 0; g < groups_.size(); ++g) rooms.push_back(room_for(plans, g));
  auto is_short = [&](const Room& room) { return needed > room.num_available; };
  // The last in the call gives way first.
  for (size_t i = plans.size(); i > 0 && std::ranges::any_of(rooms, is_short); --i) {
    Plan& last = plans[i - 1];
    if (last.num_tail_tokens == 0) continue;
    for (size_t g = 0; g < rooms.size(); ++g) {
      const Room::Source& source = rooms[g].sources.at(source_of(last, g));
      if (!is_short(rooms[g]) || source.is_needed) continue;
      for (Plan* plan : source.borrowers)
        if (plan->num_tail_tokens > 0) drop_tail(*plan, rooms);
      break;
    }
  }
  auto found = std::ranges::find_if(rooms, is_short);
  if (found == rooms.end()) return;
  size_t g = found - rooms.begin(), num_free = groups_[g].num_free();
  size_t num_evictable = found->num_available - num_free;
  std::string where = groups_.size() > 1 ? " of group " + std::to_string(g) : "";
  throw OutOfBlocksError("reserve: expected at most " + std::to_string(num_free) + " free + " +
                             std::to_string(num_evictable) + " evictable blocks" + where +
                             ", got a need of " + std::to_string(needed),
                         needed, num_free, num_evictable);
}

/// What a group has for the plans.
BlockPool::Room BlockPool::room_for(std::vector<Plan>& plans, size_t g) const {
  const PageGroup& group = groups_[g];
  Room room;
  std::unordered_set<BlockId> path_pages;  // pages that re-matched paths will reference
  std::unordered_set<BlockId> pinned;      // ... and pages now evictable that won't be any more
  auto pin = [&](BlockId id) {
    if (group.refs(id) == 0) pinned.insert(id);
  };
  for (Plan& plan : plans) {
    for (size_t i = first_seen(g, plan.hit.next_position); i < plan.hit.path.size(); ++i) {
      path_pages.insert(group.first_page(plan.hit.path[i]));
      pin(group.first_page(plan.hit.path[i]));
    }
    if (plan.num_tail_tokens == 0) continue;
    BlockId source = source_of(plan, g);
    if (plan.sequence->is_preempted) pin(source);
    room.sources[source].borrowers.push_back(&plan);
  }
  for (auto& [id, source] : room.sources) {
    size_t num_held = std::ranges::count_if(
        source.borrowers, [](const Plan* plan) { return !plan->sequence->is_preempted; });
    source.is_needed = path_pages.contains(id) || group.refs(id) != num_held;
    source.num_left = source.borrowers.size();
  }
  room.num_available = group.num_free() + group.num_evictable() - pinned.size();
  return room;
}

/// The page that a plan's tail is borrowed from.
BlockId BlockPool::source_of(const Plan& plan, size_t g) const {
  return plan.sequence->is_preempted ? groups_[g].first_page(plan.hit.run.node)
                                     : plan.sequence->tables[g][plan.num_blocks - 1];
}

void BlockPool::drop_tail(Plan& plan, std::vector<Room>& rooms) const {
  for (size_t g = 0; g < rooms.size(); ++g) {
    Room::Source& source = rooms[g].sources.at(source_of(plan, g));
    if (--source.num_left == 0 && !source.is_needed) ++rooms[g].num_available;
  }
  plan.drops_tail = true;
  plan.num_tail_tokens = 0;
  --plan.num_blocks;
  ++plan.num_new_blocks;  // in place of the copy, so the need stays
  plan.start = plan.num_blocks * block_size();
}

std::shared_ptr<Step> BlockPool::reserve(std::vector<std::shared_ptr<Sequence>> sequences,
                                         std::span<const int64_t> num_new_tokens) {
  if (sequences.empty()) throw UsageError("reserve: expected at least one sequence, got none");
  if (sequences.size() != num_new_tokens.size())
    throw UsageError("reserve: expected num_new_tokens for " + std::to_string(sequences.size()) +
                     " sequences, got " + std::to_string(num_new_tokens.size()));
  auto step = std::make_shared<Step>();
  step->pool = this;
  auto call = begin();
  std::vector<Plan> plans = plan(sequences, num_new_tokens);
  fit(plans);

  // Whatever may run out of memory comes first: room for what the rest of the call adds.
  step->rows.reserve(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    Plan& plan = plans[i];
    if (plan.drops_tail) plan.hit.run = {};
    make_room(*plan.sequence, plan.hit, plan.num_new_blocks);
    StepRow row{.sequence = std::move(sequences[i]),
                .start = plan.start,
                .end = plan.end,
                .num_blocks_before = plan.num_blocks,
                .was_preempted = plan.sequence->is_preempted,
                .copy = nullptr};
    if (plan.num_tail_tokens > 0) {
      row.copy = std::make_unique<TailCopy>(TailCopy{
          .sources = std::vector<BlockId>(groups_.size()),
          .destinations = std::vector<BlockId>(groups_.size()),
          .num_tokens = plan.num_tail_tokens,
      });
    }
    step->rows.push_back(std::move(row));
  }
  steps_.insert(step.get());

  // From here on nothing fails. References come first, so that what one sequence re-matches is not
  // evicted for another; tails are given up next, so that they can be.
  for (Plan& plan : plans) {
    if (!plan.sequence->is_preempted) continue;
    reference(*plan.sequence, std::move(plan.hit));
    plan.sequence->is_preempted = false;
  }
  for (const Plan& plan : plans) {
    if (!plan.drops_tail || plan.sequence->tables[0].size() == plan.num_blocks) continue;
    Sequence& sequence = *plan.sequence;
    size_t num_lost = sequence.num_counted - std::min(sequence.num_counted, plan.start);
    num_cached_tokens_ -= num_lost;
    sequence.num_hit -= num_lost;
    if (num_lost > 0) sequence.num_hit_with_kv = sequence.num_hit;
    sequence.num_counted -= num_lost;
    for (size_t* length : {&sequence.num_cached, &sequence.num_computed, &sequence.num_with_kv})
      *length = std::min(*length, plan.start);
    release_blocks(sequence, plan.num_blocks);
  }
  expire_due();
  make_room_in_quotas(plans);
  make_room_in_index(plans);
  for (size_t i = 0; i < plans.size(); ++i) take_pages(plans[i], step->rows[i]);
  return step;
}

/// Takes the pages of one plan; the pool has them.
void BlockPool::take_pages(const Plan& plan, StepRow& row) {
  Sequence& sequence = *plan.sequence;
  sequence.is_in_step = true;
  if (sequence.num_with_kv == 0) sequence.generation = generation_;  // nothing of an older one yet
  for (size_t g = 0; g < groups_.size(); ++g) {
    PageTable& table = sequence.tables[g];
    if (row.copy) {
      // The step keeps the reference on the source until the copy has surely run.
      BlockId& tail = table[plan.num_blocks - 1];
      sequence.table_id = ++num_table_ids_;
      row.copy->sources[g] = std::exchange(tail, take_page(g));
      row.copy->destinations[g] = tail;
    }
    for (size_t i = 0; i < plan.num_new_blocks; ++i) table.push_back(take_page(g));
  }
}

/// Writes one row of a block table, as far as it is not there.
void BlockPool::fill_row(const Sequence& sequence, size_t g, size_t num_blocks, int32_t* columns,
                         FilledRow& filled) const {
  const PageTable& table = sequence.tables[g];
  bool is_there = filled.table_id == sequence.table_id;
  if (is_there && table.num_dropped > filled.num_dropped)
    std::fill(columns + filled.num_dropped,
              columns + std::min(table.num_dropped, filled.num_columns), kNoBlock);
  for (size_t j = is_there ? filled.num_columns : 0; j < num_blocks; ++j) columns[j] = table[j];
  for (size_t j = num_blocks; j < filled.num_columns; ++j) columns[j] = kNoBlock;
  filled = {sequence.table_id, num_blocks, table.num_dropped};
}

/// Writes the slots of a row's tokens, and returns where those of the next one go.
int64_t* BlockPool::fill_slots(const StepRow& row, size_t g, int64_t* slots) const {
  const Sequence& sequence = *row.sequence;
  const PageTable& table = sequence.tables[g];
  for (size_t position = row.start; position < row.end; ++position) {
    // Where the K/V is there already (the last token of a full hit), the page is shared and must
    // not be written.
    bool has_kv = position < sequence.num_with_kv;
    *slots++ = has_kv ? -1
                      : int64_t{table[position / block_size()]} * block_size() +
                            static_cast<int64_t>(position % block_size());
  }
  return slots;
}

void BlockPool::prepare(Step& step, const TableBuffers& out) {
  std::lock_guard lock(mutex_);
  check_open(step, "prepare");
  size_t token = 0;
  out.query_start_loc[0] = 0;
  for (size_t i = 0; i < step.rows.size(); ++i) {
    const StepRow& row = step.rows[i];
    for (size_t position = row.start; position < row.end; ++position, ++token) {
      out.positions[token] = static_cast<int64_t>(position);
      out.token_ids[token] = row.sequence->tokens[position];
    }
    out.seq_lens[i] = static_cast<int32_t>(row.end);
    out.query_start_loc[i + 1] = static_cast<int32_t>(token);
  }
  size_t multiple = std::lcm(out.prefix_tokens, size_t{block_size()}) / block_size();
  for (size_t g = 0; g < groups_.size(); ++g) {
    const GroupBuffers& own = out.groups[g];
    int64_t* slots = own.slot_mapping;
    for (size_t i = 0; i < step.rows.size(); ++i) {
      const StepRow& row = step.rows[i];
      FilledRow unknown{.table_id = 0, .num_columns = out.num_columns};
      fill_row(*row.sequence, g, (row.end + block_size() - 1) / block_size(),
               own.block_table + i * out.num_columns,
               own.filled == nullptr ? unknown : own.filled[i]);
      slots = fill_slots(row, g, slots);
    }
    if (own.prefixes == nullptr) continue;
    size_t wanted = is_full(g) ? multiple : 0;
    if (!is_true(*own.prefixes, step, wanted)) plan_prefixes(step, g, wanted, *own.prefixes);
  }
  step.state = Step::State::kPrepared;
}

void BlockPool::check_open(const Step& step, const char* verb) const {
  if (step.pool != this)
    throw UsageError(std::string(verb) + ": expected a step of this pool, got one of another pool");
  if (!step.is_open())
    throw StateError(std::string(verb) + ": expected an open step, got one that has ended");
}

/// Checks that the step may end, and notes how.
void BlockPool::end_step(Step& step, Step::State state, const char* verb) {
  check_open(step, verb);
  step.state = state;
  steps_.erase(&step);
}

void BlockPool::commit(Step& step, std::span<const int64_t> num_accepted) {
  auto call = begin();
  if (!num_accepted.empty() && num_accepted.size() != step.rows.size())
    throw UsageError("commit: expected num_accepted for " + std::to_string(step.rows.size()) +
                     " sequences, got " + std::to_string(num_accepted.size()));
  for (size_t i = 0; i < num_accepted.size(); ++i) {
    int64_t num_new = static_cast<int64_t>(step.rows[i].end - step.rows[i].start);
    if (num_accepted[i] < 0 || num_accepted[i] > num_new)
      throw UsageError("commit: expected num_accepted from 0 to " + std::to_string(num_new) +
                       ", got " + std::to_string(num_accepted[i]) + ", at index " +
                       std::to_string(i));
  }
  end_step(step, Step::State::kCommitted, "commit");
  for (size_t i = 0; i < step.rows.size(); ++i) {
    StepRow& row = step.rows[i];
    Sequence& sequence = *row.sequence;
    sequence.is_in_step = false;
    sequence.num_counted = 0;  // what was found has been of use
    if (!sequence.is_closed) {
      size_t end =
          num_accepted.empty() ? row.end : row.start + static_cast<size_t>(num_accepted[i]);
      sequence.num_computed = end;
      sequence.num_with_kv = std::max(sequence.num_with_kv, end);
      if (end < row.end) cut(sequence, end);  // what was rejected goes, with the pages beyond
      publish(sequence);
      if (has_windows()) leave_window(sequence);
    }
    if (row.copy)
      for (size_t g = 0; g < groups_.size(); ++g) unref(g, row.copy->sources[g]);
    if (sequence.is_closed) {
      release_blocks(sequence, 0);
      sequences_.erase(&sequence);
    }
  }
}

void BlockPool::abandon(Step& step) {
  auto call = begin();
  end_step(step, Step::State::kAbandoned, "abandon");
  for (StepRow& row : step.rows) {
    Sequence& sequence = *row.sequence;
    sequence.is_in_step = false;
    release_blocks(sequence, row.num_blocks_before);
    if (row.copy) {
      for (size_t g = 0; g < groups_.size(); ++g) {
        sequence.tables[g].back() =
            row.copy->sources[g];  // the borrowed tail again, with the step's reference
        sequence.table_id = ++num_table_ids_;
        unref(g, row.copy->destinations[g]);
      }
    }
    if (row.was_preempted || sequence.is_closed) {
      release_blocks(sequence, 0);
      sequence.num_cached = sequence.num_computed = sequence.num_with_kv = 0;
      sequence.is_preempted = true;
    }
    if (sequence.is_closed) sequences_.erase(&sequence);
  }
}

}  // namespace pagedkv
