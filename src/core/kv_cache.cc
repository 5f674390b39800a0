// Strides of the usual cache arrangements.
#include "fiw/kv_cache.h"

#include "core/fail.h"

namespace fiw {
namespace {

KvCache::Strides page_strides(KvLayout layout, std::int64_t page_size, std::int64_t num_heads, std::int64_t head_dim) {
  std::int64_t page = page_size * num_heads;  // of 32 bits each
  // An interleaved cache strides by two pages, and an element has up to four bytes.
  if (__builtin_mul_overflow(page, 8 * head_dim, &page)) {
    fail(Reason::kSizeOverflow, "a page of {} tokens, {} heads and {} elements a head is more than int64 holds",
         page_size, num_heads, head_dim);
  }
  page /= 8;
  return layout == KvLayout::kNHD ? KvCache::Strides{.page = page, .token = num_heads * head_dim, .head = head_dim}
                                  : KvCache::Strides{.page = page, .token = head_dim, .head = page_size * head_dim};
}

}  // namespace

KvCache KvCache::contiguous(void* k, void* v, DType dtype, KvLayout layout, std::int64_t num_pages,
                            std::int32_t page_size, std::int32_t num_kv_heads, std::int32_t head_dim_qk,
                            std::int32_t head_dim_vo, int device) {
  if (!is_dtype(dtype)) fail(Reason::kTensorDType, "dtype is {}, expected a DType", static_cast<int>(dtype));
  if (layout != KvLayout::kNHD && layout != KvLayout::kHND) {
    fail(Reason::kOptions, "layout is {}, expected kNHD (0) or kHND (1)", static_cast<int>(layout));
  }
  if (head_dim_vo == 0) head_dim_vo = head_dim_qk;
  KvCache kv;
  kv.k = k;
  kv.v = v;
  kv.dtype = dtype;
  kv.num_pages = num_pages;
  kv.page_size = page_size;
  kv.num_kv_heads = num_kv_heads;
  kv.head_dim_qk = head_dim_qk;
  kv.head_dim_vo = head_dim_vo;
  kv.k_stride = page_strides(layout, page_size, num_kv_heads, head_dim_qk);
  kv.v_stride = page_strides(layout, page_size, num_kv_heads, head_dim_vo);
  kv.device = device;
  return kv;
}

KvCache KvCache::interleaved(void* kv, DType dtype, KvLayout layout, std::int64_t num_pages, std::int32_t page_size,
                             std::int32_t num_kv_heads, std::int32_t head_dim, int device) {
  KvCache cache = contiguous(kv, kv, dtype, layout, num_pages, page_size, num_kv_heads, head_dim, head_dim, device);
  cache.v = static_cast<std::byte*>(kv) + static_cast<std::size_t>(cache.k_stride.page) * size_of(dtype);
  cache.k_stride.page *= 2;
  cache.v_stride.page *= 2;
  return cache;
}

}  // namespace fiw
