// Many threads on one small pool: stress [THREADS [ROUNDS [SEED]]].
//
// Workers serve requests over shared prompts, some of which others close or carry on; watchers
// look, evict, bump the generation and audit. The KV is plain memory, so under ThreadSanitizer two
// writers of a page, or a reader beside a writer, are a finding; and what a request reads is
// compared with what its tokens are.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "noted_kv.h"
#include "pagedkv/error.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

constexpr uint32_t kBlockSize = 4;
constexpr size_t kNumBlocks = 96;

struct Totals {
  std::atomic<size_t> num_steps = 0, num_short = 0, num_cached = 0, num_handed_over = 0,
                      num_closed_by_others = 0, num_looks = 0;
};

PoolConfig config() {
  PoolConfig config;
  config.num_blocks = {kNumBlocks};
  config.block_size = kBlockSize;
  config.events = true;
  config.events_kept = 1;  // often taken too late
  return config;
}

/// What the threads share.
struct World {
  BlockPool pool{config()};
  NotedKv kv{kNumBlocks, kBlockSize};
  std::vector<Prompt> prompts;
  Totals totals;
  std::atomic<bool> is_over = false;

  // Requests to be carried on by whoever takes them, and sequences that anybody may close.
  std::mutex board_mutex;
  std::vector<Request> handed_over;
  std::vector<std::shared_ptr<Sequence>> to_close;

  explicit World(uint64_t seed) {
    Random random(seed);
    for (int i = 0; i < 24; ++i) {
      Prompt prompt;
      if (i > 0 && !random.one_in(4)) {
        prompt = prompts[random.below(i)];
        prompt.tokens.resize(1 + random.below(prompt.tokens.size()));
        std::erase_if(prompt.items, [&](const Item& item) {
          return item.start + item.length > prompt.tokens.size();
        });
      } else {
        prompt.salt = uint8_t(random.below(3));
        prompt.salt_from = random.below(10);
      }
      size_t num_more = 1 + random.below(40);
      for (size_t j = 0; j < num_more; ++j) prompt.tokens.push_back(Token(random.below(3)));
      if (random.one_in(4)) {
        size_t start = prompt.tokens.size() - 1;
        prompt.items.push_back({start, 1, uint8_t(random.below(2))});
      }
      prompts.push_back(prompt);
    }
  }
};

class Worker {
 public:
  Worker(World& world, uint64_t seed) : world_(world), pool_(world.pool), random_(seed) {}

  void run(size_t num_rounds) {
    for (size_t round = 0; round < num_rounds; ++round) serve();
    for (const Request& request : requests_) close(request);
  }

 private:
  void serve() {
    if (requests_.size() < 4) requests_.push_back(take_or_open());
    if (random_.one_in(3)) {
      size_t index = random_.below(requests_.size());
      change(index);
    }
    step();
    if (random_.one_in(2)) {
      size_t index = random_.below(requests_.size());
      close(requests_[index]);
      offered_.erase(requests_[index].sequence().get());
      requests_.erase(requests_.begin() + index);
    }
  }

  Request take_or_open() {
    {
      std::lock_guard lock(world_.board_mutex);
      if (!world_.handed_over.empty() && random_.one_in(2)) {
        Request request = std::move(world_.handed_over.back());
        world_.handed_over.pop_back();
        return request;
      }
    }
    Prompt prompt = world_.prompts[random_.below(world_.prompts.size())];
    OpenOptions options;
    if (random_.one_in(4))
      options.retention.push_back({.begin = 0,
                                   .end = 1 + random_.below(8),
                                   .priority = Priority(random_.below(kMaxPriority + 1)),
                                   .ttl = Nanoseconds(random_.below(3)) * kSecond / 1000,
                                   .refreshes = random_.one_in(2)});
    Request request(pool_, std::move(prompt), std::move(options));
    world_.totals.num_cached += request.sequence()->num_cached;
    world_.kv.check(pool_, request);
    return request;
  }

  void change(size_t index) {
    Request& request = requests_[index];
    if (is_closed(request)) return;
    switch (random_.below(6)) {
      case 5:
        if (random_.one_in(2)) {
          accepted([&] { pool_.last_turn(*request.sequence()); });
        } else {
          accepted([&] { pool_.expect_reuse(*request.sequence(), kSecond); });
        }
        return;
      case 0: {
        size_t num_tokens = random_.below(request.num_tokens() + 1);
        if (accepted([&] { pool_.truncate(*request.sequence(), num_tokens); }))
          request.truncate(num_tokens);
        return;
      }
      case 1:
        accepted([&] { pool_.preempt(*request.sequence()); });
        return;
      case 2: {
        std::optional<Request> child;
        if (!accepted([&] { child = request.forked(pool_); })) return;
        std::lock_guard lock(world_.board_mutex);
        world_.handed_over.push_back(std::move(*child));
        ++world_.totals.num_handed_over;
        return;
      }
      case 3: {
        size_t position = random_.below(2 * request.num_tokens() + 1);
        accepted([&] { pool_.stop_publishing(*request.sequence(), position); });
        return;
      }
      case 4:
        return offer(request);
    }
  }

  /// From now on somebody may close it at any moment.
  void offer(const Request& request) {
    offered_.insert(request.sequence().get());
    {
      std::lock_guard lock(world_.board_mutex);
      world_.to_close.push_back(request.sequence());
    }
    std::this_thread::yield();
  }

  /// Outside a step only what nobody else can close stays as it is.
  void check(const Request& request) const {
    if (!offered_.contains(request.sequence().get())) world_.kv.check(pool_, request);
  }

  /// One step over the requests with something to compute.
  void step() {
    std::vector<Request*> batch;
    std::vector<std::shared_ptr<Sequence>> sequences;
    std::vector<int64_t> counts;
    for (Request& request : requests_) {
      if (is_closed(request)) continue;
      const Token token = Token(random_.below(3));
      Sequence* const one[] = {request.sequence().get()};
      if (accepted([&] { pool_.append_each(one, {&token, 1}); })) request.append({&token, 1});
      size_t num_computed = pool_.locked([&] { return request.sequence()->num_computed; });
      if (num_computed >= request.num_tokens()) continue;
      batch.push_back(&request);
      sequences.push_back(request.sequence());
      counts.push_back(int64_t(request.num_tokens() - num_computed));
    }
    std::shared_ptr<Step> step;
    try {
      if (!accepted([&] { step = pool_.reserve(std::move(sequences), counts); })) return;
    } catch (const OutOfBlocksError&) {
      ++world_.totals.num_short;
      return preempt_all();
    } catch (const UsageError&) {
      return;  // nothing to compute
    }
    if (random_.one_in(10)) offer(*batch[random_.below(batch.size())]);
    std::shared_ptr<Fence> fence;
    if (random_.one_in(10)) {
      Sequence* const one[] = {batch[0]->sequence().get()};
      accepted([&] { fence = pool_.fence(one); });
    }
    finish(*step, batch);
    if (fence) pool_.release(*fence);
  }

  void finish(Step& step, const std::vector<Request*>& batch) {
    if (random_.one_in(20)) return pool_.abandon(step);
    world_.kv.execute(pool_, step, batch, tables_);
    if (random_.one_in(20)) return pool_.abandon(step);
    std::vector<int64_t> num_accepted;
    if (random_.one_in(4))
      for (const StepRow& row : step.rows)
        num_accepted.push_back(int64_t(random_.below(row.end - row.start + 1)));
    pool_.commit(step, num_accepted);
    for (size_t i = 0; i < num_accepted.size(); ++i) {
      size_t end = step.rows[i].start + size_t(num_accepted[i]);
      if (end < step.rows[i].end && !is_closed(*batch[i])) batch[i]->truncate(end);
    }
    ++world_.totals.num_steps;
    for (const Request* request : batch) check(*request);
  }

  /// Lets the others go on when pages are short.
  void preempt_all() {
    for (const Request& request : requests_) accepted([&] { pool_.preempt(*request.sequence()); });
    std::this_thread::yield();
  }

  void close(const Request& request) {
    accepted([&] { pool_.close(*request.sequence()); });
  }

  bool is_closed(const Request& request) const {
    return pool_.locked([&] { return request.sequence()->is_closed; });
  }

  /// Whether the call was made; it is refused when somebody closed the sequence.
  template <typename F>
  bool accepted(F&& call) {
    try {
      call();
      return true;
    } catch (const StateError&) {
      return false;
    }
  }

  World& world_;
  BlockPool& pool_;
  Random random_;
  std::vector<Request> requests_;
  std::set<const Sequence*> offered_;
  Tables tables_;
};

class Watcher {
 public:
  Watcher(World& world, uint64_t seed) : world_(world), pool_(world.pool), random_(seed) {}

  void run() {
    while (!world_.is_over) {
      look();
      ++world_.totals.num_looks;
    }
  }

 private:
  void look() {
    const Prompt& prompt = world_.prompts[random_.below(world_.prompts.size())];
    std::vector<BlockExtras> extras = prompt.extras(kBlockSize);
    switch (random_.below(16)) {
      case 0:
        CHECK(pool_.match_length(prompt.tokens, extras) <= prompt.tokens.size());
        return;
      case 1:
        CHECK(pool_.touch(prompt.tokens, extras) <= prompt.tokens.size());
        if (random_.one_in(4)) pool_.forget_waiting();
        CHECK(pool_.await(prompt.tokens, extras) <= prompt.tokens.size());
        return;
      case 2:
        pool_.evict(int64_t(random_.below(3)));
        return;
      case 3:
        pool_.take_events();
        return;
      case 4: {
        PoolStats s = pool_.stats();
        CHECK(s.num_free + s.num_writable + s.num_committed + s.num_evictable == kNumBlocks);
        CHECK(s.num_cached_tokens <= s.num_prompt_tokens);
        return;
      }
      case 5:
        pool_.check_integrity();
        return;
      case 6: {
        Digest digest;
        pool_.digest_of(int64_t(random_.below(kNumBlocks)), &digest);
        return;
      }
      case 7: {
        std::vector<BlockId> ids;
        try {
          ids = pool_.allocate(int64_t(random_.below(4)));
        } catch (const OutOfBlocksError&) {
          return;
        }
        world_.kv.spoil(ids);
        return pool_.free(std::vector<int64_t>(ids.begin(), ids.end()));
      }
      case 8:
      case 9:
        return close_one();
      case 10: {
        RetentionRange range{.begin = random_.below(4),
                             .end = 4 + random_.below(8),
                             .priority = Priority(random_.below(kMaxPriority + 1)),
                             .ttl = Nanoseconds(random_.below(3)) * kSecond / 1000,
                             .refreshes = false};
        CHECK(pool_.retain(prompt.tokens, extras, range) <= prompt.tokens.size());
        return;
      }
      case 11:
        if (prompt.salt == 0) return;
        pool_.set_quota(prompt.salt_bytes(), random_.one_in(2) ? random_.below(40) : kNoQuota);
        for (const TenantUsage& tenant : pool_.tenants()) CHECK(tenant.num_blocks <= kNumBlocks);
        return;
      case 12: {
        Explanation why = pool_.explain(prompt.tokens, extras, random_.one_in(2));
        CHECK(why.num_block_tokens + why.num_partial_tokens <= prompt.tokens.size());
        return;
      }
      case 13: {
        Digest digest;
        if (!pool_.digest_of(int64_t(random_.below(kNumBlocks)), &digest)) return;
        CHECK(pool_.lookup({&digest, 1}).size() <= 1);
        return;
      }
      case 14: {
        PoolSnapshot map = pool_.snapshot();
        CHECK(map.state.size() == kNumBlocks && map.eviction_rank.size() == kNumBlocks);
        return;
      }
      case 15:
        if (random_.one_in(50)) pool_.bump_generation();
        if (random_.one_in(50)) pool_.reset();
        return;
    }
  }

  void close_one() {
    std::shared_ptr<Sequence> sequence;
    {
      std::lock_guard lock(world_.board_mutex);
      if (world_.to_close.empty()) return;
      sequence = std::move(world_.to_close.back());
      world_.to_close.pop_back();
    }
    try {
      pool_.close(*sequence);
      ++world_.totals.num_closed_by_others;
    } catch (const StateError&) {
      // Its owner was first.
    }
  }

  World& world_;
  BlockPool& pool_;
  Random random_;
};

void stress(size_t num_workers, size_t num_rounds, uint64_t seed) {
  World world(seed);
  std::vector<std::thread> workers, watchers;
  for (size_t i = 0; i < num_workers; ++i)
    workers.emplace_back(
        [&world, seed, i, num_rounds] { Worker(world, mix(seed, i)).run(num_rounds); });
  for (size_t i = 0; i < 2; ++i)
    watchers.emplace_back([&world, seed, i] { Watcher(world, mix(seed, 1000 + i)).run(); });
  for (std::thread& thread : workers) thread.join();
  world.is_over = true;
  for (std::thread& thread : watchers) thread.join();

  BlockPool& pool = world.pool;
  for (const Request& request : world.handed_over) pool.close(*request.sequence());
  pool.check_integrity();
  PoolStats stats = pool.stats();
  CHECK(stats.num_writable == 0 && stats.num_committed == 0);
  CHECK(pool.reset());
  pool.check_integrity();
  CHECK(pool.stats().num_free == kNumBlocks && pool.stats().num_nodes == 0);
  const Totals& t = world.totals;
  std::fprintf(stderr,
               "%zu workers: %zu steps, %zu times short of blocks, %zu tokens cached, %zu evicted, "
               "%zu handed over, %zu closed by others, %zu looks\n",
               num_workers, size_t(t.num_steps), size_t(t.num_short), size_t(t.num_cached),
               size_t(stats.num_evicted()), size_t(t.num_handed_over),
               size_t(t.num_closed_by_others), size_t(t.num_looks));
  // A run in which nothing of this happened proves nothing.
  CHECK(t.num_steps > 0 && t.num_cached > 0 && stats.num_evicted() > 0 && t.num_handed_over > 0 &&
        t.num_closed_by_others > 0);
}

}  // namespace
}  // namespace pagedkv::testing

int main(int argc, char** argv) {
  auto argument = [&](int i, long otherwise) { return argc > i ? std::atol(argv[i]) : otherwise; };
  pagedkv::testing::stress(size_t(argument(1, 8)), size_t(argument(2, 2000)),
                           uint64_t(argument(3, 1)));
}
