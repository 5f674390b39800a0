// The CPU kernels at the ends of what floats and positions hold, on every SIMD target of this machine: NaN, infinities,
// positions near 2^31, soft caps, scales and slopes of any size.
#include "cpu/targets.h"
// The list of targets depends on the line above.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kLastPosition = std::numeric_limits<std::int32_t>::max();

class CpuExtremes : public testing::TestWithParam<std::int64_t>, public Seeded {
 protected:
  CpuExtremes() { hwy::SetSupportedTargetsForTest(GetParam()); }
  ~CpuExtremes() override { hwy::SetSupportedTargetsForTest(0); }

  std::int32_t any(std::int32_t lo, std::int32_t hi) { return rng_.uniform(lo, hi); }

  /// Every key of its own, so that NaN meets every way of merging.
  static WorkspaceOptions fixed_split(std::int32_t tokens) {
    WorkspaceOptions options{.num_threads = 2};
    options.plan = {.batch_invariant = true, .fixed_split_tokens = tokens};
    return options;
  }

  static Case fp32_case(Op op, std::int32_t qo_len, std::int32_t kv_len) {
    Case c{.op = op};
    c.q_dtype = c.kv_dtype = DType::kFloat32;
    c.qo_lens = {qo_len};
    c.kv_lens = {kv_len};
    return c;
  }

  void expect_right(Problem& problem, const WorkspaceOptions& options = {}) {
    ASSERT_NO_THROW(problem.call(*make_workspace(kCpuDevice, options))) << problem.description();
    EXPECT_TRUE(problem.check()) << hwy::TargetName(GetParam());
  }
};

// The last key that a row sees, behind it only hidden ones.
TEST_P(CpuExtremes, NanInTheLastVisibleKey) {
  Case c = fp32_case(Op::kPrefill, 600, 2000);
  c.params = {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim_qk = 8};
  Problem problem(kCpuDevice, c, rng_);
  problem.spoil(true, 0, 1600, 0, 5, kNan);
  problem.call(*make_workspace(kCpuDevice));
  for (std::int32_t p = 0; p < 600; ++p) {
    EXPECT_EQ(std::isnan(problem.out().at(p, 0, 3)), p >= 200) << "row " << p;
    EXPECT_EQ(std::isnan(problem.lse()[static_cast<std::size_t>(p)]), p >= 200) << "row " << p;
  }
}

TEST_P(CpuExtremes, NanInOneOfManyParts) {
  for (const std::int32_t split : {1, 7, 1000}) {
    for (const std::int32_t token : {0, 50, 98, 99}) {
      Problem problem(kCpuDevice, fp32_case(Op::kDecode, 1, 100), rng_);
      problem.spoil(true, 0, token, 1, 5, kNan);
      expect_right(problem, fixed_split(split));
    }
  }
}

TEST_P(CpuExtremes, NanInAQuery) {
  for (const std::int32_t qo_len : {1, 3, 50}) {
    for (const WorkspaceOptions& options : {WorkspaceOptions{}, fixed_split(16)}) {
      Problem problem(kCpuDevice, fp32_case(Op::kPrefill, qo_len, 90), rng_);
      problem.spoil_query(qo_len - 1, 5, 0, kNan);
      expect_right(problem, options);
    }
  }
}

// The logarithm of a NaN row is NaN too, or merge_states would take the row for an empty one.
TEST_P(CpuExtremes, MergedStatesKeepNan) {
  const auto workspace = make_workspace(kCpuDevice);
  for (const bool in_first : {true, false}) {
    // Seen by the first of 60 rows as its last key, and by all others.
    Problem first(kCpuDevice, fp32_case(Op::kPrefill, 60, 100), rng_);
    Problem second(kCpuDevice, fp32_case(Op::kPrefill, 60, 100), rng_);
    (in_first ? first : second).spoil(true, 0, 40, 0, 0, kNan);
    first.call(*workspace);
    second.call(*workspace);
    TestTensor out(kCpuDevice, DType::kFloat32, 60, 8, 64, Spacing::kContiguous);
    std::vector<float> lse(60 * 8, 0.0F);
    const PartialState parts[] = {{.out = first.out().device(), .lse = first.device_lse()},
                                  {.out = second.out().device(), .lse = second.device_lse()}};
    out.fill(0.0F);
    workspace->merge_states(parts, out.device(), lse.data());
    out.download();
    for (std::int32_t h = 0; h < 8; ++h) {  // the first four heads read KV head 0
      EXPECT_EQ(std::isnan(out.at(0, h, 9)), h < 4) << "head " << h;
      EXPECT_EQ(std::isnan(lse[static_cast<std::size_t>(h)]), h < 4) << "head " << h;
    }
  }
}

// Unlike a row that sees nothing, one whose logits are all minus infinity has no softmax; beside a sink it weighs
// nothing.
TEST_P(CpuExtremes, AllLogitsMinusInfinity) {
  for (const std::int32_t qo_len : {1, 4, 40}) {
    for (const std::int32_t split : {0, 1, 16}) {
      for (const bool mask : {false, true}) {
        for (const bool sinks : {false, true}) {
          Case c = fp32_case(Op::kPrefill, qo_len, 37);
          c.mask = mask;
          c.sinks = sinks;
          c.params.causal = false;
          Problem problem(kCpuDevice, c, rng_);
          // Half of the rows get minus infinity from every key, the others plus infinity.
          for (std::int32_t token = 0; token < 37; ++token) problem.spoil(true, 0, token, 1, 3, kInfinity);
          problem.spoil(false, 0, 20, 1, 2, kNan);
          expect_right(problem, split == 0 ? WorkspaceOptions{} : fixed_split(split));
        }
      }
    }
  }
}

// NaN and infinities anywhere, under every option, reach exactly the rows that see them.
TEST_P(CpuExtremes, RandomSpoiledTokens) {
  for (int round = 0; round < rounds(150) && !HasFailure(); ++round) {
    Case c{.op = rng_.pick({Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged})};
    const std::int32_t kv_heads = any(1, 3);
    c.params = {.num_qo_heads = kv_heads * rng_.pick({1, 2, 3, 4, 7, 8}),
                .num_kv_heads = kv_heads,
                .head_dim_qk = 8 * any(1, 6),
                .causal = rng_.chance(0.6),
                .window_left = rng_.chance(0.4) ? any(0, 60) : -1,
                .logits_soft_cap = rng_.chance(0.3) ? 5.0F : 0.0F};
    c.q_dtype = rng_.pick({DType::kFloat32, DType::kBFloat16});
    c.kv_dtype = c.op == Op::kRagged ? c.q_dtype : rng_.pick({DType::kFloat32, DType::kFloat16, DType::kFloat8E5M2});
    c.page_size = any(1, 20);
    c.sinks = rng_.chance(0.4);
    c.alibi = rng_.chance(0.3);
    c.mask = c.op != Op::kDecode && rng_.chance(0.5);
    const std::int32_t window = any(2, 9);
    for (std::int32_t r = any(1, 3); r > 0; --r) {
      c.qo_lens.push_back(c.op == Op::kDecode ? 1 : c.op == Op::kVerify ? window : any(0, 60));
      c.kv_lens.push_back(rng_.chance(0.2) ? any(0, 3) : any(1, 150));
    }
    Problem problem(kCpuDevice, c, rng_);
    for (std::size_t r = 0; r < c.kv_lens.size(); ++r) {
      if (c.kv_lens[r] == 0) continue;
      for (int hits = any(0, 2); hits > 0; --hits) {
        const bool key = rng_.chance(0.6);
        const std::int32_t head = any(0, kv_heads - 1);
        const std::int32_t d = any(0, 7);
        // An fp8 cache holds no infinity: the largest number in its place would only make logits inexact.
        const float value = key && !is_fp8(c.kv_dtype) ? rng_.pick({kNan, kInfinity, -kInfinity}) : kNan;
        const std::int32_t first = any(0, c.kv_lens[r] - 1);
        const std::int32_t last = rng_.chance(0.3) ? any(first, c.kv_lens[r] - 1) : first;
        for (std::int32_t token = first; token <= last; ++token) {
          problem.spoil(key, static_cast<std::int32_t>(r), token, head, d, value);
        }
      }
    }
    if (problem.q().rows() > 0 && rng_.chance(0.1)) {
      problem.spoil_query(any(0, static_cast<std::int32_t>(problem.q().rows()) - 1), 0, 0,
                          rng_.pick({kNan, kInfinity, -kInfinity}));
    }
    expect_right(problem, rng_.chance(0.5) ? fixed_split(any(1, 40)) : WorkspaceOptions{});
  }
}

// Pages all alike: attention through a window at the end of 2^31 - 1 tokens is the same as after a few of those pages.
class FarPositions : public CpuExtremes {
 protected:
  static constexpr std::int32_t kPageSize = 4096;
  static constexpr std::int32_t kHeads = 4;
  static constexpr std::int32_t kDim = 8;

  struct Result {
    std::vector<float> out;
    std::vector<float> lse;
  };

  Result attend(Op op, std::int32_t kv_len, const AttentionParams& params, const std::vector<float>& slopes,
                const WorkspaceOptions& options) {
    const auto pages = static_cast<std::size_t>((std::int64_t{kv_len} + kPageSize - 1) / kPageSize);
    const std::vector<std::vector<std::int32_t>> indices{std::vector<std::int32_t>(pages, 0)};
    const std::vector<std::int32_t> lens{kv_len};
    const PageTable table = PageTable::from_pages(kPageSize, 1, indices, lens);
    const auto rows = static_cast<std::int32_t>(q_->rows());
    const std::int32_t qo_indptr[] = {0, rows};
    TestTensor out(kCpuDevice, DType::kFloat32, rows, kHeads, kDim, Spacing::kContiguous);
    Result result;
    result.lse.assign(static_cast<std::size_t>(rows * kHeads), kNan);
    const AttentionExtras extras{.alibi_slopes = slopes.empty() ? nullptr : slopes.data()};
    const auto workspace = make_workspace(kCpuDevice, options);
    const KvCache kv = cache_->device();
    float* lse = result.lse.data();
    if (op == Op::kDecode) workspace->decode(q_->device(), kv, table, params, out.device(), lse, extras);
    if (op == Op::kVerify) workspace->verify(q_->device(), rows, kv, table, params, out.device(), lse, extras);
    if (op == Op::kPrefill) workspace->prefill(q_->device(), qo_indptr, kv, table, params, out.device(), lse, extras);
    out.download();
    for (std::int32_t p = 0; p < rows; ++p) {
      for (std::int32_t h = 0; h < kHeads; ++h) {
        for (std::int32_t d = 0; d < kDim; ++d) result.out.push_back(out.at(p, h, d));
      }
    }
    return result;
  }

  void expect_as_near(Op op, std::int32_t rows, std::int32_t window, bool causal, bool alibi,
                      const WorkspaceOptions& options) {
    SCOPED_TRACE(testing::Message() << op << ", " << rows << " rows, window " << window << ", causal " << causal
                                    << ", alibi " << alibi << ", split " << options.plan.batch_invariant);
    q_.emplace(kCpuDevice, DType::kFloat32, rows, kHeads, kDim, Spacing::kContiguous);
    q_->fill_normal(rng_);
    const AttentionParams params{
        .num_qo_heads = kHeads, .num_kv_heads = 2, .head_dim_qk = kDim, .causal = causal, .window_left = window};
    const std::vector<float> slopes = alibi ? default_alibi_slopes(kHeads) : std::vector<float>();
    const std::int32_t near = kLastPosition % kPageSize + ((window + rows) / kPageSize + 1) * kPageSize;
    const Result far = attend(op, kLastPosition, params, slopes, options);
    const Result expected = attend(op, near, params, slopes, options);
    for (std::size_t i = 0; i < far.out.size(); ++i) ASSERT_NEAR(far.out[i], expected.out[i], 1e-5) << "element " << i;
    for (std::size_t i = 0; i < far.lse.size(); ++i) ASSERT_NEAR(far.lse[i], expected.lse[i], 1e-5) << "lse " << i;
  }

  PagedCache make_cache() {
    PagedCache cache(kCpuDevice,
                     {.dtype = DType::kFloat32,
                      .num_pages = 1,
                      .page_size = kPageSize,
                      .num_kv_heads = 2,
                      .head_dim_qk = kDim,
                      .head_dim_vo = kDim},
                     rng_);
    cache.fill(std::vector<std::int32_t>{0}, 0, kPageSize, rng_);
    cache.upload();
    return cache;
  }

  std::optional<PagedCache> cache_ = make_cache();
  std::optional<TestTensor> q_;
};

TEST_P(FarPositions, AreAsNearOnes) {
  for (const bool alibi : {false, true}) {
    for (const std::int32_t window : {100, 200, 9000}) {
      for (const WorkspaceOptions& options : {WorkspaceOptions{}, fixed_split(kPageSize)}) {
        expect_as_near(Op::kDecode, 1, window, true, alibi, options);
        expect_as_near(Op::kVerify, 5, window, true, alibi, options);
        expect_as_near(Op::kVerify, 40, window, true, alibi, options);
        expect_as_near(Op::kPrefill, 60, window, true, alibi, options);
        expect_as_near(Op::kPrefill, 60, window, false, alibi, options);
      }
    }
  }
}

TEST_P(CpuExtremes, SoftCapsOfAnySize) {
  for (const float cap : {1e-40F, 1e-20F, 1e-3F, 0.3F, 3.0F, 50.0F, 1e3F, 1e5F, 1e9F, 1e20F, 1e30F, 3e38F}) {
    for (const std::int32_t qo_len : {1, 40}) {
      for (const bool alibi : {false, true}) {
        Case c = fp32_case(Op::kPrefill, qo_len, 100);
        c.params.logits_soft_cap = cap;
        c.q_deviation = 4.0F;
        c.alibi = alibi;
        Problem problem(kCpuDevice, c, rng_);
        expect_right(problem);
      }
    }
  }
}

// Where logits are as large as floats, softmax picks the largest.
class LargestLogit : public CpuExtremes {
 protected:
  static constexpr std::int32_t kKeys = 20;
  static constexpr std::int32_t kDim = 8;

  /// Queries are ones, and key j is `step * j`: logits grow with j. Expects row p to be the value of key pick(p).
  template <class Pick>
  void expect_value_of(const Pick& pick, std::int32_t rows, float step, const AttentionParams& params,
                       const AttentionExtras& extras) {
    TestTensor q(kCpuDevice, DType::kFloat32, rows, 1, kDim, Spacing::kContiguous);
    TestTensor k(kCpuDevice, DType::kFloat32, kKeys, 1, kDim, Spacing::kContiguous);
    TestTensor v(kCpuDevice, DType::kFloat32, kKeys, 1, kDim, Spacing::kContiguous);
    TestTensor out(kCpuDevice, DType::kFloat32, rows, 1, kDim, Spacing::kContiguous);
    q.fill(1.0F);
    v.fill_normal(rng_);
    for (std::int32_t j = 0; j < kKeys; ++j) {
      for (std::int32_t d = 0; d < kDim; ++d) k.set(j, 0, d, step * static_cast<float>(j));
    }
    k.upload();
    const std::int32_t qo_indptr[] = {0, rows};
    const std::int32_t kv_indptr[] = {0, kKeys};
    make_workspace(kCpuDevice)
        ->ragged_prefill(q.device(), qo_indptr, k.device(), v.device(), kv_indptr, params, out.device(), nullptr,
                         extras);
    out.download();
    for (std::int32_t p = 0; p < rows; ++p) {
      for (std::int32_t d = 0; d < kDim; ++d) EXPECT_EQ(out.at(p, 0, d), v.at(pick(p), 0, d)) << "row " << p;
    }
  }

  static AttentionParams params(float sm_scale) {
    return {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim_qk = kDim, .sm_scale = sm_scale};
  }
};

TEST_P(LargestLogit, OfTheLargestScale) {
  for (const std::int32_t rows : {1, kKeys}) {
    expect_value_of([rows](std::int32_t p) { return kKeys - rows + p; }, rows, 1.0F, params(1e30F), {});
  }
}

TEST_P(LargestLogit, OfSteepSlopes) {
  for (const std::int32_t rows : {1, kKeys}) {
    for (const float cap : {0.0F, 50.0F}) {
      for (const float slope : {3e38F, 1e30F}) {
        AttentionParams capped = params(1.0F);
        capped.logits_soft_cap = cap;
        // The cap takes even an infinite distance back to -50, beside 0 for the row's own key.
        expect_value_of([rows](std::int32_t p) { return kKeys - rows + p; }, rows, 0.0F, capped,
                        {.alibi_slopes = &slope});
      }
    }
    const float falling = -1e30F;
    expect_value_of([](std::int32_t) { return 0; }, rows, 1.0F, params(1.0F), {.alibi_slopes = &falling});
  }
}

// A sink may outweigh everything.
TEST_P(CpuExtremes, LargestSink) {
  constexpr std::int32_t kHeads = 2;
  for (const std::int32_t rows : {1, 40}) {
    for (const WorkspaceOptions& options : {WorkspaceOptions{}, fixed_split(16)}) {
      TestTensor q(kCpuDevice, DType::kFloat32, rows, kHeads, 8, Spacing::kContiguous);
      TestTensor k(kCpuDevice, DType::kFloat32, 50, kHeads, 8, Spacing::kContiguous);
      TestTensor out(kCpuDevice, DType::kFloat32, rows, kHeads, 8, Spacing::kContiguous);
      q.fill_normal(rng_);
      k.fill_normal(rng_);
      const float sinks[kHeads] = {3e38F, 1e9F};
      std::vector<float> lse(static_cast<std::size_t>(rows * kHeads), kNan);
      const std::int32_t qo_indptr[] = {0, rows};
      const std::int32_t kv_indptr[] = {0, 50};
      const AttentionParams params{.num_qo_heads = kHeads, .num_kv_heads = kHeads, .head_dim_qk = 8};
      make_workspace(kCpuDevice, options)
          ->ragged_prefill(q.device(), qo_indptr, k.device(), k.device(), kv_indptr, params, out.device(), lse.data(),
                           {.sinks = sinks});
      out.download();
      for (std::int32_t p = 0; p < rows; ++p) {
        for (std::int32_t h = 0; h < kHeads; ++h) {
          EXPECT_EQ(out.at(p, h, 4), 0.0F) << "row " << p << ", head " << h;
          EXPECT_EQ(lse[static_cast<std::size_t>(p * kHeads + h)], sinks[h]) << "row " << p << ", head " << h;
        }
      }
    }
  }
}

std::string target_name(const testing::TestParamInfo<std::int64_t>& info) { return hwy::TargetName(info.param); }

INSTANTIATE_TEST_SUITE_P(Targets, CpuExtremes, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), target_name);
INSTANTIATE_TEST_SUITE_P(Targets, FarPositions, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), target_name);
INSTANTIATE_TEST_SUITE_P(Targets, LargestLogit, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()), target_name);

}  // namespace
}  // namespace fiw::test
