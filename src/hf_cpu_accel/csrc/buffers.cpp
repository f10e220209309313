#include "buffers.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hfca {
namespace {

constexpr size_t header_bytes = 64, smallest = 1024, huge_page = size_t{2} << 20;
constexpr size_t idle_limit = size_t{512} << 20;  // bytes kept for reuse
constexpr int classes = 4 * 40;

// Four size classes per power of two: at most a quarter of a block is unused.
int class_of(size_t bytes) {
  int index = 0;
  for (size_t power = smallest; index < classes - 4; power *= 2, index += 4)
    if (bytes <= 2 * power) {
      for (int quarter = 0; quarter < 4; ++quarter)
        if (bytes <= power + power / 4 * static_cast<size_t>(quarter)) return index + quarter;
      return index + 4;
    }
  throw std::bad_alloc();
}

size_t class_bytes(int index) {
  const size_t power = smallest << (index / 4);
  return power + power / 4 * static_cast<size_t>(index % 4);
}

struct Header {
  int index;
};

struct Pool {
  std::mutex mutex;
  std::vector<void*> idle[classes + 1];
  size_t idle_bytes = 0;
};

// Never destroyed: tensors may outlive the statics of this library.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

void* allocate(int index) {
  size_t bytes = class_bytes(index) + header_bytes;
  const size_t alignment = bytes >= huge_page ? huge_page : 64;
  bytes = (bytes + alignment - 1) / alignment * alignment;
  void* block = std::aligned_alloc(alignment, bytes);
  if (!block) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (alignment == huge_page) madvise(block, bytes, MADV_HUGEPAGE);
#endif
  static_cast<Header*>(block)->index = index;
  return static_cast<char*>(block) + header_bytes;
}

void* block_of(void* data) { return static_cast<char*>(data) - header_bytes; }

}  // namespace

void* take_buffer(size_t bytes) {
  const int index = class_of(bytes);
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    if (!p.idle[index].empty()) {
      void* data = p.idle[index].back();
      p.idle[index].pop_back();
      p.idle_bytes -= class_bytes(index);
      return data;
    }
  }
  return allocate(index);
}

void return_buffer(void* data) {
  const int index = static_cast<Header*>(block_of(data))->index;
  Pool& p = pool();
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    if (p.idle_bytes + class_bytes(index) <= idle_limit) {
      p.idle[index].push_back(data);
      p.idle_bytes += class_bytes(index);
      return;
    }
  }
  std::free(block_of(data));
}

size_t trim_buffers() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  const size_t freed = p.idle_bytes;
  for (auto& blocks : p.idle) {
    for (void* data : blocks) std::free(block_of(data));
    blocks.clear();
  }
  p.idle_bytes = 0;
  return freed;
}

}  // namespace hfca
