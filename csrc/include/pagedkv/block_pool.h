// The pool: all pages and the index over them, behind one lock.
//
// Every public member locks, and either does all of its work or throws and changes nothing.
// Eviction happens inside reserve(), allocate() and evict(), nowhere else.

#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "pagedkv/clock.h"
#include "pagedkv/eviction_history.h"
#include "pagedkv/fork_guard.h"
#include "pagedkv/histogram.h"
#include "pagedkv/page_group.h"
#include "pagedkv/pool_lock.h"
#include "pagedkv/prefix_groups.h"
#include "pagedkv/prefix_tree.h"
#include "pagedkv/retention.h"
#include "pagedkv/sequence.h"
#include "pagedkv/tenants.h"

namespace pagedkv {

struct PoolConfig {
  std::vector<size_t> num_blocks;  // pages of each group
  // Tokens that a group's attention sees, the query's own included; 0: all. Groups that see all
  // come first. Empty: all of them do.
  std::vector<uint32_t> windows = {};
  uint32_t block_size = 16;
  std::vector<uint8_t> digest_namespace;
  bool prefix_caching = true;
  bool token_granular = true;
  bool events = false;
  size_t events_kept = 4096;  // changes of blocks that are kept until somebody takes them; at least
                              // twice as many as the index can have
  Clock::Kind clock = Clock::Kind::kMonotonic;
  bool broken_digests = false;  // for tests: every block has the same digest
  uint64_t seed = 0;  // of the shape of the tree: random, lest a client builds a list of it
  MakePolicy make_policy = &make_lru_policy;
  std::optional<uint32_t> equal_cost_tokens = std::nullopt;  // see PolicyConfig
};

/// What open() takes besides the prompt.
struct OpenOptions {
  std::vector<RetentionRange> retention = {};
  size_t publish_end = SIZE_MAX;  // no block that holds this position or a later one is published
  bool reuse = true;              // whether to look the prompt up
};

/// What the index holds of a prompt; block ids are those of group 0.
struct Match {
  size_t num_block_tokens = 0;
  size_t num_partial_tokens = 0;
  std::vector<BlockId> block_ids;       // of the whole blocks; kNoBlock in front of a window
  BlockId partial_block_id = kNoBlock;  // its first tokens continue the prompt
};

/// A change of the index.
struct Event {
  enum class Kind { kStored, kRemoved, kCleared };
  Kind kind;
  std::vector<Digest> digests = {};  // of the blocks stored, each the next one's parent; or removed
  bool has_parent = false;           // kStored: false when the first block begins a prompt
  Digest parent = {};                // kStored: of the first block
  std::vector<Token> tokens = {};    // kStored: of all blocks, one after the other
  std::vector<std::string> payloads = {};  // kStored: each block's encoded extras
};

/// Why a prompt is not cached beyond some point.
struct Explanation {
  enum class Reason {
    kHit,         // all of it is cached
    kShortTail,   // what is missing is shorter than a block
    kWindow,      // it is there, but not all that a window in front of it shows
    kEvicted,     // it was there
    kGeneration,  // it was there before bump_generation()
    kOtherSalt,   // another salt, adapter or extra of the user's own has it
    kDiffers,     // another block stands in its place
    kUnknown,     // it was never there, or that is too long ago
  };
  Reason reason = Reason::kUnknown;
  size_t num_block_tokens = 0, num_partial_tokens = 0;
  std::optional<Token> expected_token = {};  // kDiffers: what the cached block has there
  Nanoseconds evicted_at = 0;                // kEvicted
  EvictionReason evicted_by = {};
};

/// All pages of one group, [num_blocks] each.
struct PoolSnapshot {
  std::vector<uint8_t> state, priority;
  std::vector<int32_t> num_refs, depth, parent, eviction_rank, tenant;
  std::vector<float> retained_s, idle_s;
  std::vector<std::string> salts;
  double now_s = 0;
};

/// What the calls so far have cost; see PrefixTree.
struct PoolWork {
  uint64_t num_digests, num_steps;
};

struct TenantUsage {
  std::string salt;
  size_t num_blocks = 0;
  size_t quota = kNoQuota;

  bool is_there() const { return num_blocks > 0 || quota != kNoQuota; }
};

/// Pages of a group, by state.
struct PageCounts {
  size_t num_blocks, num_free, num_writable, num_committed, num_evictable, num_fenced;
};

/// The counts without a group's name are those of group 0.
struct PoolStats : PageCounts {
  std::vector<PageCounts> groups;
  size_t num_nodes;
  // Since construction.
  std::array<uint64_t, kNumEvictionReasons> num_evicted_by;
  uint64_t num_prompts, num_prompt_tokens, num_cached_tokens;
  uint64_t num_collisions;
  uint64_t num_dropped_events;      // changes of single blocks that nobody took in time
  Histogram residency, reuse_gaps;  // of blocks, in milliseconds

  uint64_t num_evicted() const {
    return std::accumulate(num_evicted_by.begin(), num_evicted_by.end(), uint64_t{0});
  }
};

/// What a row of a block table holds already.
struct FilledRow {
  uint64_t table_id;       // of the sequence whose pages it holds; 0: of none
  size_t num_columns;      // from there on all are -1,
  size_t num_dropped = 0;  // and up to here
};

/// The groups of a step, and what they were found from.
struct PrefixPlan {
  std::vector<uint64_t> table_ids;  // of the rows
  size_t multiple = 0;              // of blocks, at which groups begin and end
  PrefixGroups found;
  uint64_t num_plans = 0;  // how often `found` has changed
};

/// Where prepare() writes what each group has of its own; shapes as in pagedkv.GroupTables.
struct GroupBuffers {
  int32_t* block_table;   // [num_rows, num_columns]
  int64_t* slot_mapping;  // [num_tokens]
  // [num_rows]: only what these rows lack is written into block_table. Without it, all of them are.
  FilledRow* filled = nullptr;
  PrefixPlan* prefixes = nullptr;  // of an earlier step, if any; updated where it is no longer true
};

/// Where prepare() writes; shapes as in pagedkv.StepTables.
struct TableBuffers {
  std::span<const GroupBuffers> groups;
  size_t num_columns;        // >= Step::max_blocks()
  int32_t* seq_lens;         // [num_rows]
  int32_t* query_start_loc;  // [num_rows + 1]
  int64_t* positions;        // [num_tokens]
  int64_t* token_ids;        // [num_tokens]
  // Prefix groups that begin and end at multiples of so many tokens; 0: none are looked for. Behind
  // a window none are: what rows share there is short.
  size_t prefix_tokens = 0;
};

class BlockPool {
 public:
  explicit BlockPool(PoolConfig config);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  const PoolConfig& config() const { return config_; }
  uint32_t block_size() const { return config_.block_size; }
  size_t num_groups() const { return groups_.size(); }

  // One request
  Match match(std::span<const Token> tokens, std::span<const BlockExtras> extras) const;
  size_t match_length(std::span<const Token> tokens, std::span<const BlockExtras> extras) const;
  size_t touch(std::span<const Token> tokens, std::span<const BlockExtras> extras);
  std::shared_ptr<Sequence> open(std::vector<Token> tokens, std::vector<BlockExtras> extras,
                                 OpenOptions options = {});
  void append(std::span<Sequence* const> sequences, std::span<const std::vector<Token>> tokens);
  void append_each(std::span<Sequence* const> sequences, std::span<const Token> tokens);
  void truncate(Sequence& sequence, size_t num_tokens);
  void stop_publishing(Sequence& sequence, size_t position);
  std::shared_ptr<Sequence> fork(Sequence& sequence);
  void preempt(Sequence& sequence);
  void expect_reuse(Sequence& sequence, Nanoseconds within);
  void last_turn(Sequence& sequence);
  void forget_waiting();
  size_t await(std::span<const Token> tokens, std::span<const BlockExtras> extras);
  void close(Sequence& sequence);
  void close(std::span<Sequence* const> sequences);  // one after the other, each deepest first
  std::vector<Digest> block_digests(Sequence& sequence);

  size_t num_releasable(const Sequence& sequence) const;

  // What is worth keeping
  size_t retain(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                const RetentionRange& range);
  void set_quota(std::string_view salt, size_t quota);  // kNoQuota: none
  TenantUsage tenant_usage(std::string_view salt) const;
  std::vector<TenantUsage> tenants();
  std::shared_ptr<Fence> fence(std::span<Sequence* const> sequences);
  void release(Fence& fence);
  void advance(Nanoseconds span);
  Nanoseconds now() const;

  // One step
  std::shared_ptr<Step> reserve(std::vector<std::shared_ptr<Sequence>> sequences,
                                std::span<const int64_t> num_new_tokens);
  void prepare(Step& step, const TableBuffers& out);
  void commit(Step& step, std::span<const int64_t> num_accepted);  // empty: all of them
  void abandon(Step& step);

  // Pages and the index as a whole
  std::vector<BlockId> allocate(int64_t num_blocks, size_t group = 0);
  void free(std::span<const int64_t> block_ids, size_t group = 0);
  size_t evict(int64_t num_blocks);
  bool reset();
  void bump_generation();
  std::deque<Event> take_events();
  PoolStats stats() const;
  PoolWork work() const;
  bool digest_of(int64_t block_id, Digest* digest, size_t group = 0);
  std::vector<BlockId> lookup(std::span<const Digest> digests);
  Explanation explain(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                      bool across_tenants) const;
  PoolSnapshot snapshot(size_t group = 0);
  void check_integrity() const;

  /// Runs `read` under the lock, for the bindings' getters.
  template <typename F>
  auto locked(F&& read) const {
    std::lock_guard lock(mutex_);
    return read();
  }
  /// The same, but false at once where another call holds the lock.
  template <typename F>
  bool try_locked(F&& read) const {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) read();
    return lock.owns_lock();
  }

 private:
  /// What is looked up.
  struct Prompt {
    std::span<const Token> tokens;
    std::span<const BlockExtras> extras;
    uint32_t generation;
  };
  /// How a walk down the tree ended.
  struct Walk {
    PrefixTree::Run run;     // the common tokens behind the last node
    bool hints_hold = true;  // the next walk along the same path needs no other ones
  };
  /// A match with the nodes still at hand.
  struct Hit : Walk {
    std::vector<NodeId> path;
    size_t next_position = 0;  // behind the path, but for the last token, which is computed
  };
  struct Plan;
  struct Room;

  /// Pages that a call evicts at most before it gives others a turn.
  static constexpr size_t kBatch = 512;
  /// Pages that a call copies at most likewise.
  static constexpr size_t kSlice = 2048;

  /// Begins a call that changes something: takes the lock and reads the clock.
  std::unique_lock<PoolLock> begin();
  Retentions retentions_for(bool is_wanted) const;
  bool is_elsewhere(std::span<const Token> tokens, std::span<const BlockExtras> extras,
                    size_t num_cached_blocks) const;

  // All of the following expect the lock to be held.
  BlockKey plain_key_of(const Prompt& prompt, size_t index) const;
  void look_up(const BlockExtras& extras, BlockKey& key) const;
  BlockKey key_of(const Prompt& prompt, size_t index, size_t& next) const;
  static size_t first_extras(const Prompt& prompt, size_t index);
  static const BlockExtras* extras_of(const Prompt& prompt, size_t index, size_t& next);
  template <typename Visit>
  Walk walk(const Prompt& prompt, Visit&& visit) const;
  template <typename Reader, typename Visit>
  Walk walk_by(const Reader& tree, const Prompt& prompt, Visit&& visit) const;
  Hit find_known(const Prompt& prompt) const;
  void limit(Hit& hit) const;
  Hit find(const Prompt& prompt) const;
  Hit find_for(const Sequence& sequence) const;
  void make_room(Sequence& sequence, const Hit& hit, size_t num_new_blocks);
  void reference(Sequence& sequence, Hit hit) noexcept;
  void release_blocks(Sequence& sequence, size_t num_kept);
  bool has_borrowed_tail(const Sequence& sequence) const;
  void cut(Sequence& sequence, size_t num_tokens);

  // Windows; see windows.cpp.
  bool is_full(size_t group) const { return group < num_full_; }
  bool has_windows() const { return num_full_ < groups_.size(); }
  size_t first_seen(size_t group, size_t position) const;
  size_t next_position(const Sequence& sequence) const;
  template <typename HasPage>
  size_t longest_seen(size_t num_blocks, size_t last_position, HasPage&& has_page) const;
  void leave_window(Sequence& sequence);
  void look_back(Sequence& sequence, NodeId tail);
  bool has_page(NodeId node) const;
  void forget(NodeId node);
  void pin_path(Sequence& sequence);
  void make_room_in_index(std::span<const Plan> plans);

  void check_usable(const Sequence& sequence, const char* verb) const;
  void check_open(const Step& step, const char* verb) const;

  bool is_reachable(NodeId node) const { return tree_.generation(node) == generation_; }
  PageFacts facts(NodeId node) const;
  RequestFacts facts_of(Sequence& sequence, size_t group) const;
  void tell_found(Sequence& sequence);
  void mark_last_turn(const Sequence& sequence);
  /// Somebody has use for the block after all.
  void keep(NodeId node) {
    if (tree_.num_going_first() == 0 || !tree_.goes_first(node)) return;
    tree_.set_goes_first(node, false);
    note_changed(node);
  }
  /// What is known of a node's pages has changed, for those who copy it.
  void note_changed(NodeId node) {
    for (PageGroup& group : groups_) group.note_node(node);
  }
  void set_retention(NodeId node, const Retention& retention) {
    note_changed(node);
    retentions_.set(node, tree_.depth(node), retention);
  }
  void tell_stored(Sequence& sequence, size_t first);
  std::vector<BlockId> evictable_in_order(size_t group) const;
  struct GroupCopy;
  PageCopy page_copy(size_t group, BlockId id) const;
  template <typename F>
  void in_slices(size_t num_ids, F&& slice);
  GroupCopy copy_group(size_t group, std::deque<TenantUsage>* tenants);
  size_t copy_tenants(ChangedIds& changed, size_t most, std::deque<TenantUsage>& copies) const;
  void add_to_list(TenantId tenant, BlockId id);
  void end_list(TenantId tenant);
  BlockId take_page(size_t group);
  void ref(size_t group, BlockId id);
  void unref(size_t group, BlockId id);
  void ref_path(size_t group, std::span<const BlockId> ids);
  void unref_path(const Sequence& sequence, size_t group, size_t first_index);
  void touch_path(const Hit& hit);
  void evict_page(size_t group, BlockId id, EvictionReason reason);
  void drop_page(size_t group, BlockId id, EvictionReason reason);
  void drop_others(NodeId node, EvictionReason reason);

  void publish(Sequence& sequence);
  bool holds_block(const Sequence& sequence, size_t index) const;
  void attach_others(const Sequence& sequence, size_t index, NodeId node);
  TenantId tenant_for(NodeId parent, const BlockExtras* extras) const;

  // Events; see events.cpp.
  size_t most_noted() const;
  bool makes_room_for_note(size_t num_blocks);
  void note_stored(std::span<const NodeId> nodes);
  void add_stored(std::span<const NodeId> nodes);
  void note_removed(NodeId node);
  void note_cleared();
  size_t tell_anew(NodeId node, size_t most);
  void tell_more();

  void claim_published(const Sequence& sequence, size_t index, bool is_new);
  void push_again(NodeId node);
  void raise(NodeId node, const Retention& claim);
  void retain_hit(const Sequence& sequence);
  void expire_due();
  bool can_spare(BlockId id) const;
  void make_room_in_quotas(std::span<const Plan> plans);

  std::vector<Plan> plan(std::span<const std::shared_ptr<Sequence>> sequences,
                         std::span<const int64_t> num_new_tokens);
  void fit(std::vector<Plan>& plans) const;
  Room room_for(std::vector<Plan>& plans, size_t group) const;
  BlockId source_of(const Plan& plan, size_t group) const;
  void drop_tail(Plan& plan, std::vector<Room>& rooms) const;
  void take_pages(const Plan& plan, StepRow& row);
  void fill_row(const Sequence& sequence, size_t group, size_t num_blocks, int32_t* columns,
                FilledRow& filled) const;
  int64_t* fill_slots(const StepRow& row, size_t group, int64_t* slots) const;
  bool is_true(const PrefixPlan& prefixes, const Step& step, size_t multiple) const;
  void plan_prefixes(const Step& step, size_t group, size_t multiple, PrefixPlan& prefixes) const;
  void end_step(Step& step, Step::State state, const char* verb);

  PoolConfig config_;
  mutable PoolLock mutex_;
  mutable std::mutex copying_;  // held by the one call that copies in slices; taken before the lock
  ForkGuard fork_guard_{copying_, mutex_};
  PrefixTree tree_;
  std::vector<PageGroup> groups_;
  size_t num_full_;  // the leading groups, whose attention sees all
  Retentions retentions_;
  Tenants tenants_;  // of the pages of group 0
  Clock clock_;
  Nanoseconds now_ = 0;  // when the current call began
  Milliseconds now_ms_ = 0;
  std::vector<std::vector<bool>> allocated_;  // pages of each group held through allocate()
  std::unordered_set<Sequence*> sequences_;   // those that may hold pages
  std::unordered_set<Step*> steps_;           // those that are open
  std::unordered_set<Fence*> fences_;         // those that are not released
  std::deque<Event> events_;
  std::unique_ptr<std::deque<Event>> dropped_events_;  // are freed by and by
  enum class Telling { kAll, kLate, kAnew } telling_ = Telling::kAll;
  size_t num_noted_ = 0;       // blocks in events_
  std::vector<bool> is_told_;  // kAnew: by node
  NodeId next_to_tell_ = kRoot;
  uint64_t num_dropped_notes_ = 0;
  EvictionHistory history_;
  uint32_t generation_ = 0;
  uint64_t num_plannings_ = 0, num_table_ids_ = 0;
  std::array<uint64_t, kNumEvictionReasons> num_evicted_by_{};
  uint64_t num_prompts_ = 0, num_prompt_tokens_ = 0, num_cached_tokens_ = 0;
  Histogram residency_, reuse_gaps_;
};

}  // namespace pagedkv
