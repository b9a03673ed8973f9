// The kernels for any processor that has registers of four numbers, or none.

#define PAGEDKV_ISA portable
#include "kernel_table.h"
#include "rows.h"

namespace pagedkv::cpu::portable {
const Kernels* const kernels = &kTable;
}
