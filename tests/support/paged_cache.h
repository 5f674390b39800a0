// A paged KV cache for tests: scattered pages out of a larger pool, NaN in every slot that holds no token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fiw/kv_cache.h"
#include "support/device_buffer.h"
#include "support/random.h"
#include "support/tensor.h"

namespace fiw::test {

/// kPadded: K and V apart, NHD, with odd gaps between heads, tokens and pages.
enum class CacheLayout { kNhd, kHnd, kInterleavedNhd, kInterleavedHnd, kPadded };
inline constexpr CacheLayout kAllLayouts[] = {CacheLayout::kNhd, CacheLayout::kHnd, CacheLayout::kInterleavedNhd,
                                              CacheLayout::kInterleavedHnd, CacheLayout::kPadded};

struct CacheShape {
  DType dtype = DType::kBFloat16;
  CacheLayout layout = CacheLayout::kNhd;  ///< an interleaved one needs equal head dims
  std::int64_t num_pages = 0;
  std::int32_t page_size = 16;
  std::int32_t num_kv_heads = 1;
  std::int32_t head_dim_qk = 64;
  std::int32_t head_dim_vo = 64;
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  bool head_scales = false;  ///< a random scale for each head as well
};

class PagedCache {
 public:
  PagedCache(int device, const CacheShape& shape, Rng& rng);

  /// Gives tokens first .. last - 1 of a request with these pages unit-normal values (after scaling); upload()
  /// afterwards.
  void fill(std::span<const std::int32_t> pages, std::int32_t first, std::int32_t last, Rng& rng);
  /// What append_kv is to do, on the host copy: row `row` of k and v becomes the token in one slot.
  void store_token(std::int32_t page, std::int32_t slot, const TestTensor& k, const TestTensor& v, std::int64_t row);
  /// Stores one element of the host copy of K (`key`) or V as it is, scales aside; upload() afterwards.
  void set(bool key, std::int32_t page, std::int32_t slot, std::int32_t head, std::int32_t d, float value);
  void upload();

  KvCache host() const;
  KvCache device() const;
  /// Whether the device's bytes equal the host's, everywhere in the pool.
  testing::AssertionResult device_matches_host() const;
  const CacheShape& shape() const { return shape_; }

 private:
  KvCache view(void* k, void* v, const float* k_head_scale, const float* v_head_scale, int device) const;

  int device_;
  CacheShape shape_;
  Mirror<std::byte> k_;
  Mirror<std::byte> v_;  ///< empty when interleaved: both lie in k_
  Mirror<float> k_head_scale_;
  Mirror<float> v_head_scale_;
};

}  // namespace fiw::test
