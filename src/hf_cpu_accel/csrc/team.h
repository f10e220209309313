// One fork for a whole chain of steps.
//
// A fork of torch's threads costs 2 to 5 us; a layer of a small encoder computes for 100 us in ten steps. So the threads are forked
// once and meet at a barrier between steps, which costs a few hundred nanoseconds.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>

#if defined(__linux__) || defined(__APPLE__)
#include <sched.h>
#endif
#if defined(HFCA_X86)
#include <immintrin.h>
#endif

namespace hfca {

inline void relax(int spins) {
#if defined(HFCA_X86)
  if (spins < 2000) return _mm_pause();
#elif defined(__aarch64__)
  if (spins < 2000) {
    asm volatile("yield");
    return;
  }
#endif
#if defined(__linux__) || defined(__APPLE__)
  if (spins >= 2000) sched_yield();  // more threads than cores: let the one that we wait for run
#endif
}

// The threads that work on one op call. Steps must not throw: the others would wait for ever.
class Team {
 public:
  // Step whose `count` pieces are dealt out in contiguous, equal runs: f(begin, end).
  template <class F>
  void each(int64_t count, const F& f) const {
    share(count, f);
    wait();
  }

  // The same; before they meet, each thread does leave().
  template <class F, class Leave>
  void each(int64_t count, const F& f, const Leave& leave) const {
    share(count, f);
    leave();
    wait();
  }

  // The same without a meeting: for what nobody reads before the next step.
  template <class F>
  void share(int64_t count, const F& f) const {
    const int64_t begin = index_ * count / size_, end = (index_ + 1) * count / size_;
    if (begin < end) f(begin, end);
  }

  // Step whose pieces differ in cost: each thread takes the next one when it is done with the last. f(piece).
  template <class F>
  void claim(int64_t count, const F& f) {
    if (!shared_) {
      for (int64_t i = 0; i < count; ++i) f(i);
      return;
    }
    std::atomic<int64_t>& next = shared_->next[claimed_].value;
    claimed_ = (claimed_ + 1) % counters;
    // The counter of the next such step was last used two of them ago, and no thread is left there.
    if (index_ == 0) shared_->next[claimed_].value.store(0, std::memory_order_relaxed);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    wait();
  }

  // Number of this thread among those that were forked, for memory of its own.
  int slot() const { return slot_; }

  // This thread on its own, for the steps of a piece of work that it does from end to end.
  Team alone() const { return Team(nullptr, slot_, 0, 1); }

 private:
  static constexpr int counters = 3;

  template <class T>
  struct alignas(64) Line {  // a cache line of its own
    std::atomic<T> value{0};
  };

  struct Shared {
    Line<int64_t> chunk;  // what each thread was given of [0, threads): tells how many there are
    Line<int> arrived;
    Line<unsigned> round;
    Line<int64_t> next[counters];
  };

  Team(Shared* shared, int slot, int index, int size) : shared_(shared), slot_(slot), index_(index), size_(size) {}

  void wait() const {
    if (!shared_) return;
    const unsigned round = shared_->round.value.load(std::memory_order_relaxed);
    if (shared_->arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      shared_->arrived.value.store(0, std::memory_order_relaxed);
      shared_->round.value.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; shared_->round.value.load(std::memory_order_acquire) == round; ++spins) relax(spins);
  }

  Shared* shared_;
  int slot_, index_, size_;
  int claimed_ = 0;

  template <class F>
  friend void run_team(int64_t threads, const F& body);
};

// Whether torch runs all parts of a parallel loop at the same time. OpenMP, with which torch's own packages are built, does; a pool of
// threads with a queue does not, and threads that wait for one in the queue would wait for ever. Set once, when the library is loaded.
inline bool& threads_run_together() {
  static bool together = false;
  return together;
}

// Threads that an op with so many multiply-adds is worth.
inline int64_t team_size(double multiply_adds) {
  constexpr double least = 30e3;  // below this a fork costs more than it saves
  return multiply_adds < least || !threads_run_together() ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
}

// body(Team&) on up to `threads` threads at once.
//
// torch may give fewer threads than asked for (inside another parallel region: one). They then get several indices each, from which
// the first one, which always exists, knows the number of them; the others wait for its word.
template <class F>
void run_team(int64_t threads, const F& body) {
  if (threads <= 1) {
    Team team(nullptr, 0, 0, 1);
    body(team);
    return;
  }
  Team::Shared shared;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    if (begin == 0) shared.chunk.value.store(end, std::memory_order_release);
    int64_t chunk;
    for (int spins = 0; (chunk = shared.chunk.value.load(std::memory_order_acquire)) == 0; ++spins) relax(spins);
    const int size = static_cast<int>((threads + chunk - 1) / chunk), index = static_cast<int>(begin / chunk);
    Team team(size > 1 ? &shared : nullptr, index, index, size);
    body(team);
  });
}

}  // namespace hfca
