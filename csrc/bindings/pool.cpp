// BlockPool for pagedkv/pool.py: the verbs of requests, steps and pages.

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
#include "handles.h"
#include "lists.h"
#include "pagedkv/error.h"
#include "pagedkv/kernels.h"
#include "pool_admin.h"

using namespace nanobind::literals;

namespace pagedkv::bindings {
namespace {

using Sequences = std::vector<std::shared_ptr<Sequence>>;

/// The sequences of a list of pagedkv.Sequence; of anything else, what core_sequences in
/// pagedkv/sequence.py makes of it.
Sequences to_sequences(const char* verb, nb::handle seqs) {
  Sequences sequences;
  bool is_usual = read_core_slots<SequenceHandle>(
      seqs, [&](const SequenceHandle& handle, nb::handle) { sequences.push_back(handle.own); });
  if (is_usual) return sequences;
  sequences.clear();
  auto core_sequences = nb::module_::import_("pagedkv.sequence").attr("core_sequences");
  for (nb::handle core : core_sequences(verb, seqs))
    sequences.push_back(nb::cast<const SequenceHandle&>(core).own);
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
  for (const SequenceHandle* handle : handles) sequences.push_back(handle->own.get());
  return sequences;
}

MakePolicy find_policy(const std::string& name) {
  for (const NamedPolicy& policy : policies())
    if (policy.name == name) return policy.make;
  throw UsageError("policy: expected one of pagedkv.pool.POLICIES, got " + name);
}

PoolHandle make_pool(const std::vector<size_t>& num_blocks, const std::vector<uint32_t>& windows,
                     uint32_t block_size, const nb::bytes& digest_namespace, bool prefix_caching,
                     bool token_granular, bool events, bool manual_clock, bool broken_digests,
                     uint64_t seed, const std::string& policy,
                     std::optional<uint32_t> equal_cost_tokens) {
  std::string bytes = to_string(digest_namespace);
  return {std::make_shared<BlockPool>(
      PoolConfig{.num_blocks = num_blocks,
                 .windows = windows,
                 .block_size = block_size,
                 .digest_namespace = {bytes.begin(), bytes.end()},
                 .prefix_caching = prefix_caching,
                 .token_granular = token_granular,
                 .events = events,
                 .clock = manual_clock ? Clock::Kind::kManual : Clock::Kind::kMonotonic,
                 .broken_digests = broken_digests,
                 .seed = seed,
                 .make_policy = find_policy(policy),
                 .equal_cost_tokens = equal_cost_tokens})};
}

auto match(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt, nb::handle salt_from,
           nb::handle extras) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  Match match;
  {
    GilRelease release;
    std::vector<Token> room;
    match = h.pool->match(source.read(room), block_extras);
  }
  return std::make_tuple(match.num_block_tokens, match.num_partial_tokens,
                         to_array(std::move(match.block_ids)), match.partial_block_id);
}

/// (begin, end, priority, ttl in seconds or 0 for good, whether a hit begins the time anew)
using RetentionTuple = std::tuple<size_t, size_t, Priority, double, bool>;

RetentionRange to_range(const RetentionTuple& tuple) {
  const auto& [begin, end, priority, ttl_s, refreshes] = tuple;
  return {begin, end, priority, to_nanoseconds(ttl_s), refreshes};
}

SequenceHandle open(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
                    nb::handle salt_from, nb::handle extras,
                    const std::optional<std::vector<RetentionTuple>>& retention,
                    std::optional<size_t> publish_end, bool reuse) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  OpenOptions options;
  if (retention)
    for (const RetentionTuple& tuple : *retention) options.retention.push_back(to_range(tuple));
  if (publish_end) options.publish_end = *publish_end;
  options.reuse = reuse;
  GilRelease release;
  return {h.pool, h.pool->open(source.copy(), std::move(block_extras), std::move(options))};
}

size_t retain(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
              nb::handle salt_from, nb::handle extras, const RetentionTuple& retention) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  GilRelease release;
  std::vector<Token> room;
  return h.pool->retain(source.read(room), block_extras, to_range(retention));
}

/// Calls `visit` with the tokens and the extras of each prompt, without the GIL, and returns what
/// it gives. `cache_salts` and `extras` have one for each prompt, or are None. Only a salt has a
/// `salt_from`.
template <typename Visit>
Array<int64_t> for_each_prompt(const PoolHandle& h, const nb::list& prompts,
                               const std::optional<nb::list>& cache_salts, nb::handle salt_from,
                               const std::optional<nb::list>& extras, Visit&& visit) {
  std::vector<TokenIds> sources;
  sources.reserve(prompts.size());
  for (nb::handle prompt : prompts)
    sources.emplace_back(prompt, "prompts", static_cast<Py_ssize_t>(sources.size()));
  // Prompts that follow each other with the same objects share what these come to.
  std::vector<std::vector<BlockExtras>> block_extras(1);
  std::vector<size_t> extras_of(sources.size());
  const nb::object none = nb::none();
  Identity last{none, none, none};
  size_t shortest = 0;
  for (size_t i = 0; (cache_salts || extras) && i < sources.size(); ++i) {
    // The lists are the caller's copies, so they keep their elements.
    const nb::handle salt = cache_salts ? PyList_GET_ITEM(cache_salts->ptr(), i) : none.ptr();
    const nb::handle own = extras ? PyList_GET_ITEM(extras->ptr(), i) : none.ptr();
    const Identity identity{salt, salt.is_none() ? nb::handle(none) : salt_from, own};
    if (!identity.has_objects_of(last) || !identity.is_repeatable() ||
        sources[i].size() < shortest) {
      block_extras.push_back(encode(h, sources[i], identity));
      shortest = sources[i].size();
      last = identity;
    }
    extras_of[i] = block_extras.size() - 1;
  }
  std::vector<int64_t> lengths(sources.size());
  {
    GilRelease release;
    std::vector<Token> room;
    // One lock a prompt, so that a long queue does not stop a running step.
    for (size_t i = sources.size(); i > 0; --i)
      lengths[i - 1] =
          static_cast<int64_t>(visit(sources[i - 1].read(room), block_extras[extras_of[i - 1]]));
  }
  return to_array(std::move(lengths));
}

Array<int64_t> match_lengths(const PoolHandle& h, const nb::list& prompts,
                             const std::optional<nb::list>& cache_salts, nb::handle salt_from,
                             const std::optional<nb::list>& extras) {
  return for_each_prompt(h, prompts, cache_salts, salt_from, extras,
                         [&](auto&&... prompt) { return h.pool->match_length(prompt...); });
}

Array<int64_t> waiting(const PoolHandle& h, const nb::list& prompts,
                       const std::optional<nb::list>& cache_salts, nb::handle salt_from,
                       const std::optional<nb::list>& extras) {
  bool is_first = true;  // but none is told before all of them are checked
  auto lengths = for_each_prompt(h, prompts, cache_salts, salt_from, extras, [&](auto&&... prompt) {
    if (std::exchange(is_first, false)) h.pool->forget_waiting();
    return h.pool->await(prompt...);
  });
  if (is_first) h.pool->forget_waiting();
  return lengths;
}

size_t touch(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt, nb::handle salt_from,
             nb::handle extras) {
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  GilRelease release;
  std::vector<Token> room;
  return h.pool->touch(source.read(room), block_extras);
}

void append(const PoolHandle& h, const std::vector<SequenceHandle*>& handles,
            const nb::list& token_ids) {
  std::vector<std::vector<Token>> tokens;
  for (nb::handle ids : token_ids) tokens.push_back(TokenIds(ids).copy());
  if (tokens.size() != handles.size())
    throw UsageError("append: expected tokens for " + std::to_string(handles.size()) +
                     " sequences, got " + std::to_string(tokens.size()));
  GilRelease release;
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
  // Python's references keep the sequences; to count the core's own takes longer.
  std::vector<Sequence*> sequences;
  std::vector<nb::object> kept;
  sequences.reserve(tokens.size());
  kept.reserve(tokens.size());
  const auto take = [&](const SequenceHandle& handle, nb::handle core) {
    sequences.push_back(handle.own.get());
    kept.push_back(nb::borrow(core));
  };
  if (!read_core_slots<SequenceHandle>(seqs, take)) {
    sequences.clear();
    auto core_sequences = nb::module_::import_("pagedkv.sequence").attr("core_sequences");
    for (nb::handle core : core_sequences("append", seqs))
      take(nb::cast<const SequenceHandle&>(core), core);
  }
  if (tokens.size() != sequences.size())
    throw UsageError("append: expected tokens for " + std::to_string(sequences.size()) +
                     " sequences, got " + std::to_string(tokens.size()));
  GilRelease release;
  h.pool->append_each(sequences, tokens);
  return true;
}

StepHandle reserve(const PoolHandle& h, nb::handle seqs, nb::handle num_new_tokens) {
  Sequences sequences = to_sequences("reserve", seqs);
  std::vector<int64_t> counts =
      to_counts("reserve", "num_new_tokens", num_new_tokens, sequences.size());
  GilRelease release;
  return {h.pool, h.pool->reserve(std::move(sequences), counts)};
}

/// reserve() for one sequence.
StepHandle reserve_one(const PoolHandle& h, const SequenceHandle& s, nb::handle num_new_tokens) {
  int overflow = -1;
  int64_t count = 0;
  if (PyLong_CheckExact(num_new_tokens.ptr()))
    count = PyLong_AsLongLongAndOverflow(num_new_tokens.ptr(), &overflow);
  if (overflow != 0) {  // as_counts has the messages
    nb::list counts;
    counts.append(num_new_tokens);
    count = to_counts("reserve", "num_new_tokens", counts, 1)[0];
  }
  GilRelease release;
  Sequences sequences(1, s.own);
  return {h.pool, h.pool->reserve(std::move(sequences), {&count, 1})};
}

nb::tuple prepare(PoolHandle& h, const StepHandle& s, size_t prefix_tokens) {
  Tables tables = h.tables->take(h.pool->num_groups());
  Step& step = *s.own;
  tables.shape(step.rows.size(), step.max_blocks(), step.num_tokens());
  {
    GilRelease release;
    h.pool->prepare(step, tables.buffers(prefix_tokens));
  }
  nb::tuple arrays = tables.arrays();
  h.tables->give_back(std::move(tables));
  return arrays;
}

Array<BlockId> allocate(const PoolHandle& h, int64_t num_blocks, size_t group) {
  std::vector<BlockId> ids;
  {
    GilRelease release;
    ids = h.pool->allocate(num_blocks, group);
  }
  return to_array(std::move(ids));
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.attr("SPLIT_TOKENS") = kSplitTokens;
  nb::list names;
  for (const NamedPolicy& policy : policies())
    names.append(nb::str(policy.name.data(), policy.name.size()));
  m.attr("POLICIES") = nb::tuple(names);
  nb::class_<PoolHandle> pool(m, "BlockPool", "See pagedkv.BlockPool.");
  pool.def_static("make", &make_pool, "num_blocks"_a, "windows"_a, "block_size"_a,
                  "digest_namespace"_a, "prefix_caching"_a, "token_granular"_a, "events"_a,
                  "manual_clock"_a, "broken_digests"_a, "seed"_a, "policy"_a,
                  "equal_cost_tokens"_a = nb::none())
      .def("match", &match, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none())
      .def("open", &open, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none(), "retention"_a.none(), "publish_end"_a.none(), "reuse"_a)
      .def("retain", &retain, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none(), "retention"_a)
      .def("match_lengths", &match_lengths, "prompts"_a, "cache_salts"_a.none(),
           "salt_from"_a.none(), "extras"_a.none())
      .def("waiting", &waiting, "prompts"_a, "cache_salts"_a.none(), "salt_from"_a.none(),
           "extras"_a.none())
      .def("touch", &touch, "token_ids"_a.none(), "cache_salt"_a.none(), "salt_from"_a.none(),
           "extras"_a.none())
      .def("append", &append, "sequences"_a, "token_ids"_a)
      .def("append_each", &append_each, "sequences"_a.none(), "token_ids"_a.none())
      .def(
          "truncate",
          [](const PoolHandle& h, const SequenceHandle& s, size_t n) {
            h.pool->truncate(*s.own, n);
          },
          "sequence"_a, "num_tokens"_a, NoGil())
      .def(
          "fork",
          [](const PoolHandle& h, const SequenceHandle& s) {
            return SequenceHandle{h.pool, h.pool->fork(*s.own)};
          },
          "sequence"_a, NoGil())
      .def(
          "stop_publishing",
          [](const PoolHandle& h, const SequenceHandle& s, size_t position) {
            h.pool->stop_publishing(*s.own, position);
          },
          "sequence"_a, "position"_a, NoGil())
      .def(
          "expect_reuse",
          [](const PoolHandle& h, const SequenceHandle& s, int64_t within_ns) {
            h.pool->expect_reuse(*s.own, within_ns);
          },
          "sequence"_a, "within_ns"_a, NoGil())
      .def(
          "last_turn",
          [](const PoolHandle& h, const SequenceHandle& s) { h.pool->last_turn(*s.own); },
          "sequence"_a, NoGil())
      .def(
          "preempt", [](const PoolHandle& h, const SequenceHandle& s) { h.pool->preempt(*s.own); },
          "sequence"_a, NoGil())
      .def(
          "close",
          [](const PoolHandle& h, const std::vector<SequenceHandle*>& handles) {
            h.pool->close(to_pointers(handles));
          },
          "sequences"_a, NoGil())
      .def(
          "close_one", [](const PoolHandle& h, const SequenceHandle& s) { h.pool->close(*s.own); },
          "sequence"_a, NoGil())
      .def("reserve_one", &reserve_one, "sequence"_a, "num_new_tokens"_a.none())
      .def("reserve", &reserve, "sequences"_a.none(), "num_new_tokens"_a.none())
      .def("prepare", &prepare, "step"_a, "prefix_tokens"_a)
      .def(
          "commit",
          [](const PoolHandle& h, const StepHandle& s,
             const std::optional<std::vector<int64_t>>& num_accepted) {
            h.pool->commit(*s.own, num_accepted ? std::span<const int64_t>(*num_accepted)
                                                : std::span<const int64_t>());
          },
          "step"_a, "num_accepted"_a.none(), NoGil())
      .def(
          "abandon", [](const PoolHandle& h, const StepHandle& s) { h.pool->abandon(*s.own); },
          "step"_a, NoGil())
      .def("allocate", &allocate, "num_blocks"_a, "group"_a)
      .def(
          "free",
          [](const PoolHandle& h, const std::vector<int64_t>& ids, size_t group) {
            h.pool->free(ids, group);
          },
          "block_ids"_a, "group"_a, NoGil())
      .def(
          "fence",
          [](const PoolHandle& h, const std::vector<SequenceHandle*>& handles) {
            return FenceHandle(h.pool, h.pool->fence(to_pointers(handles)));
          },
          "sequences"_a, NoGil())
      .def(
          "release", [](const PoolHandle& h, const FenceHandle& f) { h.pool->release(*f.own); },
          "fence"_a, NoGil());
  bind_pool_admin(pool);
}

}  // namespace pagedkv::bindings
