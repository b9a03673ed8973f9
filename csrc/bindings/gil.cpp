#include "gil.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

std::atomic<bool> is_ending = false;    // set by the interpreter's exit, once
std::atomic<int> num_asking = 0;        // threads on their way back to Python
std::thread::id thread_that_ends = {};  // written before is_ending

/// Runs at the interpreter's exit, while other threads still may take its lock.
void stop_other_threads() {
  // What daemon threads hold is never given back, and no leak.
  if (nb::cast<int>(nb::module_::import_("threading").attr("active_count")()) > 1)
    nb::set_leak_warnings(false);
  thread_that_ends = std::this_thread::get_id();
  is_ending = true;
  // Those that have asked already get the lock once more; what they do next ends like any thread's.
  PyThreadState* state = PyEval_SaveThread();
  for (int i = 0; i < 1000 && num_asking > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  PyEval_RestoreThread(state);
}

}  // namespace

GilRelease::~GilRelease() {
  ++num_asking;
  if (is_ending && std::this_thread::get_id() != thread_that_ends) {
    --num_asking;
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyEval_RestoreThread(state_);
  --num_asking;
}

void stop_threads_at_exit() {
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&stop_other_threads));
}

}  // namespace pagedkv::bindings
