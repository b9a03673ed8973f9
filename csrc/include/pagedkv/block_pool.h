// The pool: all pages and the index over them, behind one lock.
//
// Every public member locks, and either does all of its work or throws and changes nothing.
// Eviction happens inside reserve(), allocate() and evict(), nowhere else.

#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "pagedkv/page_group.h"
#include "pagedkv/prefix_tree.h"
#include "pagedkv/sequence.h"

namespace pagedkv {

struct PoolConfig {
  std::vector<size_t> num_blocks;  // pages of each group
  uint32_t block_size = 16;
  std::vector<uint8_t> digest_namespace;
  bool prefix_caching = true;
  bool token_granular = true;
};

/// What the index holds of a prompt; block ids are those of group 0.
struct Match {
  size_t num_block_tokens = 0;
  size_t num_partial_tokens = 0;
  std::vector<BlockId> block_ids;       // of the whole blocks
  BlockId partial_block_id = kNoBlock;  // its first tokens continue the prompt
};

struct PoolStats {
  // Pages of group 0, by state.
  size_t num_blocks, num_free, num_writable, num_committed, num_evictable;
  size_t num_nodes;
  // Since construction.
  uint64_t num_evicted_blocks;
  uint64_t num_prompts, num_prompt_tokens, num_cached_tokens;
};

/// Where prepare() writes; shapes as in pagedkv.StepTables.
struct TableBuffers {
  int32_t* block_table;      // [num_rows, num_columns]
  size_t num_columns;        // >= Step::max_blocks()
  int64_t* slot_mapping;     // [num_tokens]
  int32_t* seq_lens;         // [num_rows]
  int32_t* query_start_loc;  // [num_rows + 1]
  int64_t* positions;        // [num_tokens]
  int64_t* token_ids;        // [num_tokens]
};

class BlockPool {
 public:
  explicit BlockPool(PoolConfig config);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  const PoolConfig& config() const { return config_; }
  uint32_t block_size() const { return config_.block_size; }

  // One request
  Match match(std::span<const Token> tokens, std::span<const BlockExtras> extras) const;
  std::shared_ptr<Sequence> open(std::vector<Token> tokens, std::vector<BlockExtras> extras);
  void append(std::span<const std::shared_ptr<Sequence>> sequences,
              std::span<const std::vector<Token>> tokens);
  void truncate(Sequence& sequence, size_t num_tokens);
  void preempt(Sequence& sequence);
  void close(Sequence& sequence);
  std::vector<Digest> block_digests(Sequence& sequence);

  // One step
  std::shared_ptr<Step> reserve(std::span<const std::shared_ptr<Sequence>> sequences,
                                std::span<const int64_t> num_new_tokens);
  void prepare(Step& step, const TableBuffers& out);
  void commit(Step& step, std::span<const int64_t> num_accepted);  // empty: all of them
  void abandon(Step& step);

  // Pages and the index as a whole
  std::vector<BlockId> allocate(int64_t num_blocks);
  void free(std::span<const int64_t> block_ids);
  size_t evict(int64_t num_blocks);
  bool reset();
  PoolStats stats() const;
  bool digest_of(int64_t block_id, Digest* digest);
  void check_integrity() const;

  /// Runs `read` under the lock, for the bindings' getters.
  template <typename F>
  auto locked(F&& read) const {
    std::lock_guard lock(mutex_);
    return read();
  }

 private:
  /// A match with the nodes still at hand.
  struct Hit {
    std::vector<NodeId> path;
    PrefixTree::Run run;
  };
  struct Plan;

  // All of the following expect the lock to be held.
  Hit find(std::span<const Token> tokens, std::span<const BlockExtras> extras) const;
  Hit find_for(const Sequence& sequence) const;
  void reference(Sequence& sequence, const Hit& hit);
  void release_blocks(Sequence& sequence, size_t num_kept);
  bool has_borrowed_tail(const Sequence& sequence) const;
  BlockId take_page(PageGroup& group);
  void evict_oldest(PageGroup& group);
  void cut(Sequence& sequence, size_t num_tokens);
  void publish(Sequence& sequence);
  void check_usable(const Sequence& sequence, const char* verb) const;

  std::vector<Plan> plan(std::span<const std::shared_ptr<Sequence>> sequences,
                         std::span<const int64_t> num_new_tokens) const;
  void fit(std::vector<Plan>& plans) const;
  void apply(const Plan& plan, StepRow& row);
  void end_step(Step& step, Step::State state, const char* verb);

  PoolConfig config_;
  mutable std::mutex mutex_;
  PrefixTree tree_;
  std::vector<PageGroup> groups_;
  std::unordered_set<BlockId> allocated_;    // pages of group 0 held through allocate()
  std::unordered_set<Sequence*> sequences_;  // those that may hold pages
  std::unordered_set<Step*> steps_;          // those that are open
  uint64_t num_evicted_blocks_ = 0, num_prompts_ = 0, num_prompt_tokens_ = 0,
           num_cached_tokens_ = 0;
};

}  // namespace pagedkv
