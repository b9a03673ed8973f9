#include "bindings.h"
#include "gil.h"

NB_MODULE(_core, m) {
  m.doc() = "The native core of pagedkv. Private: import pagedkv instead.";
  pagedkv::bindings::bind_block_hash(m);
  pagedkv::bindings::bind_block_kernels(m);
  pagedkv::bindings::bind_dense(m);
  pagedkv::bindings::bind_environment(m);
  pagedkv::bindings::bind_errors();
  pagedkv::bindings::stop_threads_at_exit();
  pagedkv::bindings::bind_extras(m);
  pagedkv::bindings::bind_hashing(m);
  pagedkv::bindings::bind_kernel_checks(m);
  pagedkv::bindings::bind_kernels(m);
  pagedkv::bindings::bind_sequences(m);
  pagedkv::bindings::bind_pool(m);
}
