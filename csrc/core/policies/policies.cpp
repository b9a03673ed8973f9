// The names of the policies.

#include <array>

#include "make.h"

namespace pagedkv {

std::span<const NamedPolicy> policies() {
  static constexpr std::array kPolicies = {
      NamedPolicy{"lru", &make_lru_policy},
      NamedPolicy{"priority", &make_lru_policy},  // which all of them honour
      NamedPolicy{"hazard", &make_hazard_policy},
      NamedPolicy{"lfu", &make_lfu_policy},
      NamedPolicy{"slru", &make_slru_policy},
      NamedPolicy{"s3fifo", &make_s3fifo_policy},
      NamedPolicy{"sieve", &make_sieve_policy},
      NamedPolicy{"tlru", &make_tlru_policy},
      NamedPolicy{"gdsf", &make_gdsf_policy},
  };
  return kPolicies;
}

}  // namespace pagedkv
