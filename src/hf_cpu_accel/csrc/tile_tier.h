// What a tier of AMX tiles puts in place of the kernels of the tier below it.
#pragma once
#include "kernels.h"

namespace hfca {

#if defined(HFCA_X86)
void use_tiles_amx(Kernels& kernels);
void use_tiles_amx_emulated(Kernels& kernels);
#endif

}  // namespace hfca
