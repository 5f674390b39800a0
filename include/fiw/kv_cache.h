// A view of one layer's paged K and V.
#pragma once

#include <cstdint>

#include "fiw/types.h"

namespace fiw {

/// One layer's paged KV cache; owns nothing. Strides are in elements and 64-bit; the head_dim axis is contiguous.
///
/// Slots past a request's length may hold anything, NaN too: they never reach a result. fp8 caches store
/// `value / scale`; attention multiplies the scale back. A per-head scale, float32 [num_kv_heads], multiplies the
/// per-tensor one and is read on the workspace's device.
///
/// Attention reads through any strides of at least head_dim: slots may share memory, and V may lie in K. append_kv
/// writes, and refuses a cache in which two slots share an element; K and V may interleave in one allocation, by whole
/// axes of theirs.
struct KvCache {
  struct Strides {
    std::int64_t page = 0;
    std::int64_t token = 0;
    std::int64_t head = 0;
  };

  void* k = nullptr;
  void* v = nullptr;
  DType dtype = DType::kBFloat16;
  std::int64_t num_pages = 0;
  std::int32_t page_size = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  Strides k_stride;
  Strides v_stride;
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  const float* k_head_scale = nullptr;
  const float* v_head_scale = nullptr;
  int device = kCpuDevice;

  /// K [num_pages, page...] and V apart, each contiguous in the given layout. `head_dim_vo` 0: as head_dim_qk. As the
  /// one below, throws for a layout or type that is none, or a page too large for its strides.
  static KvCache contiguous(void* k, void* v, DType dtype, KvLayout layout, std::int64_t num_pages,
                            std::int32_t page_size, std::int32_t num_kv_heads, std::int32_t head_dim_qk,
                            std::int32_t head_dim_vo = 0, int device = kCpuDevice);

  /// One tensor [num_pages, 2, page...]: each page holds its K and then its V (equal head dims).
  static KvCache interleaved(void* kv, DType dtype, KvLayout layout, std::int64_t num_pages, std::int32_t page_size,
                             std::int32_t num_kv_heads, std::int32_t head_dim, int device = kCpuDevice);
};

}  // namespace fiw
