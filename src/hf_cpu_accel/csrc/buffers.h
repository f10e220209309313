// Memory of output tensors, kept and reused.
//
// Why not torch's allocator: it takes each output from glibc with posix_memalign. Large ones are mapped and unmapped each time, at one
// page fault per 4 KiB; and once glibc has raised its mapping threshold, its memalign (before 2.38) cannot reuse a block it got back
// when a fragment of the last request lies beside it, so that a loop of equal allocations grows the heap without end (seen here: 157 MB
// per 100 calls, and each call 2 to 10 times slower for the faults).
#pragma once
#include <cstddef>
#include <cstdint>

namespace hfca {

// At least `bytes` bytes, aligned to 64; large blocks are on huge pages where the system allows. Throws std::bad_alloc.
void* take_buffer(size_t bytes);

// Takes a block of take_buffer back.
void return_buffer(void* block);

// How many blocks the system was asked for since the library was loaded: in a steady state the number stands still.
int64_t buffer_allocations();

// Frees the idle blocks; the bytes that were idle.
size_t trim_buffers();

}  // namespace hfca
