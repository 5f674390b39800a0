// Copies a batch's pages into contiguous K and V, which the Hopper kernel reads through bulk tensor copies.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fiw/kv_cache.h"
#include "fiw/types.h"

namespace fiw::cuda {

struct GatherTable {
  std::int32_t batch = 0;
  const std::int32_t* indptr = nullptr;      ///< [batch + 1], pages
  const std::int32_t* indices = nullptr;     ///< [pages]
  const std::int32_t* kv_offsets = nullptr;  ///< [batch + 1], tokens before each request
};

/// k, v [total_kv, num_kv_heads, head_dim] contiguous, of `dtype`; an fp8 cache's codes are widened, not scaled.
cudaError_t gather_kv(const KvCache& kv, const GatherTable& table, std::int64_t total_kv, DType dtype, void* k, void* v,
                      cudaStream_t stream);

}  // namespace fiw::cuda
