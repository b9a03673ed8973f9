// libFuzzer's target over the verbs.

#include <cstddef>
#include <cstdint>

#include "play.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::testing::Play({data, size}).run();
  return 0;
}
