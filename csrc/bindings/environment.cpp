// The environment, in a fraction of the time that os.environ takes to decode a value.

#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

// Python writes every change of os.environ through to here, under the lock that is held.
nb::object environment(const char* name) {
  const char* value = std::getenv(name);
  return nb::steal(PyUnicode_DecodeFSDefault(value == nullptr ? "" : value));
}

}  // namespace

void bind_environment(nb::module_& m) {
  m.def("environment", &environment, "name"_a, nb::sig("def environment(name: str) -> str"),
        "The value of an environment variable now, \"\" when it is unset.");
}

}  // namespace pagedkv::bindings
