// The host's stand-in for what device.cuh wraps.
#pragma once

#include "threads.h"

namespace emulated {

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t,
           const Args&... args) {
  return run_grid({grid.x, grid.y, grid.z}, static_cast<unsigned>(threads), shared_bytes,
                  [&] { kernel(args...); });
}

}  // namespace emulated
