// What Python holds of a pool, and what all its bindings share.
//
// A handle that is collected gives its pages back: a lost sequence is closed, a lost step abandoned
// and a lost fence released. Every call that may loop or wait runs without the GIL.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "extras.h"
#include "gil.h"
#include "lists.h"
#include "pagedkv/block_pool.h"
#include "tables.h"
#include "tokens.h"

namespace pagedkv::bindings {

namespace nb = nanobind;

using NoGil = nb::call_guard<GilRelease>;

struct PoolHandle {
  std::shared_ptr<BlockPool> pool;
  std::unique_ptr<TablesInUse> tables = std::make_unique<TablesInUse>();
  std::unique_ptr<TokenInts> token_ints = std::make_unique<TokenInts>();
};

/// Runs `call`, which waits for the pool's lock, and lets other threads of Python run meanwhile.
template <typename F>
auto without_gil(F&& call) {
  GilRelease release;
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

inline bool has_ended(const Sequence& sequence) { return sequence.is_closed; }
inline bool has_ended(const Step& step) { return !step.is_open(); }
inline bool has_ended(const Fence& fence) { return fence.is_released; }
inline void end(BlockPool& pool, Sequence& sequence) { pool.close(sequence); }
inline void end(BlockPool& pool, Step& step) { pool.abandon(step); }
inline void end(BlockPool& pool, Fence& fence) { pool.release(fence); }

/// Something for which the pool holds pages until it ends.
template <typename T>
struct HandleOf {
  std::shared_ptr<BlockPool> pool;
  std::shared_ptr<T> own;

  HandleOf(std::shared_ptr<BlockPool> pool, std::shared_ptr<T> own)
      : pool(std::move(pool)), own(std::move(own)) {}
  HandleOf(HandleOf&&) = default;
  ~HandleOf() {
    if (own && !has_ended()) without_gil([&] { end(*pool, *own); });
  }
  bool has_ended() const {
    return peek(*pool, [&] { return bindings::has_ended(*own); });
  }
};
using SequenceHandle = HandleOf<Sequence>;
using StepHandle = HandleOf<Step>;
using FenceHandle = HandleOf<Fence>;

template <typename T>
using NumpyArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

/// A numpy array, which a stub shows as nanobind's.
template <typename T>
struct Array {
  nb::object object;
};

/// A numpy array of what the vector held.
template <typename T>
Array<T> to_array(std::vector<T> values) {
  constexpr size_t kSmall = 1024;
  if constexpr (std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>) {
    constexpr auto type = sizeof(T) == 4 ? ArrayType::kInt32 : ArrayType::kInt64;
    if (values.size() <= kSmall)
      if (nb::object array = new_array(values.data(), values.size(), type); array.is_valid())
        return {std::move(array)};
  }
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {nb::cast(NumpyArray<T>(owned->data(), {owned->size()}, owner))};
}

inline std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

inline std::vector<BlockExtras> encode(const PoolHandle& h, const TokenIds& tokens,
                                       const Identity& identity) {
  return identity.encode(tokens.size(), h.pool->block_size());
}

/// Nanoseconds, at least one unless there are none, and at most nearly kForever.
inline Nanoseconds to_nanoseconds(double seconds) {
  if (seconds <= 0) return 0;
  return std::max(static_cast<Nanoseconds>(std::min(seconds * 1e9, 9.2e18)), Nanoseconds{1});
}

}  // namespace pagedkv::bindings

template <typename T>
struct nanobind::detail::type_caster<pagedkv::bindings::Array<T>> {
  static constexpr auto Name = make_caster<pagedkv::bindings::NumpyArray<T>>::Name;
  static handle from_cpp(const pagedkv::bindings::Array<T>& array, rv_policy, cleanup_list*) {
    return array.object.inc_ref();
  }
};
