// Groups with and without windows, played at random with the audit after every call: what the pages
// of a window hold is checked in Python, that no memory is misused here.

#include <algorithm>
#include <memory>
#include <vector>

#include "check.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

/// Buffers for prepare() that hold what they were last given, for any number of groups.
struct GroupRoom {
  static constexpr size_t kRows = 8, kColumns = 64, kTokens = 512;

  explicit GroupRoom(size_t num_groups)
      : tables(num_groups, std::vector<int32_t>(kRows * kColumns, kNoBlock)),
        slots(num_groups, std::vector<int64_t>(kTokens)),
        filled(num_groups, std::vector<FilledRow>(kRows, {.table_id = 0, .num_columns = kColumns})),
        plans(num_groups) {
    for (size_t g = 0; g < num_groups; ++g)
      groups.push_back({tables[g].data(), slots[g].data(), filled[g].data(), &plans[g]});
  }
  TableBuffers buffers() {
    return {.groups = groups,
            .num_columns = kColumns,
            .seq_lens = seq_lens.data(),
            .query_start_loc = starts.data(),
            .positions = positions.data(),
            .token_ids = token_ids.data(),
            .prefix_tokens = 4};
  }

  std::vector<std::vector<int32_t>> tables;
  std::vector<std::vector<int64_t>> slots;
  std::vector<std::vector<FilledRow>> filled;
  std::vector<PrefixPlan> plans;
  std::vector<GroupBuffers> groups;
  std::vector<int32_t> seq_lens = std::vector<int32_t>(kRows), starts = std::vector<int32_t>(9);
  std::vector<int64_t> positions = std::vector<int64_t>(kTokens), token_ids = positions;
};

class GroupPlay {
 public:
  GroupPlay(std::vector<uint32_t> windows, uint64_t seed)
      : random_(seed), pool_(config(std::move(windows), random_)), room_(pool_.num_groups()) {}

  void run(size_t num_calls) {
    for (size_t i = 0; i < num_calls; ++i) {
      call();
      pool_.check_integrity();
    }
    for (const auto& sequence : sequences_) pool_.close(*sequence);
    pool_.check_integrity();
    CHECK(pool_.reset());
    pool_.check_integrity();
    PoolStats stats = pool_.stats();
    CHECK(stats.num_nodes == 0);
    for (const PageCounts& counts : stats.groups) CHECK(counts.num_free == counts.num_blocks);
  }

 private:
  static PoolConfig config(std::vector<uint32_t> windows, Random& random) {
    PoolConfig config;
    for (size_t g = 0; g < windows.size(); ++g) config.num_blocks.push_back(6 + random.below(20));
    config.windows = std::move(windows);
    config.block_size = 1 + random.below(4);
    config.events = true;
    return config;
  }

  std::vector<Token> tokens(size_t most) {
    std::vector<Token> tokens(1 + random_.below(most));
    for (Token& token : tokens) token = random_.below(2);
    return tokens;
  }

  void call() {
    if (sequences_.size() < 2 || (sequences_.size() < 5 && random_.one_in(4))) {
      sequences_.push_back(pool_.open(tokens(30), {}));
      return;
    }
    size_t at = random_.below(sequences_.size());
    std::shared_ptr<Sequence> sequence = sequences_[at];
    Sequence* const one[] = {sequence.get()};
    switch (random_.below(9)) {
      case 0:
        pool_.close(*sequence);
        sequences_.erase(sequences_.begin() + at);
        return;
      case 1:
        return pool_.truncate(*sequence, 1 + random_.below(sequence->tokens.size()));
      case 2:
        return pool_.preempt(*sequence);
      case 3:
        if (sequences_.size() < 5) sequences_.push_back(pool_.fork(*sequence));
        return;
      case 4:
        pool_.evict(random_.below(4));
        return;
      case 5:
        if (random_.one_in(4)) pool_.bump_generation();
        pool_.touch(tokens(30), {});
        return;
      case 6: {
        std::shared_ptr<Fence> fence = pool_.fence(one);
        pool_.check_integrity();
        return pool_.release(*fence);
      }
      default: {
        std::vector<Token> more = tokens(5);
        pool_.append(one, {&more, 1});
        return step(sequence);
      }
    }
  }

  void step(const std::shared_ptr<Sequence>& sequence) {
    if (sequence->tokens.size() > 50) return pool_.truncate(*sequence, 20);
    const int64_t count[] = {
        1 + int64_t(random_.below(sequence->tokens.size() - sequence->num_computed))};
    std::shared_ptr<Step> step;
    try {
      step = pool_.reserve({sequence}, count);
    } catch (const OutOfBlocksError&) {
      return;
    }
    pool_.check_integrity();
    pool_.prepare(*step, room_.buffers());
    for (size_t g = 0; g < pool_.num_groups(); ++g) {
      const PageTable& table = sequence->tables[g];
      size_t num_columns = std::min(table.size(), step->max_blocks());
      CHECK(std::equal(table.begin(), table.begin() + num_columns, room_.tables[g].begin()));
    }
    if (random_.one_in(5)) return pool_.abandon(*step);
    size_t num_new = step->num_tokens();
    const int64_t accepted[] = {
        int64_t(num_new - (random_.one_in(3) ? random_.below(num_new) : 0))};
    pool_.commit(*step, accepted);
  }

  Random random_;
  BlockPool pool_;
  GroupRoom room_;
  std::vector<std::shared_ptr<Sequence>> sequences_;
};

TEST(groups_of_any_windows_pass_the_audit_after_every_call) {
  const std::vector<std::vector<uint32_t>> sets = {{0, 6}, {5}, {1}, {3, 9}, {0, 0}, {0, 2, 11}};
  for (const std::vector<uint32_t>& windows : sets)
    for (uint64_t seed = 0; seed < 20; ++seed) GroupPlay(windows, seed).run(150);
}

}  // namespace
}  // namespace pagedkv::testing
