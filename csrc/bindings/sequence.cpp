// Sequence, Step and Fence for pagedkv/sequence.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "block_hashes.h"
#include "handles.h"

using namespace nanobind::literals;

namespace pagedkv::bindings {
namespace {

void bind_sequence(nb::module_& m) {
  auto read = [](auto member) {
    return [member](const SequenceHandle& h) {
      return peek(*h.pool, [&] { return (*h.own).*member; });
    };
  };
  nb::class_<SequenceHandle>(m, "Sequence", "One request. Made by BlockPool.open.")
      .def_prop_ro("num_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool, [&] { return h.own->tokens.size(); });
                   })
      .def_prop_ro("num_cached_tokens", read(&Sequence::num_cached))
      .def_prop_ro("num_computed_tokens", read(&Sequence::num_computed))
      .def_prop_ro("num_uncached_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool,
                                 [&] { return h.own->tokens.size() - h.own->num_computed; });
                   })
      .def_prop_ro("num_committed_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool,
                                 [&] { return h.own->path.size() * h.pool->block_size(); });
                   })
      .def_prop_ro("num_reserved_tokens",
                   [](const SequenceHandle& h) {
                     return peek(*h.pool,
                                 [&] { return h.own->tables[0].size() * h.pool->block_size(); });
                   })
      .def_prop_ro("num_releasable_blocks",
                   [](const SequenceHandle& h) {
                     return without_gil([&] { return h.pool->num_releasable(*h.own); });
                   })
      .def("prompt_counts",
           [](const SequenceHandle& h) {
             return peek(*h.pool, [&] {
               const Sequence& s = *h.own;
               return std::make_tuple(s.num_prompt, s.num_hit, s.num_hit_with_kv,
                                      std::min(s.num_publishable, s.quota_end));
             });
           })
      .def(
          "close", [](const SequenceHandle& h) { h.pool->close(*h.own); }, NoGil())
      .def_prop_ro("is_closed", read(&Sequence::is_closed))
      .def_prop_ro("is_preempted", read(&Sequence::is_preempted))
      .def("token_ids",
           [](const SequenceHandle& h) {
             return to_array(peek(*h.pool, [&] { return h.own->tokens; }));
           })
      .def(
          "block_ids",
          [](const SequenceHandle& h, size_t group) {
            return to_array(
                peek(*h.pool, [&] { return std::vector<BlockId>(h.own->tables[group]); }));
          },
          "group"_a)
      .def("block_hashes", [](const SequenceHandle& h) {
        std::vector<Digest> digests;
        {
          GilRelease release;
          digests = h.pool->block_digests(*h.own);
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
                     return kNames[static_cast<int>(peek(*h.pool, [&] { return h.own->state; }))];
                   })
      .def_prop_ro("num_tokens", [](const StepHandle& h) { return h.own->num_tokens(); })
      .def_prop_ro("max_blocks", [](const StepHandle& h) { return h.own->max_blocks(); })
      .def("num_new_tokens",
           [](const StepHandle& h) {
             std::vector<size_t> counts;
             for (const StepRow& row : h.own->rows) counts.push_back(row.end - row.start);
             return counts;
           })
      .def(
          "copies",
          [](const StepHandle& h, size_t group) {
            std::vector<std::tuple<BlockId, BlockId, size_t>> copies;
            for (const StepRow& row : h.own->rows)
              if (row.copy)
                copies.emplace_back(row.copy->sources[group], row.copy->destinations[group],
                                    row.copy->num_tokens);
            return copies;
          },
          "group"_a);
}

void bind_fence(nb::module_& m) {
  nb::class_<FenceHandle>(m, "Fence", "References for a copy in flight. Made by BlockPool.fence.")
      .def_prop_ro("is_released", &FenceHandle::has_ended)
      .def_prop_ro("num_blocks", [](const FenceHandle& h) { return h.own->pages[0].size(); });
}

}  // namespace

void bind_sequences(nb::module_& m) {
  bind_sequence(m);
  bind_step(m);
  bind_fence(m);
}

}  // namespace pagedkv::bindings
