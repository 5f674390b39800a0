// The query heads of a KV head: which token and head a packed row is.
#pragma once

#include <cstdint>

#include "cuda/fa2/tile.h"

namespace fiw::cuda {

/// Without divisions: every block asks at its start.
class HeadGroup {
 public:
  __device__ explicit HeadGroup(const AttentionArgs& call)
      : size_(call.num_qo_heads / call.kv.num_kv_heads), inverse_((65536 + size_ - 1) / size_) {}

  __device__ __forceinline__ std::int32_t size() const { return size_; }
  /// Exact up to row 32.
  __device__ __forceinline__ std::int32_t token(std::int32_t row) const { return row * inverse_ >> 16; }
  __device__ __forceinline__ std::int32_t head(std::int32_t kv_head, std::int32_t row) const {
    return kv_head * size_ + row - token(row) * size_;
  }

 private:
  std::int32_t size_;
  std::int32_t inverse_;
};

}  // namespace fiw::cuda
