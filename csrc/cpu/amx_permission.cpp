#include "amx_permission.h"

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pagedkv::cpu {
namespace {

constexpr unsigned kOsXsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
constexpr unsigned kTileConfigState = 1u << 17, kTileDataState = 1u << 18;
constexpr int kRequestPermission = 0x1023, kTileDataFeature = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA

bool processor_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmxBf16) && (d & kAmxTile);
}

bool system_keeps_tiles() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileConfigState) && (low & kTileDataState);
}

}  // namespace

const char* amx_unavailable() {
  if (!processor_has_amx()) return "this processor has no AMX with bfloat16";
  if (!system_keeps_tiles()) return "the operating system does not keep AMX's registers";
  return "";
}

bool request_amx() { return syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) == 0; }

}  // namespace pagedkv::cpu
#else
namespace pagedkv::cpu {
const char* amx_unavailable() { return "AMX is used on x86-64 under Linux only"; }
bool request_amx() { return false; }
}  // namespace pagedkv::cpu
#endif
