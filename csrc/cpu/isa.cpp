// Which instruction sets this build has and this processor can run.

#include <algorithm>
#include <array>
#include <string>

#include "amx_permission.h"
#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"

namespace pagedkv::cpu {
namespace {

const char* const kNotBuilt = "this build has no such kernels";

#if defined(__x86_64__)
const char* avx2_unavailable() {
  __builtin_cpu_init();
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  return runs ? "" : "this processor has no AVX2 with FMA and F16C";
}
const char* avx512_unavailable() {
  __builtin_cpu_init();
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return runs ? "" : "this processor has no AVX-512 (F, BW, VL, DQ)";
}
const char* avx512_bf16_unavailable() {
  const char* const reason = avx512_unavailable();
  if (*reason != '\0') return reason;
  return __builtin_cpu_supports("avx512bf16") ? "" : "this processor has no AVX-512 BF16";
}
const char* amx_with_avx512_unavailable() {
  const char* const reason = avx512_unavailable();
  return *reason != '\0' ? reason : amx_unavailable();
}
#else
const char* avx2_unavailable() { return kNotBuilt; }
const char* avx512_unavailable() { return kNotBuilt; }
const char* avx512_bf16_unavailable() { return kNotBuilt; }
const char* amx_with_avx512_unavailable() { return kNotBuilt; }
#endif

Isa described(const char* name, const Kernels* kernels, const char* unavailable) {
  return {name, kernels, kernels == nullptr ? kNotBuilt : unavailable};
}

}  // namespace

std::span<const Isa> isas() {
  static const std::array<Isa, 6> all = {
      described("amx", amx::kernels, amx_with_avx512_unavailable()),
      described("avx512_bf16", avx512_bf16::kernels, avx512_bf16_unavailable()),
      described("avx512", avx512::kernels, avx512_unavailable()),
      described("avx2", avx2::kernels, avx2_unavailable()),
      described("neon", neon::kernels, ""),
      described("portable", portable::kernels, ""),
  };
  return all;
}

const Isa& find_isa(std::string_view name, std::string_view what) {
  std::string runnable;
  for (const Isa& isa : isas()) {
    if (*isa.unavailable != '\0') continue;
    const bool is_wanted = name.empty() || name == isa.name;
    // Only now, since the permission costs every thread memory.
    if (is_wanted && (isa.kernels != amx::kernels || request_amx())) return isa;
    runnable += (runnable.empty() ? "" : ", ") + std::string(isa.name);
  }
  throw UsageError(std::string(what) + ": expected one of what this machine runs, " + runnable +
                   ", got '" + std::string(name) + "'");
}

}  // namespace pagedkv::cpu
