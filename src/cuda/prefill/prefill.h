// Our own prefill kernels as the host sees them; how they work is told in prefill.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/fa3/hopper.h"
#include "fiw/types.h"

namespace fiw::cuda {

enum class PrefillVariant : std::uint8_t { kPlain, kSoftCap };

/// One kernel for every mask that limits the keys of a row to a range.
struct PrefillKernel {
  std::int32_t rows = 0;  ///< packed (token, head-in-group) rows of a tile
  bool soft_cap = false;
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  /// Encodes the tensor maps on the host, then enqueues.
  cudaError_t (*launch)(const HopperArgs& args, cudaStream_t stream) = nullptr;
};

struct PrefillEntry {
  DType q = DType::kBFloat16;  ///< of K and V too
  std::int32_t head_dim = 0;
  std::span<const PrefillKernel> (*kernels)() = nullptr;
};

/// Everything that this build holds, generated from kernels.json; empty without sm_90a.
std::span<const PrefillEntry> prefill_entries() noexcept;

}  // namespace fiw::cuda
