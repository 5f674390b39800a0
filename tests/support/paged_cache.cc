#include "support/paged_cache.h"

#include "core/numeric.h"

namespace fiw::test {
namespace {

bool interleaved(CacheLayout layout) {
  return layout == CacheLayout::kInterleavedNhd || layout == CacheLayout::kInterleavedHnd;
}

KvLayout page_layout(CacheLayout layout) {
  return layout == CacheLayout::kHnd || layout == CacheLayout::kInterleavedHnd ? KvLayout::kHND : KvLayout::kNHD;
}

KvCache::Strides padded_strides(const CacheShape& shape, std::int32_t dim) {
  const std::int64_t head = dim + 3;
  const std::int64_t token = shape.num_kv_heads * head + 1;
  return {.page = shape.page_size * token + 7, .token = token, .head = head};
}

std::size_t buffer_bytes(const CacheShape& shape, bool is_key) {
  const std::int32_t dim = is_key ? shape.head_dim_qk : shape.head_dim_vo;
  std::int64_t page = std::int64_t{shape.page_size} * shape.num_kv_heads * dim;
  if (shape.layout == CacheLayout::kPadded) page = padded_strides(shape, dim).page;
  if (interleaved(shape.layout)) page = is_key ? 2 * page : 0;
  return static_cast<std::size_t>(shape.num_pages * page) * size_of(shape.dtype);
}

std::int64_t index(const KvCache::Strides& stride, std::int32_t page, std::int32_t slot, std::int32_t head) {
  return page * stride.page + slot * stride.token + head * stride.head;
}

std::vector<float> random_scales(const CacheShape& shape, Rng& rng) {
  std::vector<float> scales(shape.head_scales ? static_cast<std::size_t>(shape.num_kv_heads) : 0);
  for (float& scale : scales) scale = 0.25F * static_cast<float>(rng.uniform(1, 8));
  return scales;
}

}  // namespace

PagedCache::PagedCache(int device, const CacheShape& shape, Rng& rng)
    : device_(device),
      shape_(shape),
      k_(device, buffer_bytes(shape, true)),
      v_(device, buffer_bytes(shape, false)),
      k_head_scale_(device, random_scales(shape, rng)),
      v_head_scale_(device, random_scales(shape, rng)) {
  for (Mirror<std::byte>* side : {&k_, &v_}) {
    fill_nan(side->host().data(), shape.dtype, static_cast<std::int64_t>(side->host().size() / size_of(shape.dtype)));
  }
  upload();
}

void PagedCache::fill(std::span<const std::int32_t> pages, std::int32_t first, std::int32_t last, Rng& rng) {
  const KvCache kv = host();
  for (std::int32_t token = first; token < last; ++token) {
    const std::int32_t page = pages[static_cast<std::size_t>(token / shape_.page_size)];
    const std::int32_t slot = token % shape_.page_size;
    for (std::int32_t head = 0; head < shape_.num_kv_heads; ++head) {
      const auto side = [&](void* data, const KvCache::Strides& stride, std::int32_t dim, float scale) {
        for (std::int32_t d = 0; d < dim; ++d) {
          store_saturated(data, shape_.dtype, index(stride, page, slot, head) + d, rng.normal() / scale);
        }
      };
      side(kv.k, kv.k_stride, shape_.head_dim_qk, kv.k_scale * (shape_.head_scales ? kv.k_head_scale[head] : 1.0F));
      side(kv.v, kv.v_stride, shape_.head_dim_vo, kv.v_scale * (shape_.head_scales ? kv.v_head_scale[head] : 1.0F));
    }
  }
}

void PagedCache::store_token(std::int32_t page, std::int32_t slot, const TestTensor& k, const TestTensor& v,
                             std::int64_t row) {
  const KvCache kv = host();
  for (std::int32_t head = 0; head < shape_.num_kv_heads; ++head) {
    const auto side = [&](void* data, const KvCache::Strides& stride, const TestTensor& from, float scale) {
      for (std::int64_t d = 0; d < from.dim(); ++d) {
        store_saturated(data, shape_.dtype, index(stride, page, slot, head) + d, from.at(row, head, d) / scale);
      }
    };
    side(kv.k, kv.k_stride, k, kv.k_scale * (shape_.head_scales ? kv.k_head_scale[head] : 1.0F));
    side(kv.v, kv.v_stride, v, kv.v_scale * (shape_.head_scales ? kv.v_head_scale[head] : 1.0F));
  }
}

void PagedCache::set(bool key, std::int32_t page, std::int32_t slot, std::int32_t head, std::int32_t d, float value) {
  const KvCache kv = host();
  store_float(key ? kv.k : kv.v, shape_.dtype, index(key ? kv.k_stride : kv.v_stride, page, slot, head) + d, value);
}

void PagedCache::upload() {
  k_.upload();
  v_.upload();
}

KvCache PagedCache::view(void* k, void* v, const float* k_head_scale, const float* v_head_scale, int device) const {
  const KvLayout layout = page_layout(shape_.layout);
  KvCache kv = interleaved(shape_.layout)
                   ? KvCache::interleaved(k, shape_.dtype, layout, shape_.num_pages, shape_.page_size,
                                          shape_.num_kv_heads, shape_.head_dim_qk, device)
                   : KvCache::contiguous(k, v, shape_.dtype, layout, shape_.num_pages, shape_.page_size,
                                         shape_.num_kv_heads, shape_.head_dim_qk, shape_.head_dim_vo, device);
  if (shape_.layout == CacheLayout::kPadded) {
    kv.k_stride = padded_strides(shape_, shape_.head_dim_qk);
    kv.v_stride = padded_strides(shape_, shape_.head_dim_vo);
  }
  kv.k_scale = shape_.k_scale;
  kv.v_scale = shape_.v_scale;
  kv.k_head_scale = shape_.head_scales ? k_head_scale : nullptr;
  kv.v_head_scale = shape_.head_scales ? v_head_scale : nullptr;
  return kv;
}

KvCache PagedCache::host() const {
  // The view type has no const form; the reference only reads through it, and fill(), store_token() and set() own the
  // bytes.
  return view(const_cast<std::byte*>(k_.host().data()), const_cast<std::byte*>(v_.host().data()),
              k_head_scale_.host().data(), v_head_scale_.host().data(), kCpuDevice);
}

KvCache PagedCache::device() const {
  return view(k_.device(), v_.device(), k_head_scale_.device(), v_head_scale_.device(), device_);
}

testing::AssertionResult PagedCache::device_matches_host() const {
  for (const Mirror<std::byte>* side : {&k_, &v_}) {
    std::vector<std::byte> actual(side->host().size());
    side->read(actual);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      if (actual[i] == side->host()[i]) continue;
      const auto element = static_cast<std::int64_t>(i / size_of(shape_.dtype));
      return testing::AssertionFailure() << (side == &k_ ? "K" : "V") << " buffer, element " << element << " of "
                                         << to_string(shape_.dtype) << ": the cache holds "
                                         << load_float(actual.data(), shape_.dtype, element) << ", expected "
                                         << load_float(side->host().data(), shape_.dtype, element);
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace fiw::test
