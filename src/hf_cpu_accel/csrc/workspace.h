// Scratch memory of the calling thread: grows, is kept between calls, aligned to cache lines. Keeping it avoids page faults, which
// cost more than the arithmetic on freshly mapped memory. One call holds one Workspace at a time and carves it up itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace hfca {

class Workspace {
 public:
  // Bytes for this call; the contents of earlier calls are lost.
  static Workspace& of_thread(size_t bytes) {
    thread_local Workspace workspace;
    workspace.reserve(bytes);
    workspace.used_ = 0;
    return workspace;
  }

  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(static_cast<char*>(data_) + used_);
    used_ += size_of<T>(count);
    return p;
  }

  template <class T>
  static size_t size_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64 + 64;
  }

  ~Workspace() { std::free(data_); }

 private:
  void reserve(size_t bytes) {
    if (bytes <= capacity_) return;
    std::free(data_);
    capacity_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(4096, capacity_);
    if (!data_) {
      capacity_ = 0;
      throw std::bad_alloc();
    }
  }

  void* data_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace hfca
