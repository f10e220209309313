// Whether this process may use AMX tiles.
#pragma once

namespace hfca {

// Null if it may, else why not, in words. The kernel is asked once: it saves eight kilobytes more for each thread from then on.
const char* no_tiles_because();

}  // namespace hfca
