// The C++ half of pagedkv/errors.py. The bindings raise the Python class of the same name.
//
// Messages follow one grammar: "what: expected ..., got ..., where".

#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace pagedkv {

/// The root of the tree.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The pool has too few pages for the call; nothing was changed.
struct OutOfBlocksError : Error {
  OutOfBlocksError(const std::string& message, size_t needed, size_t free, size_t evictable)
      : Error(message), needed(needed), free(free), evictable(evictable) {}
  size_t needed, free, evictable;
};

/// An argument is wrong.
struct UsageError : Error {
  using Error::Error;
};

/// The call is right but comes at the wrong moment.
struct StateError : Error {
  using Error::Error;
};

/// An invariant of ours is broken: a bug in pagedkv.
struct IntegrityError : Error {
  using Error::Error;
};

}  // namespace pagedkv
