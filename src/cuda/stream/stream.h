// Our own decode and verify kernels as the host sees them; how they work is told in stream.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/fa2/tile.h"
#include "fiw/types.h"

namespace fiw::cuda {

/// One row count of one instantiation: serves requests of up to that many packed (token, head-in-group) rows.
struct StreamKernel {
  std::int32_t rows = 0;
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  std::int32_t threads = 0;
  /// `ahead`: see launch.cuh.
  cudaError_t (*launch)(const AttentionArgs& args, bool ahead, cudaStream_t stream) = nullptr;
};

struct StreamEntry {
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  std::int32_t head_dim = 0;
  std::span<const StreamKernel> (*kernels)() = nullptr;  ///< by rising `rows`
};

/// Everything that this build holds, generated from kernels.json.
std::span<const StreamEntry> stream_entries() noexcept;

}  // namespace fiw::cuda
