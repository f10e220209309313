#include "buffers.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hfca {
namespace {

constexpr size_t smallest = 1024, huge_page = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
// Blocks of exactly what was asked for, and none kept: AddressSanitizer sees what is read beyond them, or after they were given back.
constexpr bool exact = true;
constexpr size_t idle_limit = 0;
#else
constexpr bool exact = false;
constexpr size_t idle_limit = size_t{512} << 20;  // bytes kept for reuse
#endif
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

struct Pool {
  std::mutex mutex;
  std::unordered_map<void*, int> class_of_block;  // beside the blocks: a header in front would cost large ones another page
  std::vector<void*> idle[classes + 1];
  size_t idle_bytes = 0;
  int64_t allocations = 0;
};

// Never destroyed: tensors may outlive the statics of this library.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

void* allocate(size_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, bytes >= huge_page ? huge_page : 64, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes >= huge_page) madvise(block, bytes, MADV_HUGEPAGE);
#endif
  return block;
}

}  // namespace

void* take_buffer(size_t bytes) {
  const int index = class_of(bytes);
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  auto& idle = p.idle[index];
  if (!idle.empty()) {
    void* block = idle.back();
    idle.pop_back();
    p.idle_bytes -= class_bytes(index);
    return block;
  }
  void* block = allocate(exact ? std::max<size_t>(bytes, 1) : class_bytes(index));
  ++p.allocations;
  p.class_of_block[block] = index;
  return block;
}

void return_buffer(void* block) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  const auto entry = p.class_of_block.find(block);
  const int index = entry->second;
  if (p.idle_bytes + class_bytes(index) <= idle_limit) {
    p.idle[index].push_back(block);
    p.idle_bytes += class_bytes(index);
  } else {
    p.class_of_block.erase(entry);
    std::free(block);
  }
}

int64_t buffer_allocations() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  return p.allocations;
}

size_t trim_buffers() {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.mutex);
  const size_t freed = p.idle_bytes;
  for (auto& blocks : p.idle) {
    for (void* block : blocks) {
      p.class_of_block.erase(block);
      std::free(block);
    }
    blocks.clear();
  }
  p.idle_bytes = 0;
  return freed;
}

}  // namespace hfca
