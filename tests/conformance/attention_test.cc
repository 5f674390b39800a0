// What every backend must compute, over the shapes, layouts, element types and options that attention calls may have.
// Each test runs for every call (decode, prefill, verify, ragged prefill) on every device that the build has a backend
// for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr std::int32_t kGroupSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 32, 64};
constexpr std::int32_t kHeadDims[] = {8, 16, 56, 64, 72, 80, 96, 104, 128, 192, 224, 256, 320, 512, 576};
constexpr std::int32_t kPageSizes[] = {1, 2, 3, 5, 16, 128, 129, 256, 512};
constexpr DType kActivations[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr DType kCacheTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                 DType::kFloat8E5M2};

using DeviceAndOp = std::tuple<int, Op>;
using Change = void (*)(Case&);

class Attention : public testing::TestWithParam<DeviceAndOp>, public Seeded {
 protected:
  int device() const { return std::get<0>(GetParam()); }
  Op op() const { return std::get<1>(GetParam()); }

  /// Requests of several pages, of one token, of none, and (where a call has several query tokens) of fewer keys than
  /// query tokens.
  Case base() const {
    Case c{.op = op()};
    switch (op()) {
      case Op::kDecode:
        c.qo_lens = {1, 1, 1, 1, 1};
        c.kv_lens = {33, 1, 0, 70, 16};
        break;
      case Op::kVerify:
        c.qo_lens = {4, 4, 4, 4, 4};
        c.kv_lens = {37, 4, 2, 0, 64};
        break;
      case Op::kPrefill:
      case Op::kRagged:
        c.qo_lens = {5, 0, 17, 9, 3};
        c.kv_lens = {40, 7, 17, 3, 0};
        break;
    }
    return c;
  }

  static void heads(Case& c, std::int32_t qo, std::int32_t kv) {
    c.params.num_qo_heads = qo;
    c.params.num_kv_heads = kv;
  }

  bool paged() const { return op() != Op::kRagged; }

  void expect_right(const Case& c) {
    Problem problem(device(), c, rng_);
    ASSERT_NO_THROW(problem.call(*workspace_)) << c;
    EXPECT_TRUE(problem.check());
  }

  std::unique_ptr<FlashInferWorkspace> workspace_ = make_workspace(device());
};

/// For what ragged K/V does not have: pages, layouts, scales, planned steps.
class PagedAttention : public Attention {};

TEST_P(Attention, AnyGroupSize) {
  for (const std::int32_t group : kGroupSizes) {
    Case c = base();
    heads(c, 2 * group, 2);
    c.params.head_dim_qk = rng_.pick({64, 128});
    expect_right(c);
  }
}

TEST_P(Attention, AnyHeadDim) {
  for (const std::int32_t dim : kHeadDims) {
    for (const std::int32_t group : {1, 4}) {
      Case c = base();
      heads(c, 2 * group, 2);
      c.params.head_dim_qk = dim;
      expect_right(c);
    }
  }
}

// Queries for several tiles of any kernel, none before the first key, in the head sizes and types that kernels are
// built for.
TEST_P(Attention, LongQueries) {
  constexpr std::pair<std::int32_t, std::int32_t> kDims[] = {{64, 64},   {96, 96},   {128, 128},
                                                             {192, 128}, {256, 256}, {512, 512}};
  std::array<Change, 8> changes = {
      [](Case&) {},
      [](Case& c) { c.params.causal = false; },
      [](Case& c) { c.params.window_left = 7; },
      [](Case& c) { c.params.window_left = 150; },
      [](Case& c) { c.params.logits_soft_cap = 2.5F; },
      [](Case& c) { c.sinks = true; },
      [](Case& c) {
        c.params.window_left = 100;
        c.params.logits_soft_cap = 2.5F;
        c.sinks = true;
        c.lse = false;
      },
      [](Case& c) {
        if (c.op == Op::kRagged) return;  // which has no scales
        c.k_scale = 0.25F;
        c.v_scale = 1.5F;
        c.head_scales = true;
      },
  };
  for (const auto& [qk, vo] : kDims) {
    std::ranges::shuffle(changes, rng_.engine());
    for (const Change change : std::span(changes).first(rounds(int{changes.size()}))) {
      Case c = base();
      if (op() == Op::kPrefill || op() == Op::kRagged) {
        c.qo_lens = {200, 1, 130, 0, 300};
        c.kv_lens = {450, 1, 130, 5, 517};
      }
      heads(c, 2 * rng_.pick({1, 4}), 2);
      c.params.head_dim_qk = qk;
      c.params.head_dim_vo = vo;
      c.q_dtype = c.kv_dtype = rng_.pick({DType::kFloat16, DType::kBFloat16});
      c.page_size = rng_.pick({1, 3, 8, 16, 48, 64, 256});
      change(c);
      expect_right(c);
    }
  }
}

TEST_P(Attention, ValueHeadDimMayDiffer) {
  const std::pair<std::int32_t, std::int32_t> kDims[] = {{192, 128}, {128, 192}, {64, 256}, {576, 512},
                                                         {8, 16},    {72, 8},    {56, 224}, {8, 576}};
  for (const auto& [qk, vo] : kDims) {
    Case c = base();
    c.params.head_dim_qk = qk;
    c.params.head_dim_vo = vo;
    c.kv_dtype = rng_.pick({DType::kFloat32, DType::kBFloat16});
    expect_right(c);
  }
}

TEST_P(PagedAttention, AnyPageSize) {
  for (const std::int32_t page_size : kPageSizes) {
    Case c = base();
    c.page_size = page_size;
    // Around one and two pages, wherever that is.
    c.kv_lens = {page_size, page_size + 1, 2 * page_size, std::max(2 * page_size - 1, 1), 0};
    expect_right(c);
  }
}

TEST_P(PagedAttention, AnyLayout) {
  for (const CacheLayout layout : kAllLayouts) {
    for (const std::int32_t kv_heads : {1, 3}) {
      for (const std::int32_t page_size : {1, 5, 16}) {
        Case c = base();
        heads(c, 4 * kv_heads, kv_heads);
        c.layout = layout;
        c.page_size = page_size;
        c.params.head_dim_qk = rng_.pick({64, 80});
        c.kv_dtype = rng_.pick(kCacheTypes);
        expect_right(c);
      }
    }
  }
}

TEST_P(Attention, StridedTensors) {
  for (const DType dtype : kActivations) {
    for (const std::int32_t kv_heads : {1, 2}) {
      Case c = base();
      heads(c, 3 * kv_heads, kv_heads);
      c.spacing = Spacing::kStrided;
      c.q_dtype = dtype;
      c.kv_dtype = paged() ? rng_.pick(kCacheTypes) : dtype;
      c.layout = CacheLayout::kPadded;
      c.params.head_dim_qk = 72;
      expect_right(c);
    }
  }
}

TEST_P(Attention, AnyElementTypes) {
  for (const DType q_dtype : kActivations) {
    for (const DType kv_dtype : kCacheTypes) {
      if (!paged() && is_fp8(kv_dtype)) continue;  // fp8 is for caches
      for (const std::int32_t dim : {64, 104}) {
        Case c = base();
        c.q_dtype = q_dtype;
        c.kv_dtype = kv_dtype;
        c.params.head_dim_qk = dim;
        expect_right(c);
      }
    }
  }
}

TEST_P(PagedAttention, CacheScales) {
  for (const DType kv_dtype : kCacheTypes) {
    for (const bool head_scales : {false, true}) {
      Case c = base();
      heads(c, 12, 4);
      c.kv_dtype = kv_dtype;
      c.k_scale = 0.25F;
      c.v_scale = 0.5F;
      c.head_scales = head_scales;
      expect_right(c);
      c.k_scale = 0.37F;
      c.v_scale = 1.9F;
      expect_right(c);
    }
  }
}

TEST_P(Attention, EveryOptionAndPair) {
  const Change kChanges[] = {
      [](Case&) {},
      [](Case& c) { c.params.causal = false; },
      [](Case& c) { c.params.window_left = 7; },
      [](Case& c) { c.params.window_left = 0; },
      [](Case& c) { c.params.logits_soft_cap = 2.5F; },
      [](Case& c) { c.params.sm_scale = 0.4F; },
      [](Case& c) { c.sinks = true; },
      [](Case& c) { c.alibi = true; },
      [](Case& c) { c.mask = true; },
      [](Case& c) { c.lse = false; },
      [](Case& c) { c.q_deviation = 8.0F; },
  };
  for (const Change first : kChanges) {
    for (const Change second : kChanges) {
      Case c = base();
      c.q_dtype = c.kv_dtype = DType::kFloat32;  // the tightest comparison
      first(c);
      second(c);
      expect_right(c);
    }
  }
}

TEST_P(Attention, AllOptionsAtOnceInEveryType) {
  for (const DType q_dtype : kActivations) {
    for (const DType kv_dtype : kCacheTypes) {
      if (!paged() && is_fp8(kv_dtype)) continue;
      for (const bool mask : {false, true}) {
        Case c = base();
        heads(c, 10, 2);
        c.q_dtype = q_dtype;
        c.kv_dtype = kv_dtype;
        c.params.head_dim_vo = 96;
        c.params.window_left = 20;
        c.params.logits_soft_cap = 5.0F;
        c.sinks = c.alibi = true;
        c.mask = mask;
        c.k_scale = paged() ? 0.5F : 1.0F;
        c.spacing = Spacing::kStrided;
        expect_right(c);
      }
    }
  }
}

TEST_P(Attention, LongRequestAmongShortOnes) {
  Case c = base();
  c.kv_lens.front() = 5000;
  for (const std::int32_t group : {1, 3, 8}) {
    heads(c, 2 * group, 2);
    for (const std::int32_t window : {-1, 1000, 7}) {
      c.params.window_left = window;
      c.sinks = window == 7;
      expect_right(c);
    }
  }
}

TEST_P(Attention, OneLongRequestAlone) {
  for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat32}) {
    Case c{.op = op(), .kv_dtype = kv_dtype, .qo_lens = {op() == Op::kDecode ? 1 : 6}, .kv_lens = {9001}};
    c.params.head_dim_qk = 128;
    for (const std::int32_t page_size : {1, 16, 129}) {
      c.page_size = page_size;
      expect_right(c);
    }
  }
}

TEST_P(PagedAttention, SharedPages) {
  Case c = base();
  c.shared_pages = 3;
  c.kv_lens = {48, 49, 100, 47, 64};
  expect_right(c);
}

TEST_P(PagedAttention, EveryPageOfThePoolInUse) {
  Case c = base();
  c.spare_pages = 0;
  c.kv_lens = {32, 16, 0, 48, 64};
  expect_right(c);
}

TEST_P(Attention, EmptyBatchAndBatchOfEmptyRequests) {
  Case c = base();
  c.qo_lens = {};
  c.kv_lens = {};
  expect_right(c);
  c = base();
  std::fill(c.kv_lens.begin(), c.kv_lens.end(), 0);
  c.sinks = true;
  expect_right(c);
}

TEST_P(Attention, LargeLogits) {
  for (const DType dtype : kActivations) {
    Case c = base();
    c.q_dtype = dtype;
    c.kv_dtype = dtype;
    c.q_deviation = 300.0F;  // softmax picks one key; a sum without its maximum taken out overflows
    c.params.sm_scale = 1.0F;
    expect_right(c);
  }
}

// However many parts a row is merged from.
TEST_P(Attention, NanInAKeyReachesTheRowsThatSeeIt) {
  const Change kChanges[] = {
      [](Case&) {},
      [](Case& c) { c.params.causal = false; },
      [](Case& c) { c.params.window_left = 7; },
      [](Case& c) { c.params.logits_soft_cap = 2.5F; },
      [](Case& c) { c.sinks = true; },
      [](Case& c) { c.alibi = true; },
      [](Case& c) { c.mask = true; },
      [](Case& c) { c.kv_lens.front() = 3000; },
      [](Case& c) { c.q_dtype = c.kv_dtype = DType::kFloat32; },
  };
  for (const Change change : kChanges) {
    Case c = base();
    change(c);
    Problem problem(device(), c, rng_);
    const std::int32_t kv_len = c.kv_lens.front();
    const std::int32_t d = rng_.uniform(0, c.params.head_dim_qk - 1);
    for (const std::int32_t token : {kv_len - rng_.uniform(1, 8), rng_.uniform(0, kv_len - 1)}) {
      problem.spoil(true, 0, token, rng_.uniform(0, 1), d, std::numeric_limits<float>::quiet_NaN());
    }
    ASSERT_NO_THROW(problem.call(*workspace_)) << c;
    EXPECT_TRUE(problem.check());
  }
}

TEST_P(Attention, SoftCapFarAboveTheLogits) {
  for (const float cap : {1e4F, 1e9F, 1e30F}) {
    Case c = base();
    c.q_dtype = c.kv_dtype = DType::kFloat32;
    c.params.logits_soft_cap = cap;
    c.q_deviation = 4.0F;
    expect_right(c);
  }
}

TEST_P(PagedAttention, PlannedStepGivesTheSameAsTheCall) {
  Case c = base();
  c.sinks = true;
  Problem problem(device(), c, rng_);
  const AttentionStep step = problem.plan(*workspace_);
  problem.run(step);
  EXPECT_TRUE(problem.check());
  // A second layer of the step: other tensors, same plan.
  Problem second(device(), c, rng_);
  second.run(second.plan(*workspace_));
  EXPECT_TRUE(second.check());
  EXPECT_EQ(step.info().batch, static_cast<std::int32_t>(c.kv_lens.size()));
}

std::string test_name(const testing::TestParamInfo<DeviceAndOp>& info) {
  std::ostringstream name;
  name << device_name(std::get<0>(info.param)) << '_' << std::get<1>(info.param);
  return name.str();
}

INSTANTIATE_TEST_SUITE_P(Backends, Attention,
                         testing::Combine(testing::ValuesIn(compiled_devices()),
                                          testing::Values(Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Backends, PagedAttention,
                         testing::Combine(testing::ValuesIn(compiled_devices()),
                                          testing::Values(Op::kDecode, Op::kPrefill, Op::kVerify)),
                         test_name);

}  // namespace
}  // namespace fiw::test
