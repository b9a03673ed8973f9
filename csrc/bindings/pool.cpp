// BlockPool, Sequence and Step for pagedkv/pool.py and pagedkv/sequence.py.
//
// Python holds handles. A handle that is collected gives its pages back: a lost sequence is closed
// and a lost step abandoned. Every call that may loop runs without the GIL; the getters only take
// the pool's lock.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "block_hashes.h"
#include "extras.h"
#include "lists.h"
#include "pagedkv/block_pool.h"
#include "pagedkv/error.h"
#include "tables.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

using NoGil = nb::call_guard<nb::gil_scoped_release>;

struct PoolHandle {
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<TablesInUse> tables = std::make_unique<TablesInUse>();
};

/// Runs `call`, which waits for the pool's lock, and lets other threads of Python run meanwhile.
template <typename F>
auto without_gil(F&& call) {
  nb::gil_scoped_release release;
  return call();
}

/// Reads under the pool's lock; gives up Python's only where somebody is in the way.
template <typename F>
auto peek(const BlockPool& pool, F&& read) {
  std::invoke_result_t<F> result;
  auto take = [&] { result = read(); };
  if (!pool.try_locked(take)) without_gil([&] { pool.locked(take); });
  return result;
}

struct SequenceHandle {
  std::shared_ptr<BlockPool> pool;
  std::shared_ptr<Sequence> sequence;

  SequenceHandle(std::shared_ptr<BlockPool> pool, std::shared_ptr<Sequence> sequence)
      : pool(std::move(pool)), sequence(std::move(sequence)) {}
  SequenceHandle(SequenceHandle&&) = default;
  ~SequenceHandle() {
    if (sequence && !is_closed()) pool->close(*sequence);
  }
  bool is_closed() const {
    return peek(*pool, [&] { return sequence->is_closed; });
  }
};

struct StepHandle {
  std::shared_ptr<BlockPool> pool;
  std::shared_ptr<Step> step;

  StepHandle(std::shared_ptr<BlockPool> pool, std::shared_ptr<Step> step)
      : pool(std::move(pool)), step(std::move(step)) {}
  StepHandle(StepHandle&&) = default;
  ~StepHandle() {
    if (step && is_open()) pool->abandon(*step);
  }
  bool is_open() const {
    return peek(*pool, [&] { return step->is_open(); });
  }
};

struct FenceHandle {
  std::shared_ptr<BlockPool> pool;
  std::shared_ptr<Fence> fence;

  FenceHandle(std::shared_ptr<BlockPool> pool, std::shared_ptr<Fence> fence)
      : pool(std::move(pool)), fence(std::move(fence)) {}
  FenceHandle(FenceHandle&&) = default;
  ~FenceHandle() {
    if (fence && !is_released()) pool->release(*fence);
  }
  bool is_released() const {
    return peek(*pool, [&] { return fence->is_released; });
  }
};

template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

/// A numpy array that owns what the vector held.
template <typename T>
Array<T> to_array(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Array<T>(owned->data(), {owned->size()}, owner);
}

std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

using Sequences = std::vector<std::shared_ptr<Sequence>>;

/// The sequences of a list of pagedkv.Sequence; of anything else, what core_sequences in
/// pagedkv/sequence.py makes of it.
Sequences to_sequences(const char* verb, nb::handle seqs) {
  Sequences sequences;
  bool is_usual = read_core_slots<SequenceHandle>(
      seqs, [&](const SequenceHandle& handle) { sequences.push_back(handle.sequence); });
  if (is_usual) return sequences;
  sequences.clear();
  auto core_sequences = nb::module_::import_("pagedkv.sequence").attr("core_sequences");
  for (nb::handle core : core_sequences(verb, seqs))
    sequences.push_back(nb::cast<const SequenceHandle&>(core).sequence);
  return sequences;
}

/// One number for each sequence, likewise with as_counts.
std::vector<int64_t> to_counts(const char* verb, const char* name, nb::handle counts,
                               size_t num_sequences) {
  std::vector<int64_t> values;
  if (read_ints(counts, values) && values.size() == num_sequences) return values;
  auto as_counts = nb::module_::import_("pagedkv.sequence").attr("as_counts");
  return nb::cast<std::vector<int64_t>>(as_counts(verb, name, counts, num_sequences));
}

std::vector<Sequence*> to_pointers(const std::vector<SequenceHandle*>& handles) {
  std::vector<Sequence*> sequences;
  sequences.reserve(handles.size());
  for (const SequenceHandle* handle : handles) sequences.push_back(handle->sequence.get());
  return sequences;
}

void bind_sequence(nb::module_& m) {
  auto read = [](auto member) {
    return [member](const SequenceHandle& h) {
      return peek(*h.pool, [&] { return (*h.sequence).*member; });
    };
  };
  nb::class_<SequenceHandle>(m, "Sequence", "One request. Made by BlockPool.open.")
      .def_prop_ro("num_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool, [&] { return h.sequence->tokens.size(); });
                   })
      .def_prop_ro("num_cached_tokens", read(&Sequence::num_cached))
      .def_prop_ro("num_computed_tokens", read(&Sequence::num_computed))
      .def_prop_ro("num_committed_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool,
                                 [&] { return h.sequence->path.size() * h.pool->block_size(); });
                   })
      .def_prop_ro("num_reserved_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool, [&] {
                       return h.sequence->tables[0].size() * h.pool->block_size();
                     });
                   })
      .def_prop_ro("num_releasable_blocks",
                   [](const SequenceHandle& h) {
                     return without_gil([&] { return h.pool->num_releasable(*h.sequence); });
                   })
      .def("prompt_counts",
           [](const SequenceHandle& h) {
             return peek(*h.pool, [&] {
               const Sequence& s = *h.sequence;
               return std::make_tuple(s.num_prompt, s.num_hit, s.num_hit_with_kv,
                                      s.num_publishable);
             });
           })
      .def_prop_ro("is_closed", read(&Sequence::is_closed))
      .def_prop_ro("is_preempted", read(&Sequence::is_preempted))
      .def("token_ids",
           [](const SequenceHandle& h) {
             return to_array(peek(*h.pool, [&] { return h.sequence->tokens; }));
           })
      .def("block_ids",
           [](const SequenceHandle& h) {
             return to_array(peek(*h.pool, [&] { return h.sequence->tables[0]; }));
           })
      .def("block_hashes", [](const SequenceHandle& h) {
        std::vector<Digest> digests;
        {
          nb::gil_scoped_release release;
          digests = h.pool->block_digests(*h.sequence);
        }
        return block_hash_list(digests);
      });
}

void bind_step(nb::module_& m) {
  nb::class_<StepHandle>(m, "Step", "One step's plan. Made by BlockPool.reserve.")
      .def_prop_ro("state",
                   [](const StepHandle& h) {
                     static constexpr const char* kNames[] = {"reserved", "prepared", "committed",
                                                              "abandoned"};
                     return kNames[static_cast<int>(peek(*h.pool, [&] { return h.step->state; }))];
                   })
      .def_prop_ro("num_tokens", [](const StepHandle& h) { return h.step->num_tokens(); })
      .def_prop_ro("max_blocks", [](const StepHandle& h) { return h.step->max_blocks(); })
      .def("num_new_tokens",
           [](const StepHandle& h) {
             std::vector<size_t> counts;
             for (const StepRow& row : h.step->rows) counts.push_back(row.end - row.start);
             return counts;
           })
      .def("copies", [](const StepHandle& h) {
        std::vector<std::tuple<BlockId, BlockId, size_t>> copies;
        for (const StepRow& row : h.step->rows)
          if (row.copy)
            copies.emplace_back(row.copy->sources[0], row.copy->destinations[0],
                                row.copy->num_tokens);
        return copies;
      });
}

void bind_fence(nb::module_& m) {
  nb::class_<FenceHandle>(m, "Fence", "References for a copy in flight. Made by BlockPool.fence.")
      .def_prop_ro("is_released", &FenceHandle::is_released)
      .def_prop_ro("num_blocks", [](const FenceHandle& h) { return h.fence->pages[0].size(); });
}

PoolHandle make_pool(size_t num_blocks, uint32_t block_size, const nb::bytes& digest_namespace,
                     bool prefix_caching, bool token_granular, bool events, bool manual_clock,
                     bool broken_digests) {
  std::string bytes = to_string(digest_namespace);
  return {std::make_shared<BlockPool>(
      PoolConfig{.num_blocks = {num_blocks},
                 .block_size = block_size,
                 .digest_namespace = {bytes.begin(), bytes.end()},
                 .prefix_caching = prefix_caching,
                 .token_granular = token_granular,
                 .events = events,
                 .clock = manual_clock ? Clock::Kind::kManual : Clock::Kind::kMonotonic,
                 .broken_digests = broken_digests})};
}

std::vector<BlockExtras> encode(const PoolHandle& h, const TokenIds& tokens,
                                const Identity& identity) {
  return identity.encode(tokens.size(), h.pool->block_size());
}

auto match(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt, nb::handle salt_from,
           nb::handle extras) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  Match match;
  {
    nb::gil_scoped_release release;
    std::vector<Token> room;
    match = h.pool->match(source.read(room), block_extras);
  }
  return std::make_tuple(match.num_block_tokens, match.num_partial_tokens,
                         to_array(std::move(match.block_ids)), match.partial_block_id);
}

/// Nanoseconds, at least one unless there are none, and at most nearly kForever.
Nanoseconds to_nanoseconds(double seconds) {
  if (seconds <= 0) return 0;
  return std::max(static_cast<Nanoseconds>(std::min(seconds * 1e9, 9.2e18)), Nanoseconds{1});
}

/// (begin, end, priority, ttl in seconds or 0 for good, whether a hit begins the time anew)
using RetentionTuple = std::tuple<size_t, size_t, Priority, double, bool>;

RetentionRange to_range(const RetentionTuple& tuple) {
  const auto& [begin, end, priority, ttl_s, refreshes] = tuple;
  return {begin, end, priority, to_nanoseconds(ttl_s), refreshes};
}

SequenceHandle open(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
                    nb::handle salt_from, nb::handle extras,
                    const std::vector<RetentionTuple>& retention,
                    std::optional<size_t> publish_end) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  OpenOptions options;
  for (const RetentionTuple& tuple : retention) options.retention.push_back(to_range(tuple));
  if (publish_end) options.publish_end = *publish_end;
  nb::gil_scoped_release release;
  return {h.pool, h.pool->open(source.copy(), std::move(block_extras), std::move(options))};
}

size_t retain(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
              nb::handle salt_from, nb::handle extras, const RetentionTuple& retention) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  nb::gil_scoped_release release;
  std::vector<Token> room;
  return h.pool->retain(source.read(room), block_extras, to_range(retention));
}

/// (salt, blocks, quota or None)
std::tuple<nb::bytes, size_t, std::optional<size_t>> to_tuple(const TenantUsage& usage) {
  std::optional<size_t> quota;
  if (usage.quota != kNoQuota) quota = usage.quota;
  return {nb::bytes(usage.salt.data(), usage.salt.size()), usage.num_blocks, quota};
}

constexpr const char* kEvictionReasons[kNumEvictionReasons] = {"capacity", "request", "quota",
                                                               "reset"};

nb::dict explain(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
                 nb::handle salt_from, nb::handle extras, bool across_tenants) {
  static constexpr const char* kReasons[] = {"hit",        "short_tail", "evicted", "generation",
                                             "other_salt", "differs",    "unknown"};
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  Explanation e;
  {
    nb::gil_scoped_release release;
    std::vector<Token> room;
    e = h.pool->explain(source.read(room), block_extras, across_tenants);
  }
  bool is_evicted = e.reason == Explanation::Reason::kEvicted;
  nb::dict d;
  d["reason"] = kReasons[static_cast<int>(e.reason)];
  d["num_block_tokens"] = e.num_block_tokens;
  d["num_cached_tokens"] = e.num_block_tokens + e.num_partial_tokens;
  d["expected_token"] = e.expected_token;
  d["evicted_at_s"] = nb::none();
  d["evicted_by"] = nb::none();
  if (is_evicted) {
    d["evicted_at_s"] = static_cast<double>(e.evicted_at) / kSecond;
    d["evicted_by"] = kEvictionReasons[static_cast<size_t>(e.evicted_by)];
  }
  return d;
}

nb::dict snapshot(const PoolHandle& h) {
  PoolSnapshot map;
  {
    nb::gil_scoped_release release;
    map = h.pool->snapshot();
  }
  nb::dict d;
  d["state"] = to_array(std::move(map.state));
  d["num_refs"] = to_array(std::move(map.num_refs));
  d["depth"] = to_array(std::move(map.depth));
  d["parent"] = to_array(std::move(map.parent));
  d["priority"] = to_array(std::move(map.priority));
  d["retained_s"] = to_array(std::move(map.retained_s));
  d["idle_s"] = to_array(std::move(map.idle_s));
  d["eviction_rank"] = to_array(std::move(map.eviction_rank));
  d["tenant"] = to_array(std::move(map.tenant));
  nb::list salts;
  for (const std::string& salt : map.salts) salts.append(nb::bytes(salt.data(), salt.size()));
  d["salts"] = salts;
  d["block_size"] = h.pool->block_size();
  d["now_s"] = map.now_s;
  return d;
}

Array<BlockId> lookup(const PoolHandle& h, const std::vector<nb::bytes>& digests) {
  std::vector<Digest> wanted(digests.size());
  for (size_t i = 0; i < digests.size(); ++i)
    std::copy_n(digests[i].c_str(), std::min(digests[i].size(), wanted[i].size()),
                reinterpret_cast<char*>(wanted[i].data()));
  std::vector<BlockId> ids;
  {
    nb::gil_scoped_release release;
    ids = h.pool->lookup(wanted);
  }
  return to_array(std::move(ids));
}

/// `cache_salts` and `extras` have one for each prompt, or are None. Only a salt has a `salt_from`.
Array<int64_t> match_lengths(const PoolHandle& h, const nb::list& prompts,
                             const std::optional<nb::list>& cache_salts, nb::handle salt_from,
                             const std::optional<nb::list>& extras) {
  std::vector<TokenIds> sources;
  sources.reserve(prompts.size());
  for (nb::handle prompt : prompts)
    sources.emplace_back(prompt, "prompts", static_cast<Py_ssize_t>(sources.size()));
  std::vector<std::vector<BlockExtras>> block_extras(sources.size());
  const nb::object none = nb::none();
  for (size_t i = 0; (cache_salts || extras) && i < sources.size(); ++i) {
    const nb::object salt = cache_salts ? nb::object((*cache_salts)[i]) : none;
    const nb::object own = extras ? nb::object((*extras)[i]) : none;
    block_extras[i] =
        encode(h, sources[i], {salt, salt.is_none() ? nb::handle(none) : salt_from, own});
  }
  std::vector<int64_t> lengths(sources.size());
  {
    nb::gil_scoped_release release;
    std::vector<Token> room;
    // One lock a prompt, so that a long queue does not stop a running step.
    for (size_t i = 0; i < sources.size(); ++i)
      lengths[i] =
          static_cast<int64_t>(h.pool->match_length(sources[i].read(room), block_extras[i]));
  }
  return to_array(std::move(lengths));
}

size_t touch(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt, nb::handle salt_from,
             nb::handle extras) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  nb::gil_scoped_release release;
  std::vector<Token> room;
  return h.pool->touch(source.read(room), block_extras);
}

/// (kind, digests, parent or None, tokens, payloads) of each event.
nb::list take_events(const PoolHandle& h) {
  static constexpr const char* kNames[] = {"stored", "removed", "cleared"};
  const nb::bytes no_payload("", 0);
  nb::list list;
  for (const Event& event : without_gil([&] { return h.pool->take_events(); })) {
    nb::list payloads;
    for (const std::string& p : event.payloads)
      payloads.append(p.empty() ? no_payload : nb::bytes(p.data(), p.size()));
    list.append(nb::make_tuple(kNames[static_cast<int>(event.kind)], block_hash_list(event.digests),
                               event.has_parent ? nb::object(BlockHash(event.parent)) : nb::none(),
                               int_list(event.tokens), payloads));
  }
  return list;
}

void append(const PoolHandle& h, const std::vector<SequenceHandle*>& handles,
            const nb::list& token_ids) {
  std::vector<std::vector<Token>> tokens;
  for (nb::handle ids : token_ids) tokens.push_back(TokenIds(ids).copy());
  if (tokens.size() != handles.size())
    throw UsageError("append: expected tokens for " + std::to_string(handles.size()) +
                     " sequences, got " + std::to_string(tokens.size()));
  nb::gil_scoped_release release;
  h.pool->append(to_pointers(handles), tokens);
}

/// One token for each sequence: what every decode step does. False, and no change, when the tokens
/// are neither a list of int nor a numpy array.
bool append_each(const PoolHandle& h, nb::handle seqs, nb::handle token_ids) {
  std::vector<int64_t> values;
  std::vector<Token> tokens;
  if (is_plain_array(token_ids)) {
    tokens = TokenIds(token_ids).copy();
  } else {
    if (!read_ints(token_ids, values)) return false;
    for (int64_t value : values)
      if (value < 0 || value > std::numeric_limits<Token>::max()) return false;
    tokens.assign(values.begin(), values.end());
  }
  Sequences sequences = to_sequences("append", seqs);
  if (tokens.size() != sequences.size())
    throw UsageError("append: expected tokens for " + std::to_string(sequences.size()) +
                     " sequences, got " + std::to_string(tokens.size()));
  nb::gil_scoped_release release;
  std::vector<Sequence*> pointers;
  for (const std::shared_ptr<Sequence>& sequence : sequences) pointers.push_back(sequence.get());
  h.pool->append_each(pointers, tokens);
  return true;
}

StepHandle reserve(const PoolHandle& h, nb::handle seqs, nb::handle num_new_tokens) {
  Sequences sequences = to_sequences("reserve", seqs);
  std::vector<int64_t> counts =
      to_counts("reserve", "num_new_tokens", num_new_tokens, sequences.size());
  nb::gil_scoped_release release;
  return {h.pool, h.pool->reserve(std::move(sequences), counts)};
}

nb::tuple prepare(PoolHandle& h, const StepHandle& s) {
  Tables tables = h.tables->take();
  Step& step = *s.step;
  tables.shape(step.rows.size(), step.max_blocks(), step.num_tokens());
  {
    nb::gil_scoped_release release;
    h.pool->prepare(step, tables.buffers());
  }
  nb::tuple arrays = tables.arrays();
  h.tables->give_back(std::move(tables));
  return arrays;
}

nb::dict stats(const PoolHandle& h) {
  PoolStats s = without_gil([&] { return h.pool->stats(); });
  nb::dict d;
  d["num_blocks"] = s.num_blocks;
  d["num_free_blocks"] = s.num_free;
  d["num_writable_blocks"] = s.num_writable;
  d["num_committed_blocks"] = s.num_committed;
  d["num_evictable_blocks"] = s.num_evictable;
  d["num_nodes"] = s.num_nodes;
  nb::dict by_reason;
  for (size_t i = 0; i < kNumEvictionReasons; ++i)
    by_reason[kEvictionReasons[i]] = s.num_evicted_by[i];
  d["num_evicted_by"] = by_reason;
  d["num_prompts"] = s.num_prompts;
  d["num_prompt_tokens"] = s.num_prompt_tokens;
  d["num_cached_tokens"] = s.num_cached_tokens;
  d["num_fenced_blocks"] = s.num_fenced;
  d["num_collisions"] = s.num_collisions;
  d["residency_histogram"] = nb::tuple(nb::cast(s.residency.counts));
  d["reuse_gap_histogram"] = nb::tuple(nb::cast(s.reuse_gaps.counts));
  return d;
}

Array<BlockId> allocate(const PoolHandle& h, int64_t num_blocks) {
  std::vector<BlockId> ids;
  {
    nb::gil_scoped_release release;
    ids = h.pool->allocate(num_blocks);
  }
  return to_array(std::move(ids));
}

std::optional<BlockHash> digest_of(const PoolHandle& h, int64_t block_id) {
  Digest digest;
  bool is_published;
  {
    nb::gil_scoped_release release;  // may have to hash all ancestors first
    is_published = h.pool->digest_of(block_id, &digest);
  }
  if (!is_published) return std::nullopt;
  return BlockHash(digest);
}

}  // namespace

void bind_pool(nb::module_& m) {
  bind_sequence(m);
  bind_step(m);
  bind_fence(m);
  nb::class_<PoolHandle>(m, "BlockPool", "See pagedkv.BlockPool.")
      .def_static("make", &make_pool, "num_blocks"_a, "block_size"_a, "digest_namespace"_a,
                  "prefix_caching"_a, "token_granular"_a, "events"_a, "manual_clock"_a,
                  "broken_digests"_a)
      .def("match", &match, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none())
      .def("open", &open, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none(), "retention"_a, "publish_end"_a.none())
      .def("retain", &retain, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none(), "retention"_a)
      .def("match_lengths", &match_lengths, "prompts"_a, "cache_salts"_a.none(),
           "salt_from"_a.none(), "extras"_a.none())
      .def("touch", &touch, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none())
      .def("append", &append, "sequences"_a, "token_ids"_a)
      .def("append_each", &append_each, "sequences"_a.none(), "token_ids"_a.none())
      .def(
          "truncate",
          [](const PoolHandle& h, const SequenceHandle& s, size_t n) {
            h.pool->truncate(*s.sequence, n);
          },
          "sequence"_a, "num_tokens"_a, NoGil())
      .def(
          "fork",
          [](const PoolHandle& h, const SequenceHandle& s) {
            return SequenceHandle{h.pool, h.pool->fork(*s.sequence)};
          },
          "sequence"_a, NoGil())
      .def(
          "stop_publishing",
          [](const PoolHandle& h, const SequenceHandle& s, size_t position) {
            h.pool->stop_publishing(*s.sequence, position);
          },
          "sequence"_a, "position"_a, NoGil())
      .def(
          "preempt",
          [](const PoolHandle& h, const SequenceHandle& s) { h.pool->preempt(*s.sequence); },
          "sequence"_a, NoGil())
      .def(
          "close", [](const PoolHandle& h, const SequenceHandle& s) { h.pool->close(*s.sequence); },
          "sequence"_a, NoGil())
      .def("reserve", &reserve, "sequences"_a.none(), "num_new_tokens"_a.none())
      .def("prepare", &prepare, "step"_a)
      .def(
          "commit",
          [](const PoolHandle& h, const StepHandle& s, const std::vector<int64_t>& num_accepted) {
            h.pool->commit(*s.step, num_accepted);
          },
          "step"_a, "num_accepted"_a, NoGil())
      .def(
          "abandon", [](const PoolHandle& h, const StepHandle& s) { h.pool->abandon(*s.step); },
          "step"_a, NoGil())
      .def("allocate", &allocate, "num_blocks"_a)
      .def(
          "free", [](const PoolHandle& h, const std::vector<int64_t>& ids) { h.pool->free(ids); },
          "block_ids"_a, NoGil())
      .def(
          "evict", [](const PoolHandle& h, int64_t n) { return h.pool->evict(n); }, "num_blocks"_a,
          NoGil())
      .def(
          "reset", [](const PoolHandle& h) { return h.pool->reset(); }, NoGil())
      .def(
          "bump_generation", [](const PoolHandle& h) { h.pool->bump_generation(); }, NoGil())
      .def(
          "set_quota",
          [](const PoolHandle& h, const nb::bytes& salt, std::optional<size_t> num_blocks) {
            std::string bytes = to_string(salt);
            without_gil([&] { h.pool->set_quota(bytes, num_blocks.value_or(kNoQuota)); });
          },
          "cache_salt"_a, "num_blocks"_a.none())
      .def(
          "tenant_usage",
          [](const PoolHandle& h, const nb::bytes& salt) {
            std::string bytes = to_string(salt);
            return to_tuple(without_gil([&] { return h.pool->tenant_usage(bytes); }));
          },
          "cache_salt"_a)
      .def("tenants",
           [](const PoolHandle& h) {
             std::vector<std::tuple<nb::bytes, size_t, std::optional<size_t>>> all;
             for (const TenantUsage& usage : without_gil([&] { return h.pool->tenants(); }))
               all.push_back(to_tuple(usage));
             return all;
           })
      .def(
          "fence",
          [](const PoolHandle& h, const std::vector<SequenceHandle*>& handles) {
            return FenceHandle(h.pool, h.pool->fence(to_pointers(handles)));
          },
          "sequences"_a, NoGil())
      .def(
          "release", [](const PoolHandle& h, const FenceHandle& f) { h.pool->release(*f.fence); },
          "fence"_a, NoGil())
      .def(
          "advance", [](const PoolHandle& h, double s) { h.pool->advance(to_nanoseconds(s)); },
          "seconds"_a, NoGil())
      .def_prop_ro("now_s",
                   [](const PoolHandle& h) {
                     return static_cast<double>(without_gil([&] { return h.pool->now(); })) /
                            kSecond;
                   })
      .def("explain", &explain, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none(), "across_tenants"_a)
      .def("snapshot", &snapshot)
      .def("lookup", &lookup, "digests"_a)
      .def("take_events", &take_events)
      .def("stats", &stats)
      .def("work",
           [](const PoolHandle& h) {
             PoolWork work = h.pool->work();
             return std::make_tuple(work.num_digests, work.num_steps);
           })
      .def("digest_of", &digest_of, "block_id"_a)
      .def("check_integrity", [](const PoolHandle& h) { h.pool->check_integrity(); }, NoGil());
}

}  // namespace pagedkv::bindings
