// The bare steps that no pool can avoid, with nothing around them.
#include <cstdint>
#include <cstring>

extern "C" {

// Follows a ring of offsets through memory; each load waits for the one before it.
uint64_t chase(const char* memory, uint64_t start, uint64_t num_nodes) {
  uint64_t offset = start;
  for (uint64_t i = 0; i < num_nodes; ++i) memcpy(&offset, memory + offset, sizeof offset);
  return offset;
}

// Copies a piece several times, so that a call from Python weighs nothing.
void copy(char* to, const char* from, uint64_t num_bytes, uint64_t num_copies) {
  for (uint64_t i = 0; i < num_copies; ++i) {
    memcpy(to, from, num_bytes);
    // The compiler must not drop a copy that the next one overwrites.
    asm volatile("" : : "r"(to) : "memory");
  }
}
}
