// What a tier of AMX tiles puts in place of the kernels of the tier below it. Null in a build without that tier, see kernels.h.
#pragma once
#include "kernels.h"

namespace hfca {

#if defined(HFCA_X86)
[[gnu::weak]] void use_tiles_amx(Kernels& kernels);
[[gnu::weak]] void use_tiles_amx_emulated(Kernels& kernels);
#endif

}  // namespace hfca
