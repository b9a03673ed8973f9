#include <nanobind/nanobind.h>

#include "bindings.h"
#include "pagedkv/error.h"

namespace nb = nanobind;

namespace pagedkv::bindings {
namespace {

void raise(const char* type, nb::object args) {
  nb::object cls = nb::module_::import_("pagedkv.errors").attr(type);
  PyErr_SetObject(cls.ptr(), args.ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const OutOfBlocksError& e) {
    raise("OutOfBlocksError", nb::make_tuple(e.what(), e.needed, e.free, e.evictable));
  } catch (const UsageError& e) {
    raise("UsageError", nb::make_tuple(e.what()));
  } catch (const StateError& e) {
    raise("StateError", nb::make_tuple(e.what()));
  } catch (const IntegrityError& e) {
    raise("IntegrityError", nb::make_tuple(e.what()));
  }
}

}  // namespace

void bind_errors() { nb::register_exception_translator(translate); }

}  // namespace pagedkv::bindings
