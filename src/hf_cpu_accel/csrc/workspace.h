// Scratch memory of the calling thread: grows, is kept between calls, aligned to cache lines. One call holds one Workspace at a time
// and carves it up itself.
#pragma once
#include <cstddef>
#include <cstdint>

#include "buffers.h"

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

  ~Workspace() {
    if (data_) return_buffer(data_);
  }

 private:
  void reserve(size_t bytes) {
    if (bytes <= capacity_) return;
    if (data_) return_buffer(data_);
    data_ = nullptr, capacity_ = 0;
    data_ = take_buffer(bytes + bytes / 4);
    capacity_ = bytes + bytes / 4;
  }

  void* data_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace hfca
