// Scratch memory of one op call, carved up front to back. The block comes from the pool of buffers.h and goes back there.
#pragma once
#include <cstddef>
#include <cstdint>

#include "buffers.h"

namespace hfca {

class Workspace {
 public:
  explicit Workspace(size_t bytes) : data_(take_buffer(bytes)) {}
  ~Workspace() { return_buffer(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(static_cast<char*>(data_) + used_);
    used_ += size_of<T>(count);
    return p;
  }

  // All of it may be taken again.
  void rewind() { used_ = 0; }

  // What take(count) needs: whole cache lines.
  template <class T>
  static size_t size_of(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64 + 64;
  }

 private:
  void* data_;
  size_t used_ = 0;
};

}  // namespace hfca
