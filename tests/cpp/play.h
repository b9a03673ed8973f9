// Bytes played as calls of the pool's verbs, on a pool of a few small blocks.
//
// Any bytes make a play: a byte that is out of range is taken modulo, missing ones count as 0.
// After every call the pool audits itself, each refused call is seen to have changed nothing, and
// all pages are compared with what was noted beside the pool.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "noted_kv.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"

namespace pagedkv::testing {

struct Played {
  size_t num_calls = 0, num_refused = 0, num_copies = 0, num_evicted = 0, num_cached_tokens = 0;
};

/// The bytes as numbers.
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

/// All that a refused call must leave alone.
using SeenSequence = std::tuple<std::vector<Token>, std::vector<NodeId>, std::vector<BlockId>,
                                std::array<size_t, 5>, std::array<bool, 3>>;
using Seen = std::pair<std::vector<uint64_t>, std::vector<SeenSequence>>;

class Play {
 public:
  explicit Play(std::span<const uint8_t> bytes);

  Played run();

 private:
  void call_a_verb();

  // Arguments

  /// Tokens of an earlier prompt up to some position, and some of its own.
  Prompt read_prompt();
  /// An item that is cut in its middle is left out: no prompt can ask for it.
  static void cut(Prompt& prompt, size_t num_tokens);
  RetentionRange read_range();
  std::vector<Token> read_tokens();
  /// One of the requests, closed ones included; none when there are none.
  std::shared_ptr<Request> read_request();
  std::vector<std::shared_ptr<Request>> read_requests();

  // Verbs

  void open();
  /// Null when it was refused.
  std::shared_ptr<Request> open_one();
  /// Keeps the pool from being locked by requests that nobody goes on with.
  void drop_a_request();
  /// A whole request, as engines serve it.
  void serve();
  /// One step of decoding: a token more for each request, and all that is left is computed.
  void decode();
  void compute(const std::vector<std::shared_ptr<Request>>& requests);
  void append();
  void append_each();
  void truncate();
  void stop_publishing();
  void fork();
  void preempt();
  void close();
  void reserve();
  void execute();
  void execute(OpenStep& step);
  void commit();
  void abandon();
  void allocate();
  void free();
  void evict();
  /// What changes nothing, or only the order of eviction.
  void look();
  void look_up();
  void explain();
  void retain();
  /// What orders eviction and changes nothing else.
  void hint();
  void advance();
  void set_quota();
  void fence();
  void release();
  /// The verbs that end what was before; rare, for most of a play needs what was before.
  void renew();

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
  size_t num_releasable(const Sequence& sequence) const;
  /// All sequences that may hold pages.
  std::vector<const Sequence*> sequences() const;
  Seen seen() const;
  void check();
  void check_tenants();
  PoolSnapshot checked_snapshot();
  void forget_evicted();
  /// Notes what the published pages of a request hold, and that it is what they should.
  void note_published(const Request& request);
  std::vector<Digest> digests_of(const Prompt& prompt, size_t num_blocks) const;
  /// The events replayed from empty give exactly the index.
  void replay_events();
  void give_everything_back();

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

}  // namespace pagedkv::testing
