// FlashInfer's FA3 kernels as the host sees them: work lists an SM, no split keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/schedule.h"
#include "cuda/fa2/tile.h"
#include "fiw/types.h"

namespace fiw::cuda {

enum class HopperVariant : std::uint8_t { kRagged, kPaged };

struct HopperArgs {
  AttentionArgs call{};  ///< the schedule's arrays in it are not read
  const HopperShape* shape = nullptr;
  const std::byte* schedule = nullptr;
  std::int64_t total_rows = 0;
  std::int64_t total_kv = 0;  ///< ragged only
  std::int64_t out_row = 0;   ///< strides of out
  std::int64_t out_head = 0;
  std::int32_t num_workers = 0;
  float* partials = nullptr;  ///< of cut tiles; our own kernel only
};

struct HopperKernel {
  bool paged = false;
  bool causal = false;
  bool window = false;  ///< keys behind `window_left` are left out; -1 leaves out none
  bool soft_cap = false;
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  /// Encodes the tensor maps on the host, then enqueues.
  cudaError_t (*launch)(const HopperArgs& args, cudaStream_t stream) = nullptr;
};

struct HopperEntry {
  DType q = DType::kBFloat16;  ///< of K and V too
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::span<const HopperKernel> (*kernels)() = nullptr;
};

/// Everything that this build holds, generated from kernels.json; empty without sm_90a.
std::span<const HopperEntry> hopper_entries() noexcept;

}  // namespace fiw::cuda
