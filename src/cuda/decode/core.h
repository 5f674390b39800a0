// The CUDA-core decode kernels as the host sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/fa2/tile.h"
#include "fiw/types.h"

namespace fiw::cuda {

/// One group size of one instantiation. K and V must have equal strides.
struct CoreKernel {
  std::int32_t group_size = 0;
  bool options = false;  ///< soft cap, ALiBi, sinks, window, per-head scales
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  std::int32_t threads = 0;
  cudaError_t (*launch)(const AttentionArgs& args, cudaStream_t stream) = nullptr;
};

struct CoreEntry {
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  std::int32_t head_dim = 0;
  std::span<const CoreKernel> (*kernels)() = nullptr;
};

/// Everything that this build holds, generated from kernels.json.
std::span<const CoreEntry> core_entries() noexcept;

}  // namespace fiw::cuda
