// How bytes become calls and their arguments.

#include "play.h"

#include <algorithm>
#include <iterator>

namespace pagedkv::testing {
namespace {

PoolConfig read_config(Script& script) {
  PoolConfig config;
  config.block_size = std::array{4, 4, 3, 1, 2, 16}[script.below(6)];
  config.num_blocks = {3 + script.below(14)};
  size_t options = script.below(16);
  config.prefix_caching = options != 15;
  config.token_granular = options % 4 != 3;
  config.broken_digests = options == 13;
  config.events = options % 2 == 0;
  if (options % 4 == 0) config.events_kept = 1;  // mostly taken too late
  config.clock = Clock::Kind::kManual;
  config.make_policy = policies()[script.below(policies().size())].make;
  return config;
}

}  // namespace

Play::Play(std::span<const uint8_t> bytes)
    : script_(bytes),
      pool_(read_config(script_)),
      block_size_(pool_.block_size()),
      num_blocks_(pool_.config().num_blocks[0]),
      root_(chain_root(pool_.block_size(), {})),
      kv_(num_blocks_, block_size_),
      published_(num_blocks_),
      check_every_(std::array{1, 1, 4, 16}[script_.below(4)]) {}

Played Play::run() {
  while (!script_.is_over()) {
    call_a_verb();
    if (++played_.num_calls % check_every_ == 0) check();
  }
  check();
  give_everything_back();
  return played_;
}

void Play::call_a_verb() {
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
      &Play::retain, &Play::retain, &Play::hint, &Play::hint, &Play::advance, &Play::set_quota, &Play::set_quota,
      &Play::fence, &Play::release, &Play::renew,
      // clang-format on
  };
  (this->*kVerbs[script_.below(std::size(kVerbs))])();
}

Prompt Play::read_prompt() {
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

void Play::cut(Prompt& prompt, size_t num_tokens) {
  std::erase_if(prompt.items,
                [&](const Item& item) { return item.start + item.length > num_tokens; });
  prompt.tokens.resize(num_tokens);
}

RetentionRange Play::read_range() {
  RetentionRange range{};
  range.begin = script_.below(4);
  range.end = range.begin + 1 + script_.below(5);
  range.priority = std::array<Priority, 6>{70, 70, 10, 100, 35, 0}[script_.below(6)];
  range.ttl = Nanoseconds(script_.below(5)) * kSecond;
  range.refreshes = range.ttl > 0 && script_.flip();
  return range;
}

std::vector<Token> Play::read_tokens() {
  std::vector<Token> tokens(script_.below(block_size_ + 3));
  for (Token& token : tokens) token = Token(script_.below(3));
  return tokens;
}

std::shared_ptr<Request> Play::read_request() {
  return requests_.empty() ? nullptr : script_.pick(requests_);
}

std::vector<std::shared_ptr<Request>> Play::read_requests() {
  std::vector<std::shared_ptr<Request>> chosen;
  size_t mask = script_.below(256);
  for (size_t i = 0; i < requests_.size(); ++i)
    if (mask >> (i % 8) & 1) chosen.push_back(requests_[i]);
  return chosen;
}

}  // namespace pagedkv::testing
