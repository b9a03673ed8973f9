#pragma once

#include "handles.h"

namespace pagedkv::bindings {

void bind_pool_admin(nanobind::class_<PoolHandle>& pool);

}  // namespace pagedkv::bindings
