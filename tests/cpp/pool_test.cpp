// The pool's verbs, one promise a test, with the audit after every call.

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"
#include "noted_kv.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv::testing {
namespace {

/// A pool of small blocks with its noted pages; audits after every call.
class Pool {
 public:
  static constexpr uint32_t kBlockSize = 4;

  explicit Pool(size_t num_blocks, bool events = false)
      : pool(config(num_blocks, events)), kv(num_blocks, kBlockSize) {}

  template <typename F>
  auto audited(F&& call) {
    struct Audit {
      const BlockPool& pool;
      ~Audit() { pool.check_integrity(); }
    } audit{pool};
    return call();
  }

  Request open(std::vector<Token> tokens) { return open(Prompt{.tokens = std::move(tokens)}); }
  Request open(Prompt prompt) {
    return audited([&] { return Request(pool, std::move(prompt)); });
  }
  void compute(const Request& request) {
    const Request* one[] = {&request};
    audited([&] { testing::compute(pool, kv, one, tables); });
    kv.check(pool, request);
  }
  std::shared_ptr<Step> reserve(const Request& request, int64_t num_new_tokens) {
    const int64_t counts[] = {num_new_tokens};
    return audited([&] { return pool.reserve({request.sequence()}, counts); });
  }
  void execute(Step& step, const Request& request) {
    const Request* one[] = {&request};
    audited([&] { kv.execute(pool, step, one, tables); });
  }
  void append(Request& request, std::vector<Token> tokens) {
    Sequence* const one[] = {request.sequence().get()};
    audited([&] { pool.append(one, {&tokens, 1}); });
    request.append(tokens);
  }
  void close(const Request& request) {
    audited([&] { pool.close(*request.sequence()); });
  }
  /// Leaves a prompt in the cache.
  void remember(std::vector<Token> tokens) {
    Request request = open(std::move(tokens));
    compute(request);
    close(request);
  }
  size_t num_cached(const std::vector<Token>& tokens) {
    return audited([&] { return pool.match_length(tokens, {}); });
  }

  BlockPool pool;
  NotedKv kv;
  Tables tables;

 private:
  static PoolConfig config(size_t num_blocks, bool events) {
    PoolConfig config;
    config.num_blocks = {num_blocks};
    config.block_size = kBlockSize;
    config.events = events;
    config.clock = Clock::Kind::kManual;
    return config;
  }
};

std::vector<Token> count_up(size_t num_tokens, Token first = 0) {
  std::vector<Token> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

/// All that a refused call must leave alone.
auto seen(const BlockPool& pool, const Request& request) {
  PoolStats stats = pool.stats();
  return pool.locked([&] {
    const Sequence& s = *request.sequence();
    return std::tuple(s.tokens, s.path, s.tables, s.num_cached, s.num_computed, s.num_with_kv,
                      stats.num_free, stats.num_writable, stats.num_committed, stats.num_evictable,
                      stats.num_nodes, stats.num_evicted_by, stats.num_prompts,
                      stats.num_cached_tokens);
  });
}

// Opening and matching

TEST(a_full_hit_shares_every_page_and_computes_the_last_token) {
  Pool pool(8);
  pool.remember(count_up(8));
  Request request = pool.open(count_up(8));
  CHECK(request.sequence()->num_cached == 7);
  CHECK(pool.pool.stats().num_committed == 2);
  auto step = pool.reserve(request, 1);
  CHECK(!step->rows[0].copy);
  pool.execute(*step, request);
  pool.audited([&] { pool.pool.commit(*step, {}); });
  CHECK(pool.pool.stats().num_writable == 0);
  CHECK(pool.pool.stats().num_nodes == 2);
}

TEST(a_run_that_ends_inside_a_block_is_copied) {
  Pool pool(8);
  pool.remember(count_up(12));
  std::vector<Token> tokens = count_up(10);
  tokens.insert(tokens.end(), {100, 101, 102});
  Request request = pool.open(tokens);
  CHECK(request.sequence()->num_cached == 10);
  auto step = pool.reserve(request, 3);
  CHECK(step->rows[0].copy && step->rows[0].copy->num_tokens == 2);
  pool.execute(*step, request);
  pool.audited([&] { pool.pool.commit(*step, {}); });
  pool.kv.check(pool.pool, request);
  CHECK(pool.num_cached(tokens) == 12);  // the thirteenth token fills no block
  CHECK(pool.num_cached(count_up(12)) == 12);
}

TEST(a_salt_separates_from_the_block_where_it_enters) {
  Pool pool(16);
  Request first = pool.open({.tokens = count_up(12), .salt = 1, .salt_from = 5});
  pool.compute(first);
  Request second = pool.open({.tokens = count_up(12), .salt = 2, .salt_from = 5});
  CHECK(second.sequence()->num_cached == 4);
  pool.compute(second);
  Request third = pool.open({.tokens = count_up(12), .salt = 1, .salt_from = 4});
  CHECK(third.sequence()->num_cached == 11);
}

TEST(an_item_ends_the_run_and_a_cut_item_is_never_published) {
  Pool pool(16);
  Prompt picture{.tokens = count_up(8), .items = {{.start = 2, .length = 4, .content = 7}}};
  Request request = pool.open(picture);
  pool.compute(request);
  CHECK(pool.num_cached(count_up(8)) == 2);
  pool.audited([&] { pool.pool.truncate(*request.sequence(), 3); });
  request.truncate(3);
  pool.append(request, {3, 4, 5, 6, 7});
  pool.compute(request);
  CHECK(request.sequence()->path.empty());
  Request again = pool.open(picture);
  CHECK(again.sequence()->num_cached == 7);
  pool.compute(again);
}

TEST(match_changes_nothing_and_touch_makes_younger) {
  Pool pool(4);
  pool.remember(count_up(4, 0));
  pool.remember(count_up(4, 100));
  Match match = pool.audited([&] { return pool.pool.match(count_up(4), {}); });
  CHECK(match.num_block_tokens == 4 && match.block_ids.size() == 1);
  CHECK(pool.audited([&] { return pool.pool.touch(count_up(4), {}); }) == 4);
  CHECK(pool.audited([&] { return pool.pool.evict(1); }) == 1);
  CHECK(pool.num_cached(count_up(4, 0)) == 4);
  CHECK(pool.num_cached(count_up(4, 100)) == 0);
}

TEST(an_empty_prompt_is_refused) {
  Pool pool(4);
  CHECK_THROWS(UsageError, pool.pool.open({}, {}));
  CHECK(pool.pool.stats().num_prompts == 0);
}

// Steps

TEST(a_failed_reserve_changes_nothing) {
  Pool pool(3);
  pool.remember(count_up(8));
  Request request = pool.open(count_up(40));
  auto before = seen(pool.pool, request);
  CHECK_THROWS(OutOfBlocksError, pool.reserve(request, 32));
  CHECK_THROWS(UsageError, pool.reserve(request, 33));
  CHECK_THROWS(UsageError, pool.reserve(request, 0));
  CHECK_THROWS(UsageError, pool.pool.reserve({}, {}));
  CHECK(seen(pool.pool, request) == before);
  const int64_t ones[] = {1, 1};
  CHECK_THROWS(UsageError, pool.pool.reserve({request.sequence(), request.sequence()}, ones));
  CHECK(seen(pool.pool, request) == before);
}

TEST(a_run_is_given_up_when_its_page_is_needed) {
  Pool pool(2);
  pool.remember(count_up(8));
  std::vector<Token> tokens = {0, 1, 2, 3, 4, 5, 90, 91};
  Request request = pool.open(tokens);
  CHECK(request.sequence()->num_cached == 6);
  pool.compute(request);  // both pages are its own in the end
  CHECK(pool.num_cached(tokens) == 8);
  CHECK(pool.pool.stats().num_cached_tokens == 4);
}

TEST(rejected_tokens_are_gone_and_unpublished) {
  Pool pool(8);
  Request request = pool.open(count_up(6));
  pool.compute(request);
  pool.append(request, {6, 7, 8, 9});
  auto step = pool.reserve(request, 4);
  pool.execute(*step, request);
  const int64_t too_many[] = {5}, one[] = {1};
  CHECK_THROWS(UsageError, pool.pool.commit(*step, too_many));
  pool.audited([&] { pool.pool.commit(*step, one); });
  request.truncate(7);
  pool.kv.check(pool.pool, request);
  CHECK(request.sequence()->tokens.size() == 7);
  CHECK(request.sequence()->path.size() == 1);
  CHECK_THROWS(StateError, pool.pool.commit(*step, {}));
  CHECK_THROWS(StateError, pool.pool.abandon(*step));
}

TEST(an_abandoned_step_leaves_all_as_before_reserve) {
  Pool pool(8);
  pool.remember(count_up(12));
  Request request = pool.open({0, 1, 2, 3, 4, 5, 90, 91, 92});
  auto before = seen(pool.pool, request);
  auto step = pool.reserve(request, 3);
  pool.execute(*step, request);
  pool.audited([&] { pool.pool.abandon(*step); });
  CHECK(seen(pool.pool, request) == before);
  pool.kv.check(pool.pool, request);
}

TEST(a_sequence_closed_inside_its_step_is_released_at_the_end) {
  for (bool keep : {true, false}) {
    Pool pool(8);
    Request request = pool.open(count_up(6));
    auto step = pool.reserve(request, 6);
    pool.close(request);
    CHECK(pool.pool.stats().num_writable == 2);
    CHECK_THROWS(StateError, pool.close(request));
    pool.execute(*step, request);
    pool.audited([&] { keep ? pool.pool.commit(*step, {}) : pool.pool.abandon(*step); });
    CHECK(pool.pool.stats().num_free == 8);
  }
}

// Sequences

TEST(forks_share_pages_until_they_write) {
  Pool pool(8);
  Request parent = pool.open(count_up(6));
  pool.compute(parent);
  Request child = pool.audited([&] { return parent.forked(pool.pool); });
  CHECK(pool.pool.stats().num_free == 6);
  pool.append(parent, {100});
  pool.append(child, {200});
  pool.compute(parent);
  pool.compute(child);
  pool.kv.check(pool.pool, parent);
  CHECK(parent.sequence()->tables[0][0] == child.sequence()->tables[0][0]);
  CHECK(parent.sequence()->tables[0][1] != child.sequence()->tables[0][1]);
  pool.close(parent);
  pool.kv.check(pool.pool, child);
}

TEST(truncation_to_every_length_leaves_what_is_before) {
  for (size_t length = 0; length <= 13; ++length) {
    Pool pool(8);
    Request request = pool.open(count_up(13));
    pool.compute(request);
    CHECK_THROWS(UsageError, pool.pool.truncate(*request.sequence(), 14));
    pool.audited([&] { pool.pool.truncate(*request.sequence(), length); });
    request.truncate(length);
    pool.kv.check(pool.pool, request);
    CHECK(request.sequence()->num_computed == length);
    pool.append(request, {50, 51, 52});
    pool.compute(request);
    CHECK(pool.num_cached(count_up(12)) == 12);  // what it had published stays in the index
  }
}

TEST(a_preempted_sequence_finds_its_blocks_again) {
  Pool pool(8);
  Request request = pool.open(count_up(10));
  pool.compute(request);
  pool.audited([&] { pool.pool.preempt(*request.sequence()); });
  CHECK(pool.pool.stats().num_evictable == 2 && pool.pool.stats().num_free == 6);
  auto step = pool.reserve(request, 2);
  CHECK(step->rows[0].start == 8 && step->rows[0].end == 10);
  pool.execute(*step, request);
  pool.audited([&] { pool.pool.abandon(*step); });
  CHECK(request.sequence()->is_preempted);
  pool.compute(request);
  CHECK(pool.pool.stats().num_prompts == 1);
}

TEST(nothing_from_a_position_on_is_published) {
  Pool pool(8);
  Request request = pool.open(count_up(12));
  pool.audited([&] { pool.pool.stop_publishing(*request.sequence(), 6); });
  pool.compute(request);
  CHECK(pool.num_cached(count_up(12)) == 4);
  CHECK_THROWS(StateError, pool.pool.stop_publishing(*request.sequence(), 3));
}

TEST(sequences_and_steps_of_another_pool_are_refused) {
  Pool pool(4), other(4);
  Request request = other.open(count_up(3));
  auto step = other.reserve(request, 3);
  CHECK_THROWS(UsageError, pool.pool.close(*request.sequence()));
  CHECK_THROWS(UsageError, pool.pool.fork(*request.sequence()));
  CHECK_THROWS(UsageError, pool.pool.commit(*step, {}));
  CHECK_THROWS(UsageError, pool.pool.abandon(*step));
}

// Pages and the index

TEST(duplicates_of_a_block_share_a_node) {
  Pool pool(8);
  Request one = pool.open(count_up(8)), two = pool.open(count_up(8));
  pool.compute(one);
  pool.compute(two);
  CHECK(pool.pool.stats().num_nodes == 2 && pool.pool.stats().num_committed == 4);
  pool.close(one);
  CHECK(pool.audited([&] { return pool.pool.evict(8); }) == 2);
  CHECK(pool.num_cached(count_up(8)) == 8);  // the other's pages
  pool.kv.check(pool.pool, two);
}

TEST(leaves_are_evicted_before_their_parents) {
  Pool pool(8);
  pool.remember(count_up(16));
  for (size_t num_left : {3, 2, 1, 0}) {
    pool.audited([&] { return pool.pool.evict(1); });
    CHECK(pool.num_cached(count_up(16)) == 4 * num_left);
  }
  CHECK(pool.audited([&] { return pool.pool.evict(1); }) == 0);
  CHECK_THROWS(UsageError, pool.pool.evict(-1));
}

TEST(reset_wants_everything_released) {
  Pool pool(8);
  Request request = pool.open(count_up(8));
  pool.compute(request);
  CHECK(!pool.audited([&] { return pool.pool.reset(); }));
  CHECK(pool.num_cached(count_up(8)) == 8);
  pool.close(request);
  CHECK(pool.audited([&] { return pool.pool.reset(); }));
  CHECK(pool.num_cached(count_up(8)) == 0);
  CHECK(pool.pool.stats().num_free == 8);
}

TEST(another_generation_matches_nothing_of_the_one_before) {
  Pool pool(8);
  pool.remember(count_up(8, 50));
  Request request = pool.open(count_up(8));
  pool.compute(request);
  pool.audited([&] { pool.pool.bump_generation(); });
  CHECK(pool.num_cached(count_up(8)) == 0 && pool.num_cached(count_up(8, 50)) == 0);
  pool.kv.check(pool.pool, request);
  Request anew = pool.open(count_up(8));
  pool.compute(anew);
  pool.close(request);
  pool.close(anew);
  CHECK(pool.audited([&] { return pool.pool.evict(4); }) == 4);
  CHECK(pool.num_cached(count_up(8)) == 8);  // the old ones went first
}

TEST(allocated_pages_are_freed_once) {
  Pool pool(4);
  std::vector<BlockId> ids = pool.audited([&] { return pool.pool.allocate(3); });
  CHECK_THROWS(OutOfBlocksError, pool.pool.allocate(2));
  const int64_t twice[] = {ids[0], ids[1], ids[0]}, unknown[] = {4}, one[] = {ids[0]};
  CHECK_THROWS(StateError, pool.pool.free(twice));
  CHECK_THROWS(UsageError, pool.pool.free(unknown));
  CHECK(pool.pool.stats().num_free == 1);
  pool.audited([&] { pool.pool.free(one); });
  CHECK_THROWS(StateError, pool.pool.free(one));
  CHECK(pool.pool.stats().num_free == 2);
}

TEST(events_tell_of_the_index) {
  Pool pool(4, true);
  pool.remember(count_up(8));
  std::deque<Event> events = pool.pool.take_events();
  CHECK(events.size() == 1 && events[0].kind == Event::Kind::kStored);
  CHECK(events[0].digests.size() == 2 && events[0].tokens == count_up(8));
  CHECK(!events[0].has_parent);
  pool.audited([&] { return pool.pool.evict(1); });
  pool.audited([&] { pool.pool.bump_generation(); });
  pool.audited([&] { return pool.pool.evict(1); });  // of an older generation: no news
  std::deque<Event> more = pool.pool.take_events();
  CHECK(more.size() == 2);
  CHECK(more[0].kind == Event::Kind::kRemoved && more[0].digests[0] == events[0].digests[1]);
  CHECK(more[1].kind == Event::Kind::kCleared);
}

TEST(digests_of_pages_are_those_of_the_chain) {
  Pool pool(4);
  Request request = pool.open(count_up(11));
  pool.compute(request);
  std::vector<Digest> digests = pool.pool.block_digests(*request.sequence());
  CHECK(digests.size() == 2);
  Digest digest = chain_root(Pool::kBlockSize, {});
  for (size_t i = 0; i < 2; ++i) {
    std::vector<Token> tokens = count_up(4, Token(4 * i));
    digest = chain_next(digest, tokens, {});
    CHECK(digests[i] == digest);
    Digest of_page;
    CHECK(pool.pool.digest_of(request.sequence()->tables[0][i], &of_page) && of_page == digest);
  }
  Digest unused;
  CHECK(!pool.pool.digest_of(request.sequence()->tables[0][2], &unused));
  CHECK_THROWS(UsageError, pool.pool.digest_of(4, &unused));
}

// Retention

TEST(retained_blocks_of_an_older_generation_are_still_evicted_leaves_first) {
  Pool pool(8);
  pool.remember(count_up(12));
  RetentionRange all{.begin = 0, .end = 3, .priority = 70, .ttl = 0, .refreshes = false};
  pool.audited([&] { return pool.pool.retain(count_up(12), {}, all); });
  RetentionRange root{.begin = 0, .end = 1, .priority = 70, .ttl = 0, .refreshes = false};
  pool.remember(count_up(8, 50));
  all.ttl = kSecond;
  pool.audited([&] { return pool.pool.retain(count_up(8, 50), {}, all); });
  pool.audited([&] { return pool.pool.retain(count_up(8, 50), {}, root); });
  pool.audited([&] { pool.pool.bump_generation(); });
  pool.audited([&] { pool.pool.advance(2 * kSecond); });
  for (size_t i = 0; i < 5; ++i) CHECK(pool.audited([&] { return pool.pool.evict(1); }) == 1);
}

// Tenants

TEST(forks_of_a_block_above_the_quota_publish_one_page_once) {
  Pool pool(8);
  Prompt prompt{.tokens = count_up(8), .salt = 1};
  pool.audited([&] { pool.pool.set_quota(prompt.salt_bytes(), 1); });
  Request parent = pool.open(prompt);
  pool.compute(parent);
  CHECK(parent.sequence()->path.size() == 1);
  Request child = pool.audited([&] { return parent.forked(pool.pool); });
  pool.audited([&] { pool.pool.set_quota(prompt.salt_bytes(), kNoQuota); });
  for (Request* request : {&parent, &child}) {
    pool.append(*request, {90});
    pool.compute(*request);
    CHECK(request->sequence()->path.size() == 2);
  }
  CHECK(pool.pool.stats().num_committed == 2);
  CHECK(pool.pool.tenant_usage(prompt.salt_bytes()).num_blocks == 2);
}

// Look-up by digest

TEST(a_block_of_an_older_generation_does_not_hide_its_successor) {
  Pool pool(8);
  pool.remember(count_up(8));
  Request request = pool.open(count_up(8));
  std::vector<Digest> digests = pool.pool.block_digests(*request.sequence());
  pool.close(request);
  CHECK(pool.pool.lookup(digests).size() == 2);
  pool.audited([&] { pool.pool.bump_generation(); });
  CHECK(pool.pool.lookup(digests).empty());
  pool.remember(count_up(8));
  CHECK(pool.pool.lookup(digests).size() == 2);
  CHECK(pool.pool.stats().num_collisions == 0);
}

}  // namespace
}  // namespace pagedkv::testing
