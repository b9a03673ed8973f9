// The verbs, each told to the pool and to what is noted beside it.

#include <algorithm>

#include "play.h"

namespace pagedkv::testing {

void Play::open() { open_one(); }

std::shared_ptr<Request> Play::open_one() {
  if (requests_.size() > 6) drop_a_request();
  Prompt prompt = read_prompt();
  OpenOptions options;
  if (script_.below(3) == 0)
    for (size_t i = script_.below(3); i > 0; --i) options.retention.push_back(read_range());
  if (script_.below(8) == 0) options.publish_end = script_.below(prompt.tokens.size() + 2);
  options.reuse = script_.below(8) != 0;
  std::shared_ptr<Request> request;
  attempt([&] {
    request = std::make_shared<Request>(pool_, std::move(prompt), std::move(options));
    requests_.push_back(request);
  });
  return request;
}

void Play::drop_a_request() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    const Sequence& sequence = *requests_[i]->sequence();
    if (sequence.is_in_step) continue;
    if (!sequence.is_closed) pool_.close(*requests_[i]->sequence());
    requests_.erase(requests_.begin() + i);
    return;
  }
}

void Play::serve() {
  std::shared_ptr<Request> request = open_one();
  if (!request) return;
  compute({request});
  if (script_.flip()) pool_.close(*request->sequence());
}

void Play::decode() {
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

void Play::compute(const std::vector<std::shared_ptr<Request>>& requests) {
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

void Play::append() {
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

void Play::append_each() {
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

void Play::truncate() {
  std::shared_ptr<Request> request = read_request();
  if (!request) return;
  size_t num_tokens = script_.below(request->num_tokens() + 2);
  attempt([&] {
    pool_.truncate(*request->sequence(), num_tokens);
    request->truncate(num_tokens);
  });
}

void Play::stop_publishing() {
  std::shared_ptr<Request> request = read_request();
  if (!request) return;
  size_t position = script_.below(request->num_tokens() + 2);
  attempt([&] { pool_.stop_publishing(*request->sequence(), position); });
}

void Play::fork() {
  std::shared_ptr<Request> request = read_request();
  if (!request || requests_.size() > 6) return;
  attempt([&] { requests_.push_back(std::make_shared<Request>(request->forked(pool_))); });
}

void Play::preempt() {
  std::shared_ptr<Request> request = read_request();
  if (request) attempt([&] { pool_.preempt(*request->sequence()); });
}

void Play::close() {
  std::shared_ptr<Request> request = read_request();
  if (request) attempt([&] { pool_.close(*request->sequence()); });
}

void Play::reserve() {
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

void Play::execute() {
  if (!steps_.empty()) execute(script_.pick(steps_));
}

void Play::execute(OpenStep& step) {
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

void Play::commit() {
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

void Play::abandon() {
  if (steps_.empty()) return;
  size_t index = script_.below(steps_.size());
  pool_.abandon(*steps_[index].step);
  steps_.erase(steps_.begin() + index);
}

void Play::allocate() {
  // Seldom so many that nothing else fits any more.
  size_t num_blocks = script_.below(script_.below(8) == 0 ? num_blocks_ + 2 : 3);
  attempt([&] {
    std::vector<BlockId> ids = pool_.allocate(int64_t(num_blocks));
    kv_.spoil(ids);
    raw_.insert(raw_.end(), ids.begin(), ids.end());
  });
}

void Play::free() {
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

void Play::evict() {
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

void Play::look() {
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

void Play::look_up() {
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

void Play::explain() {
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

void Play::retain() {
  Prompt prompt = read_prompt();
  std::vector<BlockExtras> extras = prompt.extras(block_size_);
  RetentionRange range = read_range();
  size_t end =
      std::min(range.end, pool_.match(prompt.tokens, extras).num_block_tokens / block_size_);
  size_t num_tokens = (end - std::min(end, range.begin)) * block_size_;
  CHECK(pool_.retain(prompt.tokens, extras, range) == num_tokens);
}

void Play::hint() {
  auto before = seen();
  forget_evicted();
  size_t num_published = size_t(std::ranges::count_if(
      published_, [](const std::optional<Published>& page) { return page.has_value(); }));
  if (std::shared_ptr<Request> request = read_request(); request && script_.below(3) != 0) {
    Sequence& sequence = *request->sequence();
    bool is_last = script_.flip();
    Nanoseconds within = Nanoseconds(1 + script_.below(4)) * kSecond;
    bool is_usable = !sequence.is_closed && !sequence.is_in_step, is_refused = false;
    try {
      is_last ? pool_.last_turn(sequence) : pool_.expect_reuse(sequence, within);
    } catch (const StateError&) {
      is_refused = true;
    }
    CHECK(is_refused != is_usable);
  } else {
    Prompt prompt = read_prompt();
    std::vector<BlockExtras> extras = prompt.extras(block_size_);
    Match match = pool_.match(prompt.tokens, extras);
    if (script_.flip()) pool_.forget_waiting();
    CHECK(pool_.await(prompt.tokens, extras) == match.num_block_tokens);
    Match again = pool_.match(prompt.tokens, extras);
    CHECK(again.num_block_tokens == match.num_block_tokens && again.block_ids == match.block_ids);
    CHECK(again.num_partial_tokens == match.num_partial_tokens);
  }
  CHECK(seen() == before);
  forget_evicted();
  CHECK(size_t(std::ranges::count_if(published_, [](const std::optional<Published>& page) {
          return page.has_value();
        })) == num_published);
}

void Play::advance() { pool_.advance(Nanoseconds(script_.below(4)) * kSecond); }

void Play::set_quota() {
  Prompt prompt;
  prompt.salt = uint8_t(1 + script_.below(2));
  size_t quota = std::array{kNoQuota, size_t{0}, size_t{1}, size_t{2}, size_t{4}}[script_.below(5)];
  check();  // for what the quota before allowed
  pool_.set_quota(prompt.salt_bytes(), quota);
  CHECK(pool_.tenant_usage(prompt.salt_bytes()).quota == quota);
}

void Play::fence() {
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

void Play::release() {
  if (fences_.empty()) return;
  size_t index = script_.below(fences_.size());
  pool_.release(*fences_[index].fence);
  attempt([&] {
    pool_.release(*fences_[index].fence);
    CHECK(!"a fence is released once");
  });
  fences_.erase(fences_.begin() + index);
}

void Play::renew() {
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

}  // namespace pagedkv::testing
