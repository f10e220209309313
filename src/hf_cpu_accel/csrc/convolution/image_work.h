// A step of a chain (chain.h) that is no product of matrices.
#pragma once
#include "../team.h"
#include "../workspace.h"
#include "images.h"
#include "patches.h"

namespace hfca {

class ImageWork {
 public:
  ImageWork() = default;
  virtual ~ImageWork() = default;
  ImageWork(const ImageWork&) = delete;
  ImageWork& operator=(const ImageWork&) = delete;

  // What it needs while it runs.
  virtual size_t bytes(int64_t) const { return 0; }  // of so many threads
  virtual void take(Workspace&, int64_t) {}
  virtual void run(const Team& team) const = 0;
};

// What it works on. patches: of `source`, with their zeros. other: another image that it reads, or null. range: as Gemm::range, may be null.
struct WorkImages {
  const Images &source, &output;
  const Images* other;
  const Patches& patches;
  float* range;
};

}  // namespace hfca
