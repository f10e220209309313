// The packed tables of relative positions of a layer that is kept, from one call to the next: they seldom change, and to pack them takes
// 3 to 4 % of a layer of one short sequence.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../attention/attention.h"
#include "../tensors.h"
#include "../workspace.h"

namespace hfca {

class KeptPositions {
 public:
  // For the tables of `given`, which are contiguous. by_rows: of sequences whose tokens lie anywhere, which other kernels may compute.
  KeptPositions(const RelativePositions& p, std::vector<Tensor> given, bool by_rows, int64_t heads)
      : positions_(p),
        given_(std::move(given)),
        index_(p.index, p.index + p.count()),
        by_rows_(by_rows),
        memory_(bytes(p, heads)),
        data_(memory_.take<float>(heads * p.packed_floats)) {}

  static size_t bytes(const RelativePositions& p, int64_t heads) { return Workspace::size_of<float>(heads * p.packed_floats); }

  // Whether these are the same tables. Theirs are held here, so no others lie at the same addresses.
  bool are(const RelativePositions& p, bool by_rows) const {
    const auto same = [](const Heads& a, const Heads& b) { return a.data == b.data && a.type == b.type; };
    return same(positions_.key, p.key) && same(positions_.query, p.query) && positions_.length == p.length &&
           positions_.packed_floats == p.packed_floats && by_rows_ == by_rows && std::equal(index_.begin(), index_.end(), p.index);
  }

  float* data() const { return data_; }

 private:
  RelativePositions positions_;
  std::vector<Tensor> given_;
  std::vector<int32_t> index_;
  bool by_rows_;
  Workspace memory_;
  float* data_;
};

// Those of the last call; several threads may call at once.
class LastPositions {
 public:
  std::shared_ptr<const KeptPositions> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }
  void set(std::shared_ptr<const KeptPositions> positions) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_.swap(positions);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const KeptPositions> last_;
};

}  // namespace hfca
