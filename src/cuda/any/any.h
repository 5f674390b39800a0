// The kernel for whatever FlashInfer has none for: any head size, element type, alignment and stride. It reads the
// tile kernels' schedules, so plans are the same. It is correct, not fast.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/fa2/tile.h"
#include "fiw/types.h"

namespace fiw::cuda {

struct AnyArgs {
  AttentionArgs call{};
  DType q = DType::kBFloat16;  ///< of out too
  DType kv = DType::kBFloat16;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::int32_t tile_rows = 0;  ///< of the schedule
  std::int64_t out_row = 0;    ///< strides of out; partial results are contiguous
  std::int64_t out_head = 0;
};

cudaError_t attend_any(const AnyArgs& args, cudaStream_t stream);

}  // namespace fiw::cuda
