// What must hold between two calls.

#include <algorithm>

#include "play.h"

namespace pagedkv::testing {

size_t Play::num_releasable(const Sequence& sequence) const {
  std::map<BlockId, size_t> num_holders;
  for (const Sequence* other : sequences())
    for (BlockId id : other->tables[0]) ++num_holders[id];
  for (const OpenStep& step : steps_)
    for (const StepRow& row : step.step->rows)
      if (row.copy) ++num_holders[row.copy->sources[0]];
  for (const Fenced& fenced : fences_)
    for (BlockId id : fenced.fence->pages[0]) ++num_holders[id];
  return size_t(
      std::ranges::count_if(sequence.tables[0], [&](BlockId id) { return num_holders[id] == 1; }));
}

std::vector<const Sequence*> Play::sequences() const {
  std::set<const Sequence*> found;
  for (const auto& request : requests_) found.insert(request->sequence().get());
  for (const OpenStep& step : steps_)
    for (const auto& request : step.requests) found.insert(request->sequence().get());
  return {found.begin(), found.end()};
}

std::pair<std::vector<uint64_t>, std::vector<SeenSequence>> Play::seen() const {
  PoolStats s = pool_.stats();
  std::vector<SeenSequence> of_sequences;
  for (const Sequence* q : sequences())
    of_sequences.push_back(
        {q->tokens,
         q->path,
         q->tables[0],
         {q->num_cached, q->num_counted, q->num_computed, q->num_with_kv, q->publish_end},
         {q->is_preempted, q->is_closed, q->is_in_step}});
  return {{s.num_free, s.num_writable, s.num_committed, s.num_evictable, s.num_nodes,
           s.num_evicted(), s.num_fenced, s.num_prompts, s.num_prompt_tokens, s.num_cached_tokens},
          std::move(of_sequences)};
}

void Play::check() {
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
    for (const FencedSlot& slot : fenced.slots) CHECK(kv_.page(slot.id)[slot.offset] == slot.cause);
  check_tenants();
}

void Play::check_tenants() {
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

PoolSnapshot Play::checked_snapshot() {
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

void Play::forget_evicted() {
  Digest digest;
  for (size_t i = 0; i < num_blocks_; ++i)
    if (!pool_.digest_of(BlockId(i), &digest)) published_[i].reset();
}

void Play::note_published(const Request& request) {
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

std::vector<Digest> Play::digests_of(const Prompt& prompt, size_t num_blocks) const {
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

void Play::replay_events() {
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

void Play::give_everything_back() {
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

}  // namespace pagedkv::testing
