// libFuzzer's target over the verbs.

#include <cstddef>
#include <cstdint>

#include "verbs.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::testing::play({data, size});
  return 0;
}
