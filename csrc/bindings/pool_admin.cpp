// The operator's part of BlockPool, for pagedkv/pool_admin.py.

#include "pool_admin.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "block_hashes.h"
#include "handles.h"
#include "lists.h"

using namespace nanobind::literals;

namespace pagedkv::bindings {
namespace {

/// (salt, blocks, quota or None)
using TenantTuple = std::tuple<nb::bytes, size_t, std::optional<size_t>>;
TenantTuple to_tuple(const TenantUsage& usage) {
  std::optional<size_t> quota;
  if (usage.quota != kNoQuota) quota = usage.quota;
  return {nb::bytes(usage.salt.data(), usage.salt.size()), usage.num_blocks, quota};
}

constexpr const char* kEvictionReasons[kNumEvictionReasons] = {"capacity", "request", "quota",
                                                               "reset"};

nb::dict explain(const PoolHandle& h, nb::handle token_ids, nb::handle cache_salt,
                 nb::handle salt_from, nb::handle extras, bool across_tenants) {
  static constexpr const char* kReasons[] = {"hit",        "short_tail", "window",  "evicted",
                                             "generation", "other_salt", "differs", "unknown"};
  const TokenIds source(token_ids);
  std::vector<BlockExtras> block_extras = encode(h, source, {cache_salt, salt_from, extras});
  Explanation e;
  {
    GilRelease release;
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

nb::dict snapshot(const PoolHandle& h, size_t group) {
  PoolSnapshot map;
  {
    GilRelease release;
    map = h.pool->snapshot(group);
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
  GilTurns turns;
  for (const std::string& salt : map.salts) {
    salts.append(nb::bytes(salt.data(), salt.size()));
    turns.made(1);
  }
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
    GilRelease release;
    ids = h.pool->lookup(wanted);
  }
  return to_array(std::move(ids));
}

/// (kind, digests, parent or None, tokens, payloads) of each event.
nb::list take_events(const PoolHandle& h) {
  static constexpr const char* kNames[] = {"stored", "removed", "cleared"};
  const nb::bytes no_payload("", 0);
  nb::list list;
  GilTurns turns;
  std::deque<Event> events = without_gil([&] { return h.pool->take_events(); });
  for (const Event& event : events) {
    turns.made(event.payloads.size());
    nb::list payloads =
        nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(event.payloads.size())));
    if (!payloads.is_valid()) nb::raise_python_error();
    Py_ssize_t i = 0;
    for (const std::string& p : event.payloads) {
      nb::bytes payload = p.empty() ? no_payload : nb::bytes(p.data(), p.size());
      PyList_SET_ITEM(payloads.ptr(), i++, payload.release().ptr());
    }
    list.append(nb::make_tuple(kNames[static_cast<int>(event.kind)], block_hash_list(event.digests),
                               event.has_parent ? nb::object(BlockHash(event.parent)) : nb::none(),
                               h.token_ints->list_of(event.tokens, turns), payloads));
  }
  if (events.size() > 64) without_gil([&] { events.clear(); });  // takes a while
  return list;
}

nb::dict stats(const PoolHandle& h) {
  PoolStats s = without_gil([&] { return h.pool->stats(); });
  nb::dict d;
  d["num_blocks"] = s.num_blocks;
  d["num_free_blocks"] = s.num_free;
  d["num_writable_blocks"] = s.num_writable;
  d["num_committed_blocks"] = s.num_committed;
  d["num_evictable_blocks"] = s.num_evictable;
  d["num_fenced_blocks"] = s.num_fenced;
  nb::list groups;
  for (const PageCounts& c : s.groups)
    groups.append(nb::make_tuple(c.num_blocks, c.num_free, c.num_writable, c.num_committed,
                                 c.num_evictable, c.num_fenced));
  d["groups"] = groups;
  d["num_nodes"] = s.num_nodes;
  nb::dict by_reason;
  for (size_t i = 0; i < kNumEvictionReasons; ++i)
    by_reason[kEvictionReasons[i]] = s.num_evicted_by[i];
  d["num_evicted_by"] = by_reason;
  d["num_prompts"] = s.num_prompts;
  d["num_prompt_tokens"] = s.num_prompt_tokens;
  d["num_cached_tokens"] = s.num_cached_tokens;
  d["num_collisions"] = s.num_collisions;
  d["num_dropped_events"] = s.num_dropped_events;
  d["residency_histogram"] = nb::tuple(nb::cast(s.residency.counts));
  d["reuse_gap_histogram"] = nb::tuple(nb::cast(s.reuse_gaps.counts));
  return d;
}

std::optional<BlockHash> digest_of(const PoolHandle& h, int64_t block_id, size_t group) {
  Digest digest;
  bool is_published;
  {
    GilRelease release;  // may have to hash all ancestors first
    is_published = h.pool->digest_of(block_id, &digest, group);
  }
  if (!is_published) return std::nullopt;
  return BlockHash(digest);
}

}  // namespace

void bind_pool_admin(nb::class_<PoolHandle>& pool) {
  pool.def(
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
             nb::typed<nb::list, TenantTuple> all;
             GilTurns turns;
             for (const TenantUsage& usage : without_gil([&] { return h.pool->tenants(); })) {
               all.append(to_tuple(usage));
               turns.made(4);
             }
             return all;
           })
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
      .def("snapshot", &snapshot, "group"_a)
      .def("lookup", &lookup, "digests"_a)
      .def("take_events", &take_events)
      .def("stats", &stats)
      .def("work",
           [](const PoolHandle& h) {
             PoolWork work = h.pool->work();
             return std::make_tuple(work.num_digests, work.num_steps);
           })
      .def("digest_of", &digest_of, "block_id"_a, "group"_a)
      .def("check_integrity", [](const PoolHandle& h) { h.pool->check_integrity(); }, NoGil());
}

}  // namespace pagedkv::bindings
