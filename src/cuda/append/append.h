// Writing new tokens into a paged cache.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "fiw/kv_cache.h"
#include "fiw/types.h"

namespace fiw::cuda {

/// The table's arrays and the rows of each request, on the device.
struct AppendTable {
  std::int32_t batch = 0;
  const std::int32_t* append_indptr = nullptr;  ///< [batch + 1]
  const std::int32_t* indptr = nullptr;         ///< [batch + 1]
  const std::int32_t* indices = nullptr;
  const std::int32_t* kv_lens = nullptr;  ///< [batch], with the new tokens
};

/// Enqueues the copy of rows of k and v to the ends of their requests.
cudaError_t append_kv(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, const AppendTable& table,
                      cudaStream_t stream);

}  // namespace fiw::cuda
