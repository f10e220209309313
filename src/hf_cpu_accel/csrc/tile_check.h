// The products of a tier of tiles against those of the tier below.
#pragma once
#include "kernels.h"

namespace hfca {

// Whether both give the same, bit for bit, for a small product of each kind of weight. Takes some microseconds.
bool tiles_agree(const Kernels& tiles, const Kernels& below);

}  // namespace hfca
