// Combining attention over disjoint sets of keys: the partial results of a split schedule, and a caller's states.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "fiw/types.h"

namespace fiw::cuda {

/// One state to combine; `lse` is the natural logarithm.
struct MergePart {
  const void* out = nullptr;
  const float* lse = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

/// States that travel as a kernel argument; more go through device memory.
inline constexpr int kInlineParts = 32;

/// Partial results of a schedule: contiguous, base-2 logarithms.
struct PartialRows {
  const void* out = nullptr;                   ///< [partial rows, heads, dim]; may be the output itself
  const float* lse = nullptr;                  ///< [partial rows, heads]
  const std::int32_t* merge_indptr = nullptr;  ///< [rows + 1]; null: one partial a row
  const float* sinks = nullptr;                ///< [heads], may be null
  float v_scale = 1;                           ///< multiplies the results
  const float* v_head_scale = nullptr;         ///< [heads / group], likewise; may be null
  std::int32_t group = 1;
};

/// Loads the kernels that finish split calls on the current device, so that none of these loads at its first launch,
/// when it would wait for whatever the device is doing. `ahead`: whether this build's kernels can be launched ahead
/// there.
cudaError_t load_merge_kernels(bool& ahead);
/// Enqueues; `lse` may be null. `ahead`: see launch.cuh.
cudaError_t merge_partials(const PartialRows& partials, const Tensor& out, float* lse, bool ahead, cudaStream_t stream);
/// `device_parts` is a copy of `parts` on the device where there are more than kInlineParts, else unused.
cudaError_t merge_states(std::span<const MergePart> parts, const MergePart* device_parts, const Tensor& out, float* lse,
                         bool ahead, cudaStream_t stream);

}  // namespace fiw::cuda
