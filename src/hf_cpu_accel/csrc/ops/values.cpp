// have_values: whether tensors still hold what they held when they were handed in.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../kept.h"
#include "../op.h"
#include "../team.h"
#include "../tensors.h"

namespace hfca {
namespace {

// Tensors, which others may write to, and the values of all of them, one tensor after another.
class KeptValues {
 public:
  KeptValues(const std::vector<Tensor>& tensors, const Tensor& values) : tensors_(tensors), values_(values) {}

  bool are_held() const {
    std::vector<Tensor> copies;  // of tensors that are not contiguous: compared in their place
    std::vector<Piece> pieces;
    pieces.reserve(tensors_.size());
    const auto element_bytes = static_cast<int64_t>(values_.element_size());
    const int64_t bytes = values_.numel() * element_bytes;
    int64_t end = 0;
    for (const Tensor& tensor : tensors_) {
      if (!tensor.is_cpu() || tensor.scalar_type() != values_.scalar_type()) return false;
      const bool dense = tensor.is_contiguous();
      if (!dense) copies.push_back(torch::stable::contiguous(tensor));
      const int64_t begin = end;
      end += tensor.numel() * element_bytes;
      if (end > bytes) return false;
      if (end > begin) pieces.push_back({static_cast<const char*>((dense ? tensor : copies.back()).const_data_ptr()), begin, end});
    }
    return end == bytes && are_alike(pieces, bytes);
  }

 private:
  // What the bytes [begin, end) of the values are compared with.
  struct Piece {
    const char* data;
    int64_t begin, end;
  };

  bool are_alike(const std::vector<Piece>& pieces, int64_t bytes) const {
    const auto* const before = static_cast<const char*>(values_.const_data_ptr());
    std::atomic<bool> alike{true};
    run_team(team_size(static_cast<double>(bytes) / 8), [&](const Team& team) {
      team.share(bytes, [&](int64_t first, int64_t last) {
        for (const Piece& piece : pieces) {
          const int64_t from = std::max(piece.begin, first), to = std::min(piece.end, last);
          if (from < to && std::memcmp(piece.data + (from - piece.begin), before + from, static_cast<size_t>(to - from)) != 0)
            alike.store(false, std::memory_order_relaxed);
        }
      });
    });
    return alike.load(std::memory_order_relaxed);
  }

  std::vector<Tensor> tensors_;
  Tensor values_;
};

// Never destroyed: Python drops what it keeps when statics of this library may be gone.
Kept<KeptValues>& kept() {
  static Kept<KeptValues>& instance = *new Kept<KeptValues>;
  return instance;
}

int64_t keep_values(const std::vector<Tensor>& tensors, const Tensor& values) {
  STD_TORCH_CHECK(values.is_cpu() && values.is_contiguous(), "hf_cpu_accel::keep_values: values must be contiguous and on the CPU");
  return kept().keep(std::make_shared<KeptValues>(tensors, values));
}

bool have_values(int64_t number) { return kept().get(number, "have_values")->are_held(); }

bool drop_values(int64_t number) { return kept().drop(number); }

}  // namespace
}  // namespace hfca

HFCA_OP_WITHOUT_TENSORS(keep_values, "(Tensor[] tensors, Tensor values) -> int")
HFCA_OP_WITHOUT_TENSORS(have_values, "(int number) -> bool")
HFCA_OP_WITHOUT_TENSORS(drop_values, "(int number) -> bool")
