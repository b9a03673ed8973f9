// Whether this process may use the tile registers.

#pragma once

namespace pagedkv::cpu {

/// Why AMX with bfloat16 can't be used here; "" when it can, should Linux permit it.
const char* amx_unavailable();

/// Asks Linux for the permission, which holds for the whole process and makes what a thread is
/// saved to 8 KiB larger. False when it is refused.
bool request_amx();

}  // namespace pagedkv::cpu
