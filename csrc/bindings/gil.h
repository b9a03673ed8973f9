// Giving up Python's lock for a while, also when the interpreter ends meanwhile.
//
// Before Python 3.14 a thread that asks for the lock of an ending interpreter is ended by
// unwinding its stack, which C++ does not survive. Daemon threads of a server are often inside the
// pool at that moment, so they are stopped here for good instead, before they ask.

#pragma once

#include <nanobind/nanobind.h>

namespace pagedkv::bindings {

/// Gives up Python's lock for as long as it lives.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

/// To be called once, when the module is loaded.
void stop_threads_at_exit();

}  // namespace pagedkv::bindings
