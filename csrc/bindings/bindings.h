// The files in this folder are the only ones that know nanobind.

#pragma once

#include <nanobind/nanobind.h>

namespace pagedkv::bindings {

void bind_block_hash(nanobind::module_& m);
void bind_block_kernels(nanobind::module_& m);
void bind_dense(nanobind::module_& m);
void bind_environment(nanobind::module_& m);
void bind_errors();
void bind_extras(nanobind::module_& m);
void bind_hashing(nanobind::module_& m);
void bind_kernel_checks(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_sequences(nanobind::module_& m);

}  // namespace pagedkv::bindings
