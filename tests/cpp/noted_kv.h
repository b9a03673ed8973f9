// Pages without a model: a slot of NotedKv holds a number for all that its K/V was computed from.
//
// Equal numbers mean equal causes, so a page that is served to other tokens is seen by reading it,
// and so is one that somebody wrote after it was published. The slots are plain memory that nothing
// but the pool keeps apart: under ThreadSanitizer a page with two owners is a data race.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/block_pool.h"

namespace pagedkv::testing {

/// A picture or the like behind the tokens [start, start + length).
struct Item {
  size_t start, length;
  uint8_t content;
};

/// What a request says of itself when it is opened.
struct Prompt {
  std::vector<Token> tokens;
  uint8_t salt = 0;  // 0: none
  size_t salt_from = 0;
  std::vector<Item> items = {};  // ascending, none overlapping another

  /// Empty when there is none.
  std::string salt_bytes() const;
  /// Salt and items as they enter the blocks; pagedkv/extras.py has the format.
  std::vector<BlockExtras> extras(uint32_t block_size) const;
};

/// A prompt that was opened, with its sequence in the pool.
class Request {
 public:
  Request(BlockPool& pool, Prompt prompt, OpenOptions options = {});

  const std::shared_ptr<Sequence>& sequence() const { return sequence_; }
  size_t num_tokens() const { return prompt_.tokens.size(); }
  const Prompt& prompt() const { return prompt_; }
  Request forked(BlockPool& pool) const;

  /// To be told what the pool was told.
  void append(std::span<const Token> tokens);
  void truncate(size_t num_tokens);

  /// Of each token, the number of what its K/V is computed from.
  std::vector<uint64_t> causes(uint32_t block_size) const;

 private:
  Prompt prompt_;
  std::shared_ptr<Sequence> sequence_;
};

/// An engine's buffers for prepare(), kept from step to step.
struct Tables {
  /// Room for the step. What the block table holds stays where its width does.
  TableBuffers fit(const Step& step);

  size_t num_columns = 0;
  std::vector<int32_t> block_table;
  std::vector<FilledRow> filled;
  GroupBuffers own{};
  std::vector<int32_t> seq_lens, query_start_loc;
  std::vector<int64_t> slot_mapping, positions, token_ids;
};

class NotedKv {
 public:
  NotedKv(size_t num_blocks, uint32_t block_size)
      : block_size_(block_size), slots_(num_blocks * block_size) {}

  /// Prepares the step, runs its copies, writes what its tables ask for and checks all that its
  /// queries see. `requests` are those of the step's rows.
  void execute(BlockPool& pool, Step& step, std::span<const Request* const> requests,
               Tables& tables);

  /// Checks everything that the request's pages hold. It must be in no step.
  void check(const BlockPool& pool, const Request& request) const;

  /// Whether `block_ids` hold what a new request with this prompt may read.
  bool serves(const Prompt& prompt, uint32_t generation, std::span<const BlockId> block_ids,
              size_t num_tokens) const;

  /// Fills pages with what belongs to nobody.
  void spoil(std::span<const BlockId> block_ids);

  std::span<const uint64_t> page(BlockId id) const {
    return {&slots_[size_t(id) * block_size_], block_size_};
  }

 private:
  uint64_t& slot(BlockId id, size_t offset) { return slots_.at(size_t(id) * block_size_ + offset); }
  uint64_t slot(BlockId id, size_t offset) const {
    return slots_.at(size_t(id) * block_size_ + offset);
  }

  uint32_t block_size_;
  std::vector<uint64_t> slots_;
};

/// Reserves all that the requests have not computed yet, executes and commits it.
void compute(BlockPool& pool, NotedKv& kv, std::span<const Request* const> requests,
             Tables& tables);

}  // namespace pagedkv::testing
