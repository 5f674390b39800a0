// Our own decode and verify kernels as the host sees them; how they work is told in stream.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/fa2/tile.h"
#include "fiw/types.h"

namespace fiw::cuda {

/// Lets the blocks of a split call merge their own partial results: of a request and KV head, the last one to end does.
struct StreamMerge {
  /// [batch, KV heads]: how many blocks of each have ended. Zeros before a call and after it, so that no two calls at a
  /// time may share them. Null: the partial results stay.
  std::uint32_t* arrivals = nullptr;
  void* out = nullptr;  ///< [rows, heads, dim]; address and strides are multiples of 16 bytes
  std::int64_t out_row = 0, out_head = 0;
  float* lse = nullptr;  ///< natural logarithm; may be null
};

/// One row count of one instantiation: serves requests of up to that many packed (token, head-in-group) rows.
struct StreamKernel {
  std::int32_t rows = 0;
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  std::int32_t threads = 0;
  /// `ahead`: see launch.cuh.
  cudaError_t (*launch)(const AttentionArgs& args, const StreamMerge& merge, bool ahead, cudaStream_t stream) = nullptr;
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
