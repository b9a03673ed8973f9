#include "verbs.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "noted_kv.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv::testing {
namespace {

class Script {
 public:
  explicit Script(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool is_over() const { return bytes_.empty(); }
  /// From 0 to `bound` - 1.
  size_t below(size_t bound) {
    if (bytes_.empty()) return 0;
    size_t value = bytes_.front() % bound;
    bytes_ = bytes_.subspan(1);
    return value;
  }
  bool flip() { return below(2) == 1; }
  template <typename T>
  T& pick(std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  std::span<const uint8_t> bytes_;
};

PoolConfig read_config(Script& script) {
  PoolConfig config;
  config.block_size = std::array{4, 4, 3, 1, 2, 16}[script.below(6)];
  config.num_blocks = {3 + script.below(14)};
  size_t options = script.below(16);
  config.prefix_caching = options != 15;
  config.token_granular = options % 4 != 3;
  config.broken_digests = options == 13;
  config.events = options % 2 == 0;
  config.clock = Clock::Kind::kManual;
  return config;
}

class Play {
 public:
  explicit Play(std::span<const uint8_t> bytes)
      : script_(bytes),
        pool_(read_config(script_)),
        block_size_(pool_.block_size()),
        num_blocks_(pool_.config().num_blocks[0]),
        root_(chain_root(pool_.block_size(), {})),
        kv_(num_blocks_, block_size_),
        published_(num_blocks_),
        check_every_(std::array{1, 1, 4, 16}[script_.below(4)]) {}

  Played run() {
    while (!script_.is_over()) {
      call_a_verb();
      if (++played_.num_calls % check_every_ == 0) check();
    }
    check();
    give_everything_back();
    return played_;
  }

 private:
  /// A step with the places of its requests.
  struct OpenStep {
    std::shared_ptr<Step> step;
    std::vector<std::shared_ptr<Request>> requests;
    bool is_executed = false;
  };
  struct FencedSlot {
    BlockId id;
    size_t offset;
    uint64_t cause;
  };
  /// A fence and what it keeps.
  struct Fenced {
    std::shared_ptr<Fence> fence;
    std::vector<FencedSlot> slots;
  };
  /// What a published page must hold for as long as it is published.
  struct Published {
    Digest digest;
    uint32_t generation;
    std::string salt;  // of whom it belongs to
    std::vector<uint64_t> slots;
  };

  void call_a_verb() {
    // What makes plays go somewhere more often than the rest.
    static constexpr void (Play::* kVerbs[])() = {
        // clang-format off
        &Play::serve, &Play::serve, &Play::serve, &Play::serve,
        &Play::decode, &Play::decode, &Play::decode, &Play::decode,
        &Play::open, &Play::open,
        &Play::append, &Play::append_each, &Play::truncate, &Play::stop_publishing,
        &Play::fork, &Play::fork, &Play::preempt, &Play::close, &Play::close,
        &Play::reserve, &Play::reserve, &Play::execute, &Play::commit, &Play::commit,
        &Play::abandon, &Play::allocate, &Play::free, &Play::free, &Play::evict,
        &Play::look, &Play::look_up, &Play::explain,
        &Play::retain, &Play::retain, &Play::advance, &Play::set_quota, &Play::set_quota,
        &Play::fence, &Play::release, &Play::renew,
        // clang-format on
    };
    (this->*kVerbs[script_.below(std::size(kVerbs))])();
  }

  // Arguments

  /// Tokens of an earlier prompt up to some position, and some of its own.
  Prompt read_prompt() {
    Prompt prompt;
    if (!past_.empty() && script_.below(4) != 0) {
      prompt = script_.pick(past_);
      cut(prompt, script_.below(prompt.tokens.size() + 1));
    } else {
      prompt.salt = static_cast<uint8_t>(std::array{0, 1, 1, 0, 2}[script_.below(5)]);
      if (prompt.salt != 0 && script_.flip()) prompt.salt_from = script_.below(3 * block_size_);
    }
    size_t num_more = script_.below(2 * block_size_ + 2), start = prompt.tokens.size();
    for (size_t i = 0; i < num_more; ++i) prompt.tokens.push_back(Token(script_.below(3)));
    if (num_more > 0 && script_.below(5) == 0) {
      // An item's content says how long it is.
      uint8_t content = static_cast<uint8_t>(script_.below(3));
      size_t begin = start + script_.below(num_more), length = 1 + 2 * content;
      if (begin + length <= prompt.tokens.size()) prompt.items.push_back({begin, length, content});
    }
    if (past_.size() < 8) {
      past_.push_back(prompt);
    } else {
      script_.pick(past_) = prompt;
    }
    return prompt;
  }

  /// An item that is cut in its middle is left out: no prompt can ask for it.
  static void cut(Prompt& prompt, size_t num_tokens) {
    std::erase_if(prompt.items,
                  [&](const Item& item) { return item.start + item.length > num_tokens; });
    prompt.tokens.resize(num_tokens);
  }

  RetentionRange read_range() {
    RetentionRange range{};
    range.begin = script_.below(4);
    range.end = range.begin + 1 + script_.below(5);
    range.priority = std::array<Priority, 6>{70, 70, 10, 100, 35, 0}[script_.below(6)];
    range.ttl = Nanoseconds(script_.below(5)) * kSecond;
    range.refreshes = range.ttl > 0 && script_.flip();
    return range;
  }

  std::vector<Token> read_tokens() {
    std::vector<Token> tokens(script_.below(block_size_ + 3));
    for (Token& token : tokens) token = Token(script_.below(3));
    return tokens;
  }

  /// One of the requests, closed ones included; none when there are none.
  std::shared_ptr<Request> read_request() {
    return requests_.empty() ? nullptr : script_.pick(requests_);
  }

  std::vector<std::shared_ptr<Request>> read_requests() {
    std::vector<std::shared_ptr<Request>> chosen;
    size_t mask = script_.below(256);
    for (size_t i = 0; i < requests_.size(); ++i)
      if (mask >> (i % 8) & 1) chosen.push_back(requests_[i]);
    return chosen;
  }

  // Verbs

  void open() { open_one(); }

  /// Null when it was refused.
  std::shared_ptr<Request> open_one() {
    if (requests_.size() > 6) drop_a_request();
    Prompt prompt = read_prompt();
    OpenOptions options;
    if (script_.below(3) == 0)
      for (size_t i = script_.below(3); i > 0; --i) options.retention.push_back(read_range());
    if (script_.below(8) == 0) options.publish_end = script_.below(prompt.tokens.size() + 2);
    std::shared_ptr<Request> request;
    attempt([&] {
      request = std::make_shared<Request>(pool_, std::move(prompt), std::move(options));
      requests_.push_back(request);
    });
    return request;
  }

  /// Keeps the pool from being locked by requests that nobody goes on with.
  void drop_a_request() {
    for (size_t i = 0; i < requests_.size(); ++i) {
      const Sequence& sequence = *requests_[i]->sequence();
      if (sequence.is_in_step) continue;
      if (!sequence.is_closed) pool_.close(*requests_[i]->sequence());
      requests_.erase(requests_.begin() + i);
      return;
    }
  }

  /// A whole request, as engines serve it.
  void serve() {
    std::shared_ptr<Request> request = open_one();
    if (!request) return;
    compute({request});
    if (script_.flip()) pool_.close(*request->sequence());
  }

  /// One step of decoding: a token more for each request, and all that is left is computed.
  void decode() {
    std::vector<std::shared_ptr<Request>> requests = read_requests();
    std::erase_if(requests, [](const auto& request) {
      return request->sequence()->is_closed || request->sequence()->is_in_step;
    });
    for (const auto& request : requests) {
      const Token token = Token(script_.below(3));
      Sequence* const one[] = {request->sequence().get()};
      pool_.append_each(one, {&token, 1});
      request->append({&token, 1});
    }
    compute(requests);
  }

  void compute(const std::vector<std::shared_ptr<Request>>& requests) {
    OpenStep step{.step = nullptr, .requests = requests};
    std::vector<std::shared_ptr<Sequence>> sequences;
    std::vector<int64_t> counts;
    for (const auto& request : requests) {
      sequences.push_back(request->sequence());
      counts.push_back(int64_t(request->num_tokens() - request->sequence()->num_computed));
    }
    attempt([&] { step.step = pool_.reserve(sequences, counts); });
    if (!step.step) return;
    execute(step);
    pool_.commit(*step.step, {});
    for (const auto& request : requests) note_published(*request);
  }

  void append() {
    std::vector<std::shared_ptr<Request>> requests = read_requests();
    std::vector<Sequence*> sequences;
    std::vector<std::vector<Token>> tokens;
    for (const auto& request : requests) {
      sequences.push_back(request->sequence().get());
      tokens.push_back(read_tokens());
    }
    attempt([&] {
      pool_.append(sequences, tokens);
      for (size_t i = 0; i < requests.size(); ++i) requests[i]->append(tokens[i]);
    });
  }

  void append_each() {
    std::vector<std::shared_ptr<Request>> requests = read_requests();
    std::vector<Sequence*> sequences;
    std::vector<Token> tokens;
    for (const auto& request : requests) {
      sequences.push_back(request->sequence().get());
      tokens.push_back(Token(script_.below(3)));
    }
    attempt([&] {
      pool_.append_each(sequences, tokens);
      for (size_t i = 0; i < requests.size(); ++i) requests[i]->append({&tokens[i], 1});
    });
  }

  void truncate() {
    std::shared_ptr<Request> request = read_request();
    if (!request) return;
    size_t num_tokens = script_.below(request->num_tokens() + 2);
    attempt([&] {
      pool_.truncate(*request->sequence(), num_tokens);
      request->truncate(num_tokens);
    });
  }

  void stop_publishing() {
    std::shared_ptr<Request> request = read_request();
    if (!request) return;
    size_t position = script_.below(request->num_tokens() + 2);
    attempt([&] { pool_.stop_publishing(*request->sequence(), position); });
  }

  void fork() {
    std::shared_ptr<Request> request = read_request();
    if (!request || requests_.size() > 6) return;
    attempt([&] { requests_.push_back(std::make_shared<Request>(request->forked(pool_))); });
  }

  void preempt() {
    std::shared_ptr<Request> request = read_request();
    if (request) attempt([&] { pool_.preempt(*request->sequence()); });
  }

  void close() {
    std::shared_ptr<Request> request = read_request();
    if (request) attempt([&] { pool_.close(*request->sequence()); });
  }

  void reserve() {
    OpenStep step{.step = nullptr, .requests = read_requests()};
    bool all = script_.flip();
    std::vector<std::shared_ptr<Sequence>> sequences;
    std::vector<int64_t> counts;
    for (const auto& request : step.requests) {
      const Sequence& sequence = *request->sequence();
      // Those that would only be refused are left out now and then.
      bool fits = !sequence.is_closed && !sequence.is_in_step &&
                  sequence.num_computed < sequence.tokens.size();
      if (!fits && script_.below(8) != 0) continue;
      size_t num_left = sequence.tokens.size() - sequence.num_computed;
      sequences.push_back(request->sequence());
      counts.push_back(int64_t(all ? num_left : script_.below(num_left + 2)));
    }
    std::erase_if(step.requests, [&](const auto& request) {
      return std::ranges::find(sequences, request->sequence()) == sequences.end();
    });
    attempt([&] { step.step = pool_.reserve(sequences, counts); });
    if (step.step) steps_.push_back(std::move(step));
  }

  void execute() {
    if (!steps_.empty()) execute(script_.pick(steps_));
  }

  void execute(OpenStep& step) {
    forget_evicted();
    // A page that is going to be written has one owner and is not in the index.
    std::vector<uint32_t> num_owners(num_blocks_);
    for (const Sequence* sequence : sequences())
      for (BlockId id : sequence->tables[0]) ++num_owners[id];
    for (const StepRow& row : step.step->rows) {
      if (row.copy) ++played_.num_copies;
      const std::vector<BlockId>& table = row.sequence->tables[0];
      for (size_t i = std::max(row.start, row.sequence->num_with_kv); i < row.end; ++i) {
        CHECK(num_owners[table[i / block_size_]] == 1);
        CHECK(!published_[table[i / block_size_]]);
      }
    }
    std::vector<const Request*> requests;
    for (const auto& request : step.requests) requests.push_back(request.get());
    kv_.execute(pool_, *step.step, requests, tables_);
    step.is_executed = true;
  }

  void commit() {
    if (steps_.empty()) return;
    size_t index = script_.below(steps_.size());
    if (!steps_[index].is_executed) execute(steps_[index]);
    OpenStep& step = steps_[index];
    std::vector<int64_t> num_accepted;
    if (script_.flip())
      for (const StepRow& row : step.step->rows)
        num_accepted.push_back(int64_t(script_.below(row.end - row.start + 2)));
    std::vector<size_t> ends;
    for (size_t i = 0; i < step.step->rows.size(); ++i) {
      const StepRow& row = step.step->rows[i];
      ends.push_back(num_accepted.empty() ? row.end : row.start + size_t(num_accepted[i]));
    }
    attempt([&] {
      pool_.commit(*step.step, num_accepted);
      for (size_t i = 0; i < ends.size(); ++i) {
        if (step.step->rows[i].sequence->is_closed) continue;
        if (ends[i] < step.step->rows[i].end) step.requests[i]->truncate(ends[i]);
        note_published(*step.requests[i]);
      }
    });
    if (!step.step->is_open()) steps_.erase(steps_.begin() + index);
  }

  void abandon() {
    if (steps_.empty()) return;
    size_t index = script_.below(steps_.size());
    pool_.abandon(*steps_[index].step);
    steps_.erase(steps_.begin() + index);
  }

  void allocate() {
    // Seldom so many that nothing else fits any more.
    size_t num_blocks = script_.below(script_.below(8) == 0 ? num_blocks_ + 2 : 3);
    attempt([&] {
      std::vector<BlockId> ids = pool_.allocate(int64_t(num_blocks));
      kv_.spoil(ids);
      raw_.insert(raw_.end(), ids.begin(), ids.end());
    });
  }

  void free() {
    std::vector<int64_t> ids;
    size_t num_blocks = script_.below(4);
    for (size_t i = 0; i < num_blocks; ++i) {
      if (raw_.empty() || script_.below(8) == 0) {
        ids.push_back(int64_t(script_.below(num_blocks_ + 1)) - 1);
      } else {
        ids.push_back(script_.pick(raw_));
      }
    }
    attempt([&] {
      pool_.free(ids);
      std::erase_if(raw_, [&](BlockId id) { return std::ranges::find(ids, id) != ids.end(); });
    });
  }

  void evict() {
    size_t num_blocks = script_.below(5);
    size_t num_expected = std::min(num_blocks, pool_.stats().num_evictable);
    // A page map tells what goes first; taking one ends what is due, so not always.
    PoolSnapshot before;
    if (script_.flip()) before = checked_snapshot();
    CHECK(pool_.evict(int64_t(num_blocks)) == num_expected);
    for (size_t i = 0; i < before.eviction_rank.size(); ++i) {
      if (before.eviction_rank[i] < 0) continue;
      bool stays = size_t(before.eviction_rank[i]) >= num_expected;
      Digest digest;
      CHECK(pool_.digest_of(BlockId(i), &digest) == stays);
    }
  }

  /// What changes nothing, or only the order of eviction.
  void look() {
    Prompt prompt = read_prompt();
    std::vector<BlockExtras> extras = prompt.extras(block_size_);
    Match match = pool_.match(prompt.tokens, extras);
    CHECK(pool_.match_length(prompt.tokens, extras) ==
          match.num_block_tokens + match.num_partial_tokens);
    std::vector<BlockId> ids = match.block_ids;
    ids.push_back(match.partial_block_id);
    CHECK(kv_.serves(prompt, generation_, ids, match.num_block_tokens + match.num_partial_tokens));
    if (script_.flip()) CHECK(pool_.touch(prompt.tokens, extras) == match.num_block_tokens);
    if (std::shared_ptr<Request> request = read_request()) {
      std::vector<Digest> digests = pool_.block_digests(*request->sequence());
      CHECK(digests.size() <= request->num_tokens() / block_size_);
      if (!pool_.config().broken_digests)
        CHECK(digests == digests_of(request->prompt(), digests.size()));
      CHECK(pool_.num_releasable(*request->sequence()) == num_releasable(*request->sequence()));
    }
  }

  void look_up() {
    std::shared_ptr<Request> request = read_request();
    if (!request) return;
    size_t num_blocks = request->num_tokens() / block_size_;
    std::vector<Digest> digests = digests_of(request->prompt(), num_blocks);
    forget_evicted();
    std::vector<BlockId> ids = pool_.lookup(digests);
    CHECK(ids.size() <= digests.size());
    for (size_t i = 0; i < digests.size(); ++i) {
      // With broken digests one digest may name several blocks; such a one finds none.
      std::set<std::vector<uint64_t>> named;
      for (const std::optional<Published>& page : published_)
        if (page && page->digest == digests[i] && page->generation == generation_)
          named.insert(page->slots);
      CHECK((i < ids.size()) == (named.size() == 1));
      if (i == ids.size()) return;
      CHECK(published_[ids[i]] && published_[ids[i]]->digest == digests[i]);
      CHECK(published_[ids[i]]->generation == generation_);
    }
  }

  void explain() {
    Prompt prompt = read_prompt();
    if (prompt.tokens.empty()) return;
    std::vector<BlockExtras> extras = prompt.extras(block_size_);
    Match match = pool_.match(prompt.tokens, extras);
    Explanation why = pool_.explain(prompt.tokens, extras, script_.flip());
    CHECK(why.num_block_tokens == match.num_block_tokens);
    CHECK(why.num_partial_tokens == match.num_partial_tokens);
    size_t num_cached = why.num_block_tokens + why.num_partial_tokens;
    CHECK((why.reason == Explanation::Reason::kHit) == (num_cached == prompt.tokens.size()));
    if (why.expected_token) CHECK(why.reason == Explanation::Reason::kDiffers);
    CHECK(why.evicted_at <= pool_.now());
  }

  void retain() {
    Prompt prompt = read_prompt();
    std::vector<BlockExtras> extras = prompt.extras(block_size_);
    RetentionRange range = read_range();
    size_t end =
        std::min(range.end, pool_.match(prompt.tokens, extras).num_block_tokens / block_size_);
    size_t num_tokens = (end - std::min(end, range.begin)) * block_size_;
    CHECK(pool_.retain(prompt.tokens, extras, range) == num_tokens);
  }

  void advance() { pool_.advance(Nanoseconds(script_.below(4)) * kSecond); }

  void set_quota() {
    Prompt prompt;
    prompt.salt = uint8_t(1 + script_.below(2));
    size_t quota =
        std::array{kNoQuota, size_t{0}, size_t{1}, size_t{2}, size_t{4}}[script_.below(5)];
    check();  // for what the quota before allowed
    pool_.set_quota(prompt.salt_bytes(), quota);
    CHECK(pool_.tenant_usage(prompt.salt_bytes()).quota == quota);
  }

  void fence() {
    if (fences_.size() >= 3) return;
    std::vector<std::shared_ptr<Request>> requests = read_requests();
    std::vector<Sequence*> sequences;
    for (const auto& request : requests) sequences.push_back(request->sequence().get());
    Fenced fenced;
    attempt([&] { fenced.fence = pool_.fence(sequences); });
    if (!fenced.fence) return;
    for (Sequence* sequence : sequences) {
      if (sequence->is_in_step) continue;  // its step may still write
      for (size_t i = 0; i < sequence->num_with_kv; ++i) {
        BlockId id = sequence->tables[0][i / block_size_];
        fenced.slots.push_back({id, i % block_size_, kv_.page(id)[i % block_size_]});
      }
    }
    fences_.push_back(std::move(fenced));
  }

  void release() {
    if (fences_.empty()) return;
    size_t index = script_.below(fences_.size());
    pool_.release(*fences_[index].fence);
    attempt([&] {
      pool_.release(*fences_[index].fence);
      CHECK(!"a fence is released once");
    });
    fences_.erase(fences_.begin() + index);
  }

  /// The verbs that end what was before; rare, for most of a play needs what was before.
  void renew() {
    if (script_.below(4) == 0) {
      PoolStats stats = pool_.stats();
      bool is_idle = stats.num_writable == 0 && stats.num_committed == 0;
      CHECK(pool_.reset() == is_idle);
      generation_ += is_idle;
    } else if (script_.below(2) == 0) {
      pool_.bump_generation();
      ++generation_;
    } else {
      replay_events();
    }
  }

  // Checks

  /// Runs a call that may be refused, and sees to it that a refused one changes nothing.
  template <typename F>
  void attempt(F&& call) {
    auto before = seen();
    bool is_refused = false;
    try {
      call();
    } catch (const OutOfBlocksError& error) {
      CHECK(error.needed > error.free + error.evictable);
      is_refused = true;
    } catch (const UsageError&) {
      is_refused = true;
    } catch (const StateError&) {
      is_refused = true;
    }
    if (!is_refused) return;
    ++played_.num_refused;
    CHECK(seen() == before);
  }

  /// Pages that nobody but the sequence holds.
  size_t num_releasable(const Sequence& sequence) const {
    std::map<BlockId, size_t> num_holders;
    for (const Sequence* other : sequences())
      for (BlockId id : other->tables[0]) ++num_holders[id];
    for (const OpenStep& step : steps_)
      for (const StepRow& row : step.step->rows)
        if (row.copy) ++num_holders[row.copy->sources[0]];
    for (const Fenced& fenced : fences_)
      for (BlockId id : fenced.fence->pages[0]) ++num_holders[id];
    return size_t(std::ranges::count_if(sequence.tables[0],
                                        [&](BlockId id) { return num_holders[id] == 1; }));
  }

  /// All sequences that may hold pages.
  std::vector<const Sequence*> sequences() const {
    std::set<const Sequence*> found;
    for (const auto& request : requests_) found.insert(request->sequence().get());
    for (const OpenStep& step : steps_)
      for (const auto& request : step.requests) found.insert(request->sequence().get());
    return {found.begin(), found.end()};
  }

  using SeenSequence = std::tuple<std::vector<Token>, std::vector<NodeId>, std::vector<BlockId>,
                                  std::array<size_t, 5>, std::array<bool, 3>>;
  std::pair<std::vector<uint64_t>, std::vector<SeenSequence>> seen() const {
    PoolStats s = pool_.stats();
    std::vector<SeenSequence> of_sequences;
    for (const Sequence* q : sequences())
      of_sequences.push_back(
          {q->tokens,
           q->path,
           q->tables[0],
           {q->num_cached, q->num_counted, q->num_computed, q->num_with_kv, q->publish_end},
           {q->is_preempted, q->is_closed, q->is_in_step}});
    return {
        {s.num_free, s.num_writable, s.num_committed, s.num_evictable, s.num_nodes, s.num_evicted(),
         s.num_fenced, s.num_prompts, s.num_prompt_tokens, s.num_cached_tokens},
        std::move(of_sequences)};
  }

  void check() {
    pool_.check_integrity();
    PoolStats stats = pool_.stats();
    CHECK(stats.num_blocks == num_blocks_);
    CHECK(stats.num_free + stats.num_writable + stats.num_committed + stats.num_evictable ==
          num_blocks_);
    CHECK(stats.num_cached_tokens <= stats.num_prompt_tokens);
    for (const auto& request : requests_) {
      const Sequence& sequence = *request->sequence();
      CHECK(sequence.tokens == request->prompt().tokens);
      if (!sequence.is_closed && !sequence.is_in_step) kv_.check(pool_, *request);
    }
    forget_evicted();
    size_t num_published = 0;
    for (size_t i = 0; i < num_blocks_; ++i) {
      if (!published_[i]) continue;
      ++num_published;
      Digest digest;
      CHECK(pool_.digest_of(BlockId(i), &digest) && digest == published_[i]->digest);
      CHECK(std::ranges::equal(kv_.page(BlockId(i)), published_[i]->slots));
    }
    CHECK(num_published == stats.num_committed + stats.num_evictable);
    for (const Fenced& fenced : fences_)
      for (const FencedSlot& slot : fenced.slots)
        CHECK(kv_.page(slot.id)[slot.offset] == slot.cause);
    check_tenants();
  }

  void check_tenants() {
    std::map<std::string, size_t> num_blocks;
    for (const std::optional<Published>& page : published_)
      if (page && !page->salt.empty()) ++num_blocks[page->salt];
    for (const TenantUsage& tenant : pool_.tenants()) {
      CHECK(num_blocks[tenant.salt] == tenant.num_blocks);
      // A quota that was lowered leaves what is there, but nothing is added.
      CHECK(tenant.num_blocks <= std::max(tenant.quota, num_owned_[tenant.salt]));
    }
    num_owned_ = std::move(num_blocks);
  }

  PoolSnapshot checked_snapshot() {
    forget_evicted();
    PoolStats stats = pool_.stats();
    PoolSnapshot map = pool_.snapshot();
    std::array<size_t, 4> num_in_state{};
    std::vector<bool> has_rank(stats.num_evictable);
    for (size_t i = 0; i < num_blocks_; ++i) {
      ++num_in_state[map.state[i]];
      CHECK((map.depth[i] >= 0) == published_[i].has_value());
      CHECK((map.eviction_rank[i] >= 0) == (map.state[i] == uint8_t(PageState::kEvictable)));
      if (map.eviction_rank[i] >= 0) {
        CHECK(!has_rank.at(map.eviction_rank[i]));
        has_rank[map.eviction_rank[i]] = true;
      }
      std::string salt = map.tenant[i] < 0 ? "" : map.salts.at(map.tenant[i]);
      CHECK(!published_[i] || salt == published_[i]->salt);
    }
    CHECK(num_in_state ==
          std::array{stats.num_free, stats.num_writable, stats.num_committed, stats.num_evictable});
    return map;
  }

  void forget_evicted() {
    Digest digest;
    for (size_t i = 0; i < num_blocks_; ++i)
      if (!pool_.digest_of(BlockId(i), &digest)) published_[i].reset();
  }

  /// Notes what the published pages of a request hold, and that it is what they should.
  void note_published(const Request& request) {
    forget_evicted();
    const Sequence& sequence = *request.sequence();
    std::vector<Digest> digests = digests_of(request.prompt(), sequence.path.size());
    std::vector<uint64_t> causes = request.causes(block_size_);
    for (size_t i = 0; i < sequence.path.size(); ++i) {
      BlockId id = sequence.tables[0][i];
      std::span<const uint64_t> slots = kv_.page(id);
      CHECK(std::equal(slots.begin(), slots.end(), causes.begin() + i * block_size_));
      if (published_[id]) continue;
      const Prompt& prompt = request.prompt();
      bool is_salted = prompt.salt != 0 && i >= prompt.salt_from / block_size_;
      published_[id] = {digests[i],
                        sequence.generation,
                        is_salted ? prompt.salt_bytes() : "",
                        {slots.begin(), slots.end()}};
    }
  }

  std::vector<Digest> digests_of(const Prompt& prompt, size_t num_blocks) const {
    std::vector<Digest> digests(num_blocks);
    if (pool_.config().broken_digests) return digests;
    std::vector<BlockExtras> extras = prompt.extras(block_size_);
    std::vector<BlockPayload> payloads;
    for (const BlockExtras& block : extras)
      payloads.push_back(
          {block.block_index,
           {reinterpret_cast<const uint8_t*>(block.payload.data()), block.payload.size()}});
    const ChainedPrompt chained{std::span(prompt.tokens).first(num_blocks * block_size_), payloads,
                                digests};
    chain_prompts(root_, block_size_, {&chained, 1});
    return digests;
  }

  /// The events replayed from empty give exactly the index.
  void replay_events() {
    if (!pool_.config().events) return;
    forget_evicted();
    for (const Event& event : pool_.take_events()) {
      if (event.kind == Event::Kind::kCleared) replayed_.clear();
      for (const Digest& digest : event.digests) {
        bool is_news = event.kind == Event::Kind::kStored ? replayed_.insert(digest).second
                                                          : replayed_.erase(digest) == 1;
        CHECK(is_news);
      }
    }
    std::set<Digest> index;
    for (size_t i = 0; i < num_blocks_; ++i) {
      Digest digest;
      if (pool_.digest_of(BlockId(i), &digest) && published_[i]->generation == generation_)
        index.insert(digest);
    }
    CHECK(replayed_ == index);
  }

  void give_everything_back() {
    replay_events();
    for (const OpenStep& step : steps_) pool_.abandon(*step.step);
    steps_.clear();
    for (const Fenced& fenced : fences_) pool_.release(*fenced.fence);
    fences_.clear();
    for (const auto& request : requests_)
      if (!request->sequence()->is_closed) pool_.close(*request->sequence());
    pool_.free(std::vector<int64_t>(raw_.begin(), raw_.end()));
    check();
    PoolStats stats = pool_.stats();
    played_.num_evicted = stats.num_evicted();
    played_.num_cached_tokens = stats.num_cached_tokens;
    CHECK(stats.num_writable == 0 && stats.num_committed == 0);
    CHECK(pool_.evict(1) == std::min<size_t>(1, stats.num_evictable));
    check();
    replay_events();
    CHECK(pool_.reset());
    check();
    CHECK(std::ranges::all_of(pool_.tenants(), [](const TenantUsage& tenant) {
      return tenant.num_blocks == 0 && tenant.quota != kNoQuota;
    }));
    CHECK(pool_.stats().num_free == num_blocks_ && pool_.stats().num_nodes == 0);
  }

  Script script_;
  BlockPool pool_;
  size_t block_size_, num_blocks_;
  Digest root_;
  NotedKv kv_;
  Tables tables_;
  uint32_t generation_ = 0;
  std::vector<Prompt> past_;
  std::vector<std::shared_ptr<Request>> requests_;
  std::vector<OpenStep> steps_;
  std::vector<Fenced> fences_;
  std::vector<BlockId> raw_;  // of allocate()
  std::vector<std::optional<Published>> published_;
  size_t check_every_;                       // so many calls
  std::map<std::string, size_t> num_owned_;  // pages of each tenant after the last call
  std::set<Digest> replayed_;
  Played played_;
};

}  // namespace

Played play(std::span<const uint8_t> bytes) { return Play(bytes).run(); }

}  // namespace pagedkv::testing
