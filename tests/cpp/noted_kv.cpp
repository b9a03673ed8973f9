#include "noted_kv.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "check.h"
#include "random.h"

namespace pagedkv::testing {
namespace {

constexpr uint64_t kGarbage = 0xdeadull << 48;

std::vector<uint64_t> causes_of(const Prompt& prompt, uint32_t generation, uint32_t block_size) {
  std::vector<uint64_t> causes;
  causes.reserve(prompt.tokens.size());
  uint64_t cause = mix(generation);
  auto item = prompt.items.begin();
  size_t salted_from = prompt.salt_from / block_size * block_size;
  for (size_t i = 0; i < prompt.tokens.size(); ++i) {
    if (prompt.salt != 0 && i == salted_from) cause = mix(cause, 0x5a17ull << 32 | prompt.salt);
    cause = mix(cause, prompt.tokens[i]);
    while (item != prompt.items.end() && item->start + item->length <= i) ++item;
    if (item != prompt.items.end() && item->start <= i)
      cause = mix(cause, 0x17e3ull << 32 | uint64_t{item->content} << 16 | (i - item->start));
    causes.push_back(cause);
  }
  return causes;
}

/// tag u8 | u32le(length) | payload
std::string entry(uint8_t tag, std::string_view payload) {
  std::string bytes(1, static_cast<char>(tag));
  for (int shift = 0; shift < 32; shift += 8)
    bytes += static_cast<char>(payload.size() >> shift & 0xff);
  return bytes.append(payload);
}

}  // namespace

std::string Prompt::salt_bytes() const { return salt == 0 ? "" : "salt " + std::to_string(salt); }

std::vector<BlockExtras> Prompt::extras(uint32_t block_size) const {
  std::vector<BlockExtras> extras;
  auto of_block = [&](size_t index) -> BlockExtras& {
    auto place = std::ranges::lower_bound(extras, index, {}, &BlockExtras::block_index);
    if (place == extras.end() || place->block_index != index)
      place = extras.insert(place, {static_cast<uint32_t>(index), {}, {}, block_size});
    return *place;
  };
  if (salt != 0) {
    BlockExtras& block = of_block(salt_from / block_size);
    block.scope = block.payload = entry(1, salt_bytes());
  }
  for (const Item& item : items) {
    for (size_t index = item.start / block_size; index * block_size < item.start + item.length;
         ++index) {
      BlockExtras& block = of_block(index);
      size_t begin = index * block_size;
      size_t offset = item.start > begin ? item.start - begin : 0;
      auto start = static_cast<int64_t>(item.start) - static_cast<int64_t>(begin);
      block.payload += entry(3, std::to_string(start) + " " + std::to_string(item.content));
      block.first_offset = std::min(block.first_offset, static_cast<uint32_t>(offset));
    }
  }
  return extras;
}

Request::Request(BlockPool& pool, Prompt prompt, OpenOptions options)
    : prompt_(std::move(prompt)),
      sequence_(pool.open(prompt_.tokens, prompt_.extras(pool.block_size()), std::move(options))) {}

Request Request::forked(BlockPool& pool) const {
  Request child = *this;
  child.sequence_ = pool.fork(*sequence_);
  return child;
}

void Request::append(std::span<const Token> tokens) {
  prompt_.tokens.insert(prompt_.tokens.end(), tokens.begin(), tokens.end());
}

void Request::truncate(size_t num_tokens) {
  prompt_.tokens.resize(num_tokens);
  std::erase_if(prompt_.items, [&](const Item& item) { return item.start >= num_tokens; });
  if (prompt_.items.empty()) return;
  Item& last = prompt_.items.back();
  last.length = std::min(last.length, num_tokens - last.start);
}

std::vector<uint64_t> Request::causes(uint32_t block_size) const {
  return causes_of(prompt_, sequence_->generation, block_size);
}

TableBuffers Tables::fit(const Step& step) {
  size_t num_rows = step.rows.size(), num_tokens = step.num_tokens();
  if (num_columns < step.max_blocks()) {
    num_columns = step.max_blocks() + 1;
    block_table.clear();
    filled.clear();
  }
  if (filled.size() < num_rows) {
    filled.resize(num_rows);
    block_table.resize(num_rows * num_columns, kNoBlock);
  }
  seq_lens.resize(num_rows);
  query_start_loc.resize(num_rows + 1);
  for (std::vector<int64_t>* each : {&slot_mapping, &positions, &token_ids})
    each->resize(num_tokens);
  own = {.block_table = block_table.data(),
         .slot_mapping = slot_mapping.data(),
         .filled = filled.data()};
  return {.groups = {&own, 1},
          .num_columns = num_columns,
          .seq_lens = seq_lens.data(),
          .query_start_loc = query_start_loc.data(),
          .positions = positions.data(),
          .token_ids = token_ids.data()};
}

void NotedKv::execute(BlockPool& pool, Step& step, std::span<const Request* const> requests,
                      Tables& tables) {
  size_t num_rows = step.rows.size();
  pool.prepare(step, tables.fit(step));
  const auto& query_start_loc = tables.query_start_loc;
  CHECK(query_start_loc[0] == 0 && size_t(query_start_loc[num_rows]) == step.num_tokens());

  for (const StepRow& row : step.rows) {
    if (!row.copy) continue;
    BlockId source = row.copy->sources[0], destination = row.copy->destinations[0];
    CHECK(row.copy->num_tokens < block_size_);
    spoil({&destination, 1});
    for (size_t i = 0; i < row.copy->num_tokens; ++i) slot(destination, i) = slot(source, i);
  }
  for (size_t r = 0; r < num_rows; ++r) {
    std::vector<uint64_t> causes = requests[r]->causes(block_size_);
    for (int32_t i = query_start_loc[r]; i < query_start_loc[r + 1]; ++i) {
      int64_t position = tables.positions[i], slot = tables.slot_mapping[i];
      CHECK(tables.token_ids[i] == requests[r]->prompt().tokens[position]);
      if (slot >= 0) slots_.at(slot) = causes[position];
    }
  }
  for (size_t r = 0; r < num_rows; ++r) {
    std::vector<uint64_t> causes = requests[r]->causes(block_size_);
    const int32_t* table = &tables.block_table[r * tables.num_columns];
    size_t num_tokens = tables.seq_lens[r];
    for (size_t i = 0; i < num_tokens; ++i)
      CHECK(slot(table[i / block_size_], i % block_size_) == causes[i]);
    size_t num_blocks = (num_tokens + block_size_ - 1) / block_size_;
    CHECK(std::equal(table, table + num_blocks, step.rows[r].sequence->tables[0].begin()));
    CHECK(std::all_of(table + num_blocks, table + tables.num_columns,
                      [](BlockId id) { return id == kNoBlock; }));
  }
}

void NotedKv::check(const BlockPool& pool, const Request& request) const {
  const Sequence& sequence = *request.sequence();
  auto [table, num_with_kv] =
      pool.locked([&] { return std::pair(sequence.tables[0], sequence.num_with_kv); });
  std::vector<uint64_t> causes = request.causes(block_size_);
  for (size_t i = 0; i < num_with_kv; ++i)
    CHECK(slot(table[i / block_size_], i % block_size_) == causes[i]);
}

bool NotedKv::serves(const Prompt& prompt, uint32_t generation, std::span<const BlockId> block_ids,
                     size_t num_tokens) const {
  std::vector<uint64_t> causes = causes_of(prompt, generation, block_size_);
  for (size_t i = 0; i < num_tokens; ++i)
    if (slot(block_ids[i / block_size_], i % block_size_) != causes[i]) return false;
  return true;
}

void NotedKv::spoil(std::span<const BlockId> block_ids) {
  for (BlockId id : block_ids)
    for (size_t i = 0; i < block_size_; ++i) slot(id, i) = kGarbage;
}

void compute(BlockPool& pool, NotedKv& kv, std::span<const Request* const> requests,
             Tables& tables) {
  std::vector<std::shared_ptr<Sequence>> sequences;
  std::vector<int64_t> counts;
  for (const Request* request : requests) {
    sequences.push_back(request->sequence());
    counts.push_back(int64_t(request->num_tokens() - request->sequence()->num_computed));
  }
  std::shared_ptr<Step> step = pool.reserve(std::move(sequences), counts);
  kv.execute(pool, *step, requests, tables);
  pool.commit(*step, {});
}

}  // namespace pagedkv::testing
