// One function for each policy; each in its own file.

#pragma once

#include <memory>

#include "pagedkv/eviction.h"

namespace pagedkv {

std::unique_ptr<EvictionPolicy> make_hazard_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_lfu_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_slru_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_s3fifo_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_sieve_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_tlru_policy(const PolicyConfig& config);
std::unique_ptr<EvictionPolicy> make_gdsf_policy(const PolicyConfig& config);

}  // namespace pagedkv
