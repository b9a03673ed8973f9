// Giving up Python's lock for a while, also when the interpreter ends meanwhile.
//
// Before Python 3.14 a thread that asks for the lock of an ending interpreter is ended by
// unwinding its stack, which C++ does not survive. Daemon threads of a server are often inside the
// pool at that moment, so they are stopped here for good instead, before they ask.

#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstddef>
#include <thread>

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

/// Gives it up for a moment after every so many objects made, so that a long list of them stops no
/// other thread for long.
class GilTurns {
 public:
  void made(size_t num_objects) {
    if ((num_made_ += num_objects) < kObjects) return;
    num_made_ = 0;
    GilRelease release;
    // Whoever takes it again at once is faster than a thread that has to wake up first.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

 private:
  static constexpr size_t kObjects = 16'384;

  size_t num_made_ = 0;
};

/// To be called once, when the module is loaded.
void stop_threads_at_exit();

}  // namespace pagedkv::bindings
