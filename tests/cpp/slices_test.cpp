// What long calls give while others change the pool between their slices: of one moment, and whole.

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "pagedkv/block_pool.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

constexpr size_t kNumBlocks = 9'000;  // several slices
constexpr size_t kMostBlocks = 40;    // of a prompt

std::vector<BlockExtras> salted(uint8_t salt) {
  if (salt == 0) return {};
  std::string scope{1, 1, 0, 0, 0, char(salt)};  // tag | u32le(length) | payload
  return {{.block_index = 0, .payload = scope, .scope = scope, .first_offset = 1}};
}

/// Serves prompts of one token a block, of which many begin alike.
class Server {
 public:
  Server(BlockPool& pool, uint64_t seed) : pool_(pool), random_(seed) {}

  void serve() {
    std::vector<Token> tokens(1 + random_.below(kMostBlocks));
    tokens[0] = Token(random_.below(200));
    for (size_t i = 1; i < tokens.size(); ++i) tokens[i] = Token(random_.below(12) == 0);
    std::vector<BlockExtras> extras = salted(uint8_t(random_.below(3)));
    if (random_.below(8) == 0) pool_.touch(tokens, extras);
    if (random_.below(16) == 0) pool_.await(tokens, extras);
    if (random_.below(500) == 0)
      pool_.retain(tokens, extras,
                   {.begin = 0, .end = 8, .priority = 70, .ttl = 1000, .refreshes = true});
    std::shared_ptr<Sequence> sequence = pool_.open(tokens, extras);
    if (random_.below(50) == 0) pool_.last_turn(*sequence);
    if (sequence->num_computed < tokens.size()) {
      const int64_t count[] = {int64_t(tokens.size() - sequence->num_computed)};
      pool_.commit(*pool_.reserve({sequence}, count), {});
    }
    held_.push_back(std::move(sequence));
    if (held_.size() > 4) give_up(random_.below(held_.size()));
  }
  void end() {
    while (!held_.empty()) give_up(0);
  }

 private:
  void give_up(size_t index) {
    pool_.close(*held_[index]);
    held_.erase(held_.begin() + index);
  }

  BlockPool& pool_;
  Random random_;
  std::vector<std::shared_ptr<Sequence>> held_;
};

/// All that is true of any moment.
void check_map(const PoolSnapshot& map) {
  size_t num_evictable = 0;
  std::vector<size_t> num_with_rank(kNumBlocks);
  for (size_t id = 0; id < kNumBlocks; ++id) {
    const auto state = PageState(map.state[id]);
    bool is_published = state == PageState::kCommitted || state == PageState::kEvictable;
    CHECK((map.num_refs[id] > 0) ==
          (state == PageState::kCommitted || state == PageState::kWritable));
    CHECK((map.depth[id] >= 0) == is_published);
    CHECK((map.eviction_rank[id] >= 0) == (state == PageState::kEvictable));
    CHECK(map.tenant[id] < int32_t(map.salts.size()));
    num_evictable += state == PageState::kEvictable;
    if (map.eviction_rank[id] >= 0) ++num_with_rank[map.eviction_rank[id]];
    if (map.depth[id] <= 0) continue;
    // A block stands behind the one before it, is of the same tenant, and is not held without it.
    const int32_t parent = map.parent[id];
    CHECK(parent >= 0 && map.depth[parent] == map.depth[id] - 1);
    CHECK(map.tenant[parent] == map.tenant[id]);
    CHECK(map.priority[parent] >= map.priority[id]);
  }
  CHECK(std::ranges::count(num_with_rank, 1) == std::ptrdiff_t(num_evictable));
  // Leaves go first, but for the few blocks that two published side by side: one of their pages
  // may.
  // Likewise whoever holds a block holds the one before it.
  size_t num_behind = 0, num_held_alone = 0;
  for (size_t id = 0; id < kNumBlocks; ++id)
    if (map.parent[id] >= 0 && map.eviction_rank[map.parent[id]] >= 0)
      num_behind +=
          map.eviction_rank[id] < 0 || map.eviction_rank[id] > map.eviction_rank[map.parent[id]];
  for (size_t id = 0; id < kNumBlocks; ++id)
    num_held_alone += map.parent[id] >= 0 && map.num_refs[map.parent[id]] < map.num_refs[id];
  CHECK(num_behind < kNumBlocks / 200 && num_held_alone < kNumBlocks / 200);
}

void serve_beside(MakePolicy make_policy, uint64_t seed) {
  PoolConfig config;
  config.num_blocks = {kNumBlocks};
  config.block_size = 1;
  config.make_policy = make_policy;
  BlockPool pool(config);
  Server first(pool, seed), second(pool, seed + 1);
  while (pool.stats().num_free > 0) first.serve();  // so that slices have something to copy
  const size_t num_served = pool.stats().num_prompts;

  std::atomic<bool> is_over = false;
  std::vector<std::thread> threads;
  for (Server* server : {&first, &second})
    threads.emplace_back([&, server] {
      while (!is_over) server->serve();
      server->end();
    });
  const std::string salt(1, char(1)), other(1, char(2));
  for (size_t round = 0; round < 6; ++round) {
    check_map(pool.snapshot());
    pool.set_quota(salt, round % 2 == 0 ? kNumBlocks / 4 : kNoQuota);
    pool.check_integrity();  // each tenant's list is whole
    pool.set_quota(other, kNumBlocks / 2);
    pool.set_quota(other, kNoQuota);
    CHECK(pool.tenants().size() == 2);
    if (round == 3) pool.bump_generation();
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.stats().num_prompts > num_served);  // else nothing was beside
  pool.check_integrity();
  check_map(pool.snapshot());
  CHECK(pool.reset());
  CHECK(pool.stats().num_free == kNumBlocks);
}

TEST(a_map_is_of_one_moment_whatever_others_do_meanwhile) {
  uint64_t seed = 1;
  for (const NamedPolicy& policy : policies()) serve_beside(policy.make, seed += 10);
}

TEST(a_map_shows_what_goes_next_with_every_policy) {
  for (const NamedPolicy& policy : policies()) {
    PoolConfig config;
    config.num_blocks = {kNumBlocks};
    config.block_size = 1;
    config.clock = Clock::Kind::kManual;
    config.make_policy = policy.make;
    BlockPool pool(config);
    Server server(pool, 7);
    while (pool.stats().num_free > 0) server.serve();
    for (int i = 0; i < 200; ++i) {
      server.serve();
      pool.advance(kSecond / 100);
    }
    server.end();
    PoolSnapshot map = pool.snapshot();
    std::vector<BlockId> order(size_t(std::ranges::count(map.state, 3)));
    for (size_t id = 0; id < kNumBlocks; ++id)
      if (map.eviction_rank[id] >= 0) order[map.eviction_rank[id]] = BlockId(id);
    for (size_t i = 0; i < order.size(); ++i) {
      CHECK(pool.evict(1) == 1);
      Digest digest;
      CHECK(!pool.digest_of(order[i], &digest));
    }
  }
}

}  // namespace
}  // namespace pagedkv::testing
