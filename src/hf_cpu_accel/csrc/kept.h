// What Python keeps from one call to the next, by numbers: ops take and give nothing else but tensors and numbers.
#pragma once
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace hfca {

template <class T>
class Kept {
 public:
  // The number under which it is found until it is dropped; never one that was given before.
  int64_t keep(std::shared_ptr<T> value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.emplace(++last_, std::move(value));
    return last_;
  }

  std::shared_ptr<T> get(int64_t number, const char* op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(number);
    STD_TORCH_CHECK(found != values_.end(), "hf_cpu_accel::", op, ": nothing is kept under the number ", number);
    return found->second;
  }

  // Whether there was one. Who is at it may finish.
  bool drop(int64_t number) {
    std::shared_ptr<T> value;  // before the lock, so that it is destroyed after it: tensors wait for Python's
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(number);
    if (found == values_.end()) return false;
    value = std::move(found->second);
    values_.erase(found);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<T>> values_;
  int64_t last_ = 0;
};

}  // namespace hfca
