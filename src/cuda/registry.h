// The kernels of this build, and the combinations that the full kernel set would add.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/decode/core.h"
#include "cuda/fa2/tile.h"
#include "cuda/fa3/hopper.h"
#include "cuda/prefill/prefill.h"
#include "cuda/stream/stream.h"

namespace fiw::cuda {

struct Combination {
  DType q;
  DType kv;
  std::int32_t head_dim_qk;
  std::int32_t head_dim_vo;

  friend bool operator==(const Combination&, const Combination&) = default;
};

/// What -DFIW_CUDA_KERNELS=full builds.
std::span<const Combination> full_combinations() noexcept;

}  // namespace fiw::cuda
