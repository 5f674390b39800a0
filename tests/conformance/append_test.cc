// append_kv: the tokens land in their slots, converted, scaled and saturated, and no other byte of the cache changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/numeric.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr DType kActivations[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr DType kCacheTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                 DType::kFloat8E5M2};

struct Appended {
  CacheShape cache;
  DType dtype = DType::kBFloat16;
  Spacing spacing = Spacing::kContiguous;
  std::vector<std::int32_t> tokens;   ///< new ones of each request
  std::vector<std::int32_t> kv_lens;  ///< with the new ones
};

class Append : public testing::TestWithParam<int>, public Seeded {
 protected:
  /// Appends normal values (and, in `extremes`, some that no narrow type holds) and compares the whole pool.
  void expect_right(Appended a, bool extremes = false) {
    std::int32_t pool = 3;
    for (const std::int32_t len : a.kv_lens) pool += (len + a.cache.page_size - 1) / a.cache.page_size;
    a.cache.num_pages = pool;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(pool));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng_.engine());
    std::vector<std::vector<std::int32_t>> pages;
    PagedCache cache(GetParam(), a.cache, rng_);
    std::vector<std::int32_t> indptr{0};
    for (std::size_t r = 0; r < a.kv_lens.size(); ++r) {
      const std::int32_t count = (a.kv_lens[r] + a.cache.page_size - 1) / a.cache.page_size;
      pages.emplace_back(ids.end() - count, ids.end());
      ids.resize(ids.size() - static_cast<std::size_t>(count));
      cache.fill(pages.back(), 0, a.kv_lens[r] - a.tokens[r], rng_);
      indptr.push_back(indptr.back() + a.tokens[r]);
    }
    cache.upload();
    const PageTable table = PageTable::from_pages(a.cache.page_size, pool, pages, a.kv_lens);

    TestTensor k(GetParam(), a.dtype, indptr.back(), a.cache.num_kv_heads, a.cache.head_dim_qk, a.spacing);
    TestTensor v(GetParam(), a.dtype, indptr.back(), a.cache.num_kv_heads, a.cache.head_dim_vo, a.spacing);
    k.fill_normal(rng_);
    v.fill_normal(rng_);
    if (extremes) {
      for (TestTensor* tensor : {&k, &v}) place_extremes(*tensor);
    }
    workspace_->append_kv(k.device(), v.device(), indptr, cache.device(), table);

    for (std::size_t r = 0; r < a.kv_lens.size(); ++r) {
      for (std::int32_t i = 0; i < a.tokens[r]; ++i) {
        const std::int32_t position = a.kv_lens[r] - a.tokens[r] + i;
        cache.store_token(pages[r][static_cast<std::size_t>(position / a.cache.page_size)],
                          position % a.cache.page_size, k, v, indptr[r] + i);
      }
    }
    EXPECT_TRUE(cache.device_matches_host())
        << to_string(a.dtype) << " into " << to_string(a.cache.dtype) << ", page size " << a.cache.page_size
        << ", head dims " << a.cache.head_dim_qk << "/" << a.cache.head_dim_vo << ", scales " << a.cache.k_scale << "/"
        << a.cache.v_scale;
  }

  /// Overflows, ties, subnormals, infinities and NaN, scattered so that vector bodies and tails both meet them.
  void place_extremes(TestTensor& tensor) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const std::vector<float> values{kInf,      -kInf,    std::numeric_limits<float>::quiet_NaN(),
                                    1e5F,      -1e5F,    3e38F,
                                    448.0F,    464.0F,   -464.1F,
                                    480.0F,    57344.0F, 61440.0F,
                                    -65000.0F, 65504.0F, 65519.0F,
                                    65520.0F,  1e-3F,    0.0009765625F,
                                    -1e-7F,    6e-8F,    1e-40F,
                                    0.0F,      -0.0F,    1.0625F,
                                    1.1875F,   -1.125F,  1.375F};
    for (std::int64_t row = 0; row < tensor.rows(); ++row) {
      for (std::int64_t head = 0; head < tensor.heads(); ++head) {
        for (std::int64_t d = 0; d < tensor.dim(); ++d) {
          if (rng_.chance(0.4)) tensor.set(row, head, d, rng_.pick(values));
        }
      }
    }
    tensor.upload();
  }

  static Appended base() {
    return {.cache = {.num_kv_heads = 2}, .tokens = {1, 5, 0, 20, 16, 3}, .kv_lens = {1, 18, 7, 40, 16, 35}};
  }

  std::unique_ptr<FlashInferWorkspace> workspace_ = make_workspace(GetParam());
};

TEST_P(Append, AnyTypeIntoAnyCache) {
  for (const DType dtype : kActivations) {
    for (const DType cache_dtype : kCacheTypes) {
      for (const Spacing spacing : {Spacing::kContiguous, Spacing::kStrided}) {
        Appended a = base();
        a.dtype = dtype;
        a.spacing = spacing;
        a.cache.dtype = cache_dtype;
        expect_right(a);
      }
    }
  }
}

TEST_P(Append, SaturatesAndKeepsNan) {
  for (const DType dtype : kActivations) {
    for (const DType cache_dtype : kCacheTypes) {
      Appended a = base();
      a.dtype = dtype;
      a.cache.dtype = cache_dtype;
      a.cache.head_dim_qk = 72;
      a.cache.head_dim_vo = 24;
      expect_right(a, true);
    }
  }
}

TEST_P(Append, DividesByScales) {
  for (const DType cache_dtype : kCacheTypes) {
    for (const bool head_scales : {false, true}) {
      Appended a = base();
      a.dtype = DType::kFloat32;
      a.cache.dtype = cache_dtype;
      a.cache.k_scale = 0.37F;
      a.cache.v_scale = 1.9F;
      a.cache.head_scales = head_scales;
      expect_right(a);
      expect_right(a, true);
    }
  }
}

TEST_P(Append, AnyLayoutHeadDimAndPageSize) {
  for (const CacheLayout layout : kAllLayouts) {
    const bool equal_dims = layout == CacheLayout::kInterleavedNhd || layout == CacheLayout::kInterleavedHnd;
    for (const std::int32_t page_size : {1, 3, 16, 129}) {
      for (const std::int32_t dim : {8, 80, 128, 576}) {
        Appended a = base();
        a.cache.layout = layout;
        a.cache.page_size = page_size;
        a.cache.head_dim_qk = dim;
        a.cache.head_dim_vo = equal_dims ? dim : 64;
        a.cache.num_kv_heads = rng_.uniform(1, 4);
        expect_right(a);
      }
    }
  }
}

TEST_P(Append, NothingToAppend) {
  Appended a = base();
  std::fill(a.tokens.begin(), a.tokens.end(), 0);
  expect_right(a);
  a.tokens.clear();
  a.kv_lens.clear();
  expect_right(a);
}

TEST_P(Append, AttentionSeesWhatWasAppended) {
  for (const DType kv_dtype : kCacheTypes) {
    Case c{.kv_dtype = kv_dtype, .page_size = 4, .qo_lens = {1, 1, 1}, .kv_lens = {0, 3, 9}};
    c.k_scale = 0.25F;
    c.v_scale = 0.5F;
    c.spare_pages = 20;
    Problem problem(GetParam(), c, rng_);
    for (int step = 0; step < 6; ++step) {
      ASSERT_TRUE(problem.grow(*workspace_, 4));
      ASSERT_TRUE(problem.cache().device_matches_host());
      problem.call(*workspace_);
      EXPECT_TRUE(problem.check()) << "after " << step + 1 << " appends";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Append, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
