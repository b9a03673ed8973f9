// Digests as they are printed.

#pragma once

#include <span>
#include <string>

namespace pagedkv::testing {

inline std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace pagedkv::testing
