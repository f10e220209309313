// What csrc/team.h needs of torch, on std::thread, which ThreadSanitizer understands: libgomp's barriers it takes for races.
//
// As torch does, a loop is cut into contiguous runs of equal size, one for each thread, the first of which the caller does itself; and
// there may be fewer threads than were asked for.
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

// Of the calling thread: how many threads a loop gets, however many it could use.
inline int64_t& threads_given() {
  thread_local int64_t given = 4;
  return given;
}

inline uint32_t get_num_threads() { return 4; }

template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  const int64_t count = std::max<int64_t>(1, std::min(threads_given(), (end - begin + grain - 1) / grain));
  const int64_t size = (end - begin + count - 1) / count;
  std::vector<std::thread> others;
  for (int64_t first = begin + size; first < end; first += size)
    others.emplace_back([&f, first, size, end] { f(first, std::min(first + size, end)); });
  f(begin, std::min(begin + size, end));
  for (std::thread& other : others) other.join();
}

}  // namespace torch::stable
