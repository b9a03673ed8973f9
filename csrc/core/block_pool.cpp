// Requests. Matching, publication, pages, steps and the audit have files of their own.

#include "pagedkv/block_pool.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "pagedkv/error.h"

namespace pagedkv {
namespace {

/// Without windows written out, all groups see all.
PoolConfig completed(PoolConfig config) {
  config.windows.resize(config.num_blocks.size());
  return config;
}

/// Groups that see all come first.
size_t num_full_of(const PoolConfig& config) {
  return std::ranges::find_if(config.windows, [](uint32_t window) { return window > 0; }) -
         config.windows.begin();
}

/// Where some group sees all, every node has a page in it. Where all have windows, nodes outlive
/// their pages, and are far smaller than these.
size_t max_nodes_of(const PoolConfig& config) {
  constexpr size_t kNodesPerPage = 4, kMinNodes = 1024;
  const std::vector<size_t>& counts = config.num_blocks;
  if (size_t num_full = num_full_of(config); num_full > 0)
    return *std::min_element(counts.begin(), counts.begin() + num_full);
  return std::max(kMinNodes,
                  kNodesPerPage * std::accumulate(counts.begin(), counts.end(), size_t{0}));
}

/// Makes room for `num_more`, at least doubling, so that appending them can't fail.
template <typename T>
void grow_for(std::vector<T>& values, size_t num_more) {
  size_t size = values.size() + num_more;
  if (size > values.capacity()) values.reserve(std::max(size, 2 * values.capacity()));
}

}  // namespace

BlockPool::BlockPool(PoolConfig config)
    : config_(completed(std::move(config))),
      tree_(config_.block_size, max_nodes_of(config_),
            chain_root(config_.block_size, config_.digest_namespace), config_.broken_digests,
            config_.seed),
      num_full_(num_full_of(config_)),
      retentions_(tree_.capacity()),
      tenants_(config_.num_blocks[0]),
      clock_(config_.clock),
      history_(config_.num_blocks[0]) {
  groups_.reserve(config_.num_blocks.size());
  for (size_t g = 0; g < config_.num_blocks.size(); ++g) {
    // Behind a window a page may go before those that follow it, so there is no leaf to ask for.
    MakePolicy make_policy = is_full(g) ? config_.make_policy : &make_lru_policy;
    size_t num_blocks = config_.num_blocks[g];
    groups_.emplace_back(num_blocks, tree_.capacity(),
                         make_policy({num_blocks, config_.block_size, config_.equal_cost_tokens}));
    allocated_.emplace_back(num_blocks);
  }
}

std::unique_lock<PoolLock> BlockPool::begin() {
  std::unique_lock lock(mutex_);
  now_ = clock_.now();
  now_ms_ = static_cast<Milliseconds>(now_ / 1'000'000);
  return lock;
}

Nanoseconds BlockPool::now() const {
  std::lock_guard lock(mutex_);
  return clock_.now();
}

void BlockPool::advance(Nanoseconds span) {
  std::lock_guard lock(mutex_);
  clock_.advance(span);
}

PageFacts BlockPool::facts(NodeId node) const {
  Priority priority = retentions_.priority(node);
  if (priority == kDefaultPriority && tree_.goes_first(node)) priority = 0;
  return {is_reachable(node), priority, tree_.depth(node), now_ms_};
}

void BlockPool::ref(size_t g, BlockId id) {
  PageGroup& group = groups_[g];
  if (!group.ref(id)) return;
  reuse_gaps_.add(now_ms_ - group.last_use(id));
  if (g == 0) tenants_.remove(tree_.tenant(group.node(id)), id);
}

void BlockPool::unref(size_t g, BlockId id) {
  PageGroup& group = groups_[g];
  NodeId node = group.node(id);
  bool is_evictable = group.unref(id, node == kNoNode ? PageFacts{} : facts(node), now_ms_);
  if (is_evictable && g == 0) tenants_.push(tree_.tenant(node), id);
}

/// References pages of a path, none twice.
void BlockPool::ref_path(size_t g, std::span<const BlockId> ids) {
  PageGroup& group = groups_[g];
  // The pages of a path were mostly released together, so they are counted together.
  Milliseconds gap = 0;
  size_t num_counted = 0;
  group.ref_path(ids, [&](BlockId id) {
    Milliseconds own = now_ms_ - group.last_use(id);
    if (own != gap) reuse_gaps_.add(gap, std::exchange(num_counted, 0));
    gap = own;
    ++num_counted;
    if (g == 0 && tenants_.has_lists()) tenants_.remove(tree_.tenant(group.node(id)), id);
  });
  reuse_gaps_.add(gap, num_counted);
}

/// Gives back the published pages of a sequence from the block `first_index` on, deepest first. It
/// must hold them.
void BlockPool::unref_path(const Sequence& sequence, size_t g, size_t first_index) {
  std::span<const BlockId> ids{sequence.tables[g].data(), sequence.path.size()};
  if (retentions_.is_active() || tree_.num_going_first() > 0) {  // their facts differ
    for (size_t size = ids.size(); size > first_index; --size) unref(g, ids[size - 1]);
    return;
  }
  // All nodes of a path are of one generation.
  PageFacts first{sequence.generation == generation_, kDefaultPriority,
                  static_cast<uint32_t>(first_index), now_ms_};
  groups_[g].unref_path(
      ids.subspan(first_index), first, now_ms_, [&](std::span<const BlockId> evictable) {
        if (g > 0 || !tenants_.has_lists()) return;
        for (size_t i = evictable.size(); i > 0; --i)
          tenants_.push(tree_.tenant(groups_[g].node(evictable[i - 1])), evictable[i - 1]);
      });
}

/// Makes room for a hit and `num_new_blocks`, so that taking them can't fail.
void BlockPool::make_room(Sequence& sequence, const Hit& hit, size_t num_new_blocks) {
  for (PageTable& table : sequence.tables) grow_for(table, hit.path.size() + 1 + num_new_blocks);
}

/// Takes references on the pages of a hit, for a sequence that holds none and has room.
void BlockPool::reference(Sequence& sequence, Hit hit) noexcept {
  for (size_t g = 0; g < groups_.size(); ++g) {
    PageTable& table = sequence.tables[g];
    table.resize(table.num_dropped = first_seen(g, hit.next_position), kNoBlock);
    groups_[g].append_first_pages(std::span(hit.path).subspan(table.num_dropped), table);
    if (hit.run.num_tokens > 0) table.push_back(groups_[g].first_page(hit.run.node));
    ref_path(g, table.held());
  }
  sequence.table_id = ++num_table_ids_;
  for (size_t index = 0; !hit.hints_hold && index < hit.path.size(); ++index)
    tree_.leave_hint(hit.path, index);
  for (NodeId node : hit.path) keep(node);
  sequence.path = std::move(hit.path);
  sequence.generation = generation_;
  sequence.num_with_kv = sequence.path.size() * block_size() + hit.run.num_tokens;
  sequence.num_cached = sequence.num_computed =
      std::min(sequence.num_with_kv, sequence.tokens.size() - 1);
  pin_path(sequence);
}

std::shared_ptr<Sequence> BlockPool::open(std::vector<Token> tokens,
                                          std::vector<BlockExtras> extras, OpenOptions options) {
  if (tokens.empty()) throw UsageError("open: expected at least one token, got none");
  auto sequence = std::make_shared<Sequence>();
  sequence->pool = this;
  sequence->tokens = std::move(tokens);
  sequence->extras = std::move(extras);
  sequence->tables.resize(groups_.size());
  sequence->notes.resize(groups_.size());
  sequence->retention = std::move(options.retention);
  sequence->publish_end = options.publish_end;
  sequence->num_prompt = sequence->tokens.size();
  if (config_.prefix_caching)
    sequence->num_publishable = std::min(sequence->num_prompt, options.publish_end);
  Retentions room = retentions_for(!sequence->retention.empty());
  auto call = begin();
  retentions_.activate(std::move(room));
  sequence->opened = now_;
  Hit hit = options.reuse ? find_for(*sequence) : Hit{};
  make_room(*sequence, hit, 0);
  sequences_.insert(sequence.get());
  reference(*sequence, std::move(hit));
  retain_hit(*sequence);
  sequence->number = ++num_prompts_;
  tell_found(*sequence);
  if (options.reuse) num_prompt_tokens_ += sequence->num_prompt;  // else nothing was asked for
  num_cached_tokens_ += sequence->num_hit = sequence->num_counted = sequence->num_cached;
  sequence->num_hit_with_kv = sequence->num_with_kv;
  return sequence;
}

void BlockPool::check_usable(const Sequence& sequence, const char* verb) const {
  if (sequence.pool != this)
    throw UsageError(std::string(verb) +
                     ": expected a sequence of this pool, got one of another pool");
  if (sequence.is_closed)
    throw StateError(std::string(verb) + ": expected an open sequence, got a closed one");
  if (sequence.is_in_step)
    throw StateError(std::string(verb) +
                     ": expected a sequence outside a step, got one whose step is still open");
}

void BlockPool::append(std::span<Sequence* const> sequences,
                       std::span<const std::vector<Token>> tokens) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < sequences.size(); ++i) {
    check_usable(*sequences[i], "append");
    grow_for(sequences[i]->tokens, tokens[i].size());
  }
  for (size_t i = 0; i < sequences.size(); ++i)
    sequences[i]->tokens.insert(sequences[i]->tokens.end(), tokens[i].begin(), tokens[i].end());
}

void BlockPool::append_each(std::span<Sequence* const> sequences, std::span<const Token> tokens) {
  std::lock_guard lock(mutex_);
  for (Sequence* sequence : sequences) {
    check_usable(*sequence, "append");
    grow_for(sequence->tokens, 1);
  }
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i]->tokens.push_back(tokens[i]);
}

void BlockPool::truncate(Sequence& sequence, size_t num_tokens) {
  auto call = begin();
  check_usable(sequence, "truncate");
  if (num_tokens > sequence.tokens.size())
    throw UsageError("truncate: expected num_tokens from 0 to " +
                     std::to_string(sequence.tokens.size()) + ", got " +
                     std::to_string(num_tokens));
  // With its first token, the range that must not be published is gone too.
  if (num_tokens <= sequence.publish_end && sequence.publish_end < sequence.tokens.size())
    sequence.publish_end = SIZE_MAX;
  cut(sequence, num_tokens);
}

/// Forgets the tokens from `num_tokens` on, with their pages, their digests and their extras.
void BlockPool::cut(Sequence& sequence, size_t num_tokens) {
  if (num_tokens == sequence.tokens.size()) return;
  size_t num_whole_blocks = num_tokens / block_size();
  sequence.tokens.resize(num_tokens);
  sequence.digests.resize(std::min(sequence.digests.size(), num_whole_blocks));
  for (size_t* length : {&sequence.num_cached, &sequence.num_computed, &sequence.num_with_kv})
    *length = std::min(*length, num_tokens);
  NodeId tail = num_whole_blocks < sequence.path.size() ? sequence.path[num_whole_blocks] : kNoNode;
  release_blocks(sequence, (num_tokens + block_size() - 1) / block_size());
  if (has_windows()) look_back(sequence, tail);

  for (BlockExtras& extras : sequence.extras) {
    if (extras.first_offset == block_size() || extras.block_index < num_whole_blocks) continue;
    size_t first_position = size_t{extras.block_index} * block_size() + extras.first_offset;
    extras.is_torn = first_position < num_tokens;
    if (extras.is_torn) continue;
    extras.payload = extras.scope;  // its items are gone; the salt and the adapter stay
    extras.first_offset = block_size();
  }
}

void BlockPool::stop_publishing(Sequence& sequence, size_t position) {
  std::lock_guard lock(mutex_);
  check_usable(sequence, "no_cache");
  if (position / block_size() < sequence.path.size())
    throw StateError("no_cache: expected a position from the " +
                     std::to_string(sequence.path.size() * block_size()) +
                     " published tokens on, got " + std::to_string(position));
  sequence.publish_end = std::min(sequence.publish_end, position);
}

std::shared_ptr<Sequence> BlockPool::fork(Sequence& sequence) {
  auto call = begin();
  check_usable(sequence, "fork");
  auto child = std::make_shared<Sequence>(sequence);
  child->num_counted = 0;
  child->table_id = ++num_table_ids_;
  sequences_.insert(child.get());
  for (size_t g = 0; g < groups_.size(); ++g)
    for (BlockId id : child->tables[g].held()) ref(g, id);
  if (child->pinned != kNoNode) tree_.pin(child->pinned);
  return child;
}

void BlockPool::preempt(Sequence& sequence) {
  auto call = begin();
  check_usable(sequence, "preempt");
  release_blocks(sequence, 0);
  sequence.num_cached = sequence.num_computed = sequence.num_with_kv = 0;
  sequence.num_counted = 0;
  sequence.is_preempted = true;
}

void BlockPool::close(Sequence& sequence) {
  Sequence* one = &sequence;
  close({&one, 1});
}

void BlockPool::close(std::span<Sequence* const> sequences) {
  auto call = begin();
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    bool is_foreign = sequence.pool != this;
    if (!is_foreign && !sequence.is_closed) {
      sequence.is_closed = true;  // so that one given twice is noticed
      continue;
    }
    while (i > 0) sequences[--i]->is_closed = false;
    if (is_foreign)
      throw UsageError("close: expected a sequence of this pool, got one of another pool");
    throw StateError("close: expected an open sequence, got a closed one");
  }
  for (Sequence* sequence : sequences) {
    if (sequence->is_in_step) continue;  // the step still uses the pages; its end releases them
    release_blocks(*sequence, 0);
    sequences_.erase(sequence);
  }
}

size_t BlockPool::num_releasable(const Sequence& sequence) const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::ranges::count_if(
      sequence.tables[0].held(), [&](BlockId id) { return groups_[0].refs(id) == 1; }));
}

/// Gives back all pages but the first `num_kept` blocks', deepest first.
void BlockPool::release_blocks(Sequence& sequence, size_t num_kept) {
  size_t size = sequence.tables[0].size(), num_on_path = sequence.path.size();
  if (size > num_kept) sequence.table_id = ++num_table_ids_;
  if (sequence.is_closed && sequence.is_last_turn) mark_last_turn(sequence);
  for (size_t g = 0; g < groups_.size() && size > num_kept; ++g) {
    PageTable& table = sequence.tables[g];
    size_t first = std::max(num_kept, table.num_dropped);
    for (size_t i = size; i > std::max(first, num_on_path); --i) unref(g, table[i - 1]);
    if (num_on_path > first) unref_path(sequence, g, first);
    table.resize(num_kept);
    table.num_dropped = std::min(table.num_dropped, num_kept);
  }
  size_t num_published = std::min(num_kept, sequence.tokens.size() / block_size());
  if (sequence.path.size() > num_published) sequence.path.resize(num_published);
  pin_path(sequence);
}

std::vector<Digest> BlockPool::block_digests(Sequence& sequence) {
  std::lock_guard lock(mutex_);
  std::vector<Digest>& digests = sequence.digests;
  Prompt prompt{sequence.tokens, sequence.extras, sequence.generation};
  size_t next_extras = 0;
  for (size_t index = digests.size(); index < sequence.tokens.size() / block_size(); ++index) {
    if (index < sequence.path.size()) {
      digests.push_back(tree_.digest(sequence.path[index]));
      continue;
    }
    const BlockExtras* extras = extras_of(prompt, index, next_extras);
    if (extras != nullptr && extras->is_torn) break;
    digests.push_back(tree_.next_digest(index == 0 ? tree_.digest(kRoot) : digests.back(),
                                        prompt.tokens.subspan(index * block_size(), block_size()),
                                        extras == nullptr ? std::string_view() : extras->payload));
  }
  return digests;
}

}  // namespace pagedkv
