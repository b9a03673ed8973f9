// What is thought of a block before anything is seen: that it belongs to somebody who chats.

#pragma once

#include "reuse_model.h"

namespace pagedkv {

/// The probability that a block of a class comes back in each bucket of ages, given that it did not
/// before.
ReuseModel::Hazards prior_hazards(ReuseModel::Class of);

}  // namespace pagedkv
