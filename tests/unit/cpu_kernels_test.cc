// The CPU kernels on every SIMD target of this machine, not only the best one: element conversions bit by bit, and
// whole attention calls.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "unit/cpu_kernels_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include "cpu/simd-inl.h"
#include "cpu/translate-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

std::int64_t target() { return HWY_TARGET; }

void load_elements(DType dtype, const void* from, std::int64_t count, float* to) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto* codes = static_cast<const typename Element::Raw*>(from);
    const Wide d;
    for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      hn::StoreU(load<Element>(d, codes + i), d, to + i);
    }
  });
}

void store_elements(DType dtype, bool saturate, const float* from, std::int64_t count, void* to) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    auto* codes = static_cast<typename Element::Raw*>(to);
    const Wide d;
    for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
      const auto value = hn::LoadU(d, from + i);
      if (saturate) {
        store<Element, Overflow::kSaturate>(d, value, codes + i);
      } else {
        store<Element>(d, value, codes + i);
      }
    }
  });
}

void translate_codes(bool e4m3, const std::uint8_t* from, std::int32_t count, std::uint16_t* to) {
  if (e4m3) {
    translate_row<E4M3>(from, count, to);
  } else {
    translate_row<E5M2>(from, count, to);
  }
}

void exponentials(const float* from, std::int64_t count, float* powers, float* tangents) {
  const Wide d;
  for (std::int64_t i = 0; i < count; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto x = hn::LoadU(d, from + i);
    hn::StoreU(exp2_nonpositive(d, x), d, powers + i);
    hn::StoreU(tanh(d, x), d, tangents + i);
  }
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>
#include <omp.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <vector>

#include "core/numeric.h"
#include "hwy/targets.h"
#include "support/problem.h"

namespace fiw::cpu {

HWY_EXPORT(target);
HWY_EXPORT(load_elements);
HWY_EXPORT(store_elements);
HWY_EXPORT(translate_codes);
HWY_EXPORT(exponentials);

// With one target, the macro takes no qualified name.
namespace {
auto chosen_target() { return HWY_DYNAMIC_DISPATCH(target); }
auto chosen_load_elements() { return HWY_DYNAMIC_DISPATCH(load_elements); }
auto chosen_store_elements() { return HWY_DYNAMIC_DISPATCH(store_elements); }
auto chosen_translate_codes() { return HWY_DYNAMIC_DISPATCH(translate_codes); }
auto chosen_exponentials() { return HWY_DYNAMIC_DISPATCH(exponentials); }
}  // namespace

}  // namespace fiw::cpu

namespace fiw::test {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                               DType::kFloat8E5M2};
constexpr DType kActivations[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CpuKernels : public testing::TestWithParam<std::int64_t>, public Seeded {
 protected:
  CpuKernels() { hwy::SetSupportedTargetsForTest(GetParam()); }
  ~CpuKernels() override { hwy::SetSupportedTargetsForTest(0); }

  std::int32_t any(std::int32_t lo, std::int32_t hi) { return rng_.uniform(lo, hi); }

  void expect_right(const Case& c, const WorkspaceOptions& options = {}) {
    const auto workspace = make_workspace(kCpuDevice, options);
    Problem problem(kCpuDevice, c, rng_);
    ASSERT_NO_THROW(problem.call(*workspace)) << c;
    EXPECT_TRUE(problem.check()) << hwy::TargetName(GetParam());
  }
};

// Every code of a type, in memory.
std::vector<std::byte> all_codes(DType dtype) {
  const std::size_t codes = size_of(dtype) == 1 ? 256 : 65536;
  std::vector<std::byte> bytes(codes * size_of(dtype));
  for (std::size_t code = 0; code < codes; ++code) std::memcpy(&bytes[code * size_of(dtype)], &code, size_of(dtype));
  return bytes;
}

// Floats of every sign, exponent and leading fraction, with tails around each tie.
std::vector<float> telling_floats() {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    for (const std::uint32_t tail : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      values.push_back(std::bit_cast<float>(upper << 16 | tail));
    }
  }
  while (values.size() % 16 != 0) values.push_back(0.0F);
  return values;
}

TEST_P(CpuKernels, RunOnTheTargetAskedFor) { EXPECT_EQ(cpu::chosen_target()(), GetParam()); }

TEST_P(CpuKernels, LoadEveryCode) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const std::vector<std::byte> codes = all_codes(dtype);
    const auto count = static_cast<std::int64_t>(codes.size() / size_of(dtype));
    std::vector<float> values(static_cast<std::size_t>(count), 7.0F);
    cpu::chosen_load_elements()(dtype, codes.data(), count, values.data());
    for (std::int64_t code = 0; code < count; ++code) {
      const float expected = load_float(codes.data(), dtype, code);
      const float actual = values[static_cast<std::size_t>(code)];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(actual)) << to_string(dtype) << " code " << code << " gave " << actual;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
            << to_string(dtype) << " code " << code << " gave " << actual << ", expected " << expected;
      }
    }
  }
}

// Rows of whole vectors, of blocks of 16, and what is left.
TEST_P(CpuKernels, TranslateEveryCode) {
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const std::vector<std::byte> codes = all_codes(dtype);
    for (std::int32_t begin = 0; begin < 256; begin += 8) {
      for (std::int32_t count = 0; count <= std::min(256 - begin, 104); count += 8) {
        constexpr std::uint16_t kUntouched = 0x5A5A;
        std::vector<std::uint16_t> bfloats(static_cast<std::size_t>(count) + 1, kUntouched);
        cpu::chosen_translate_codes()(dtype == DType::kFloat8E4M3,
                                      reinterpret_cast<const std::uint8_t*>(codes.data()) + begin, count,
                                      bfloats.data());
        for (std::int32_t i = 0; i < count; ++i) {
          const float exact = load_float(codes.data(), dtype, begin + i);
          const auto got = std::bit_cast<float>(std::uint32_t{bfloats[static_cast<std::size_t>(i)]} << 16);
          if (std::isnan(exact)) {
            ASSERT_TRUE(std::isnan(got)) << to_string(dtype) << " code " << begin + i;
          } else {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(exact))
                << to_string(dtype) << " code " << begin + i << ", " << got << " instead of " << exact;
          }
        }
        ASSERT_EQ(bfloats.back(), kUntouched) << "after " << count;
      }
    }
  }
}

TEST_P(CpuKernels, StoreRoundsAndSaturates) {
  const std::vector<float> values = telling_floats();
  const auto count = static_cast<std::int64_t>(values.size());
  for (const DType dtype : kAllTypes) {
    for (const bool saturate : {false, true}) {
      std::vector<std::byte> actual(values.size() * size_of(dtype), std::byte{0x5A});
      std::vector<std::byte> expected(actual.size());
      cpu::chosen_store_elements()(dtype, saturate, values.data(), count, actual.data());
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = values[static_cast<std::size_t>(i)];
        saturate ? store_saturated(expected.data(), dtype, i, value) : store_float(expected.data(), dtype, i, value);
        const std::size_t at = static_cast<std::size_t>(i) * size_of(dtype);
        ASSERT_EQ(std::memcmp(&actual[at], &expected[at], size_of(dtype)), 0)
            << value << " (bits " << std::bit_cast<std::uint32_t>(value) << ") to " << to_string(dtype) << ", saturate "
            << saturate << ": " << load_float(actual.data(), dtype, i) << ", expected "
            << load_float(expected.data(), dtype, i);
      }
    }
  }
}

TEST_P(CpuKernels, Exponentials) {
  std::vector<float> x = {0.0F, -0.0F, -0.5F, -126.0F, -126.5F, -1e9F, -kInfinity, std::nanf("1")};
  for (float tiny = -1.0F; tiny != 0.0F; tiny *= 0.4F) x.push_back(tiny);
  while (x.size() < 1 << 16) x.push_back(-std::abs(rng_.normal()) * (rng_.chance(0.5) ? 1.0F : 40.0F));
  std::vector<float> powers(x.size());
  std::vector<float> tangents(x.size());
  cpu::chosen_exponentials()(x.data(), static_cast<std::int64_t>(x.size()), powers.data(), tangents.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      EXPECT_TRUE(std::isnan(powers[i]) && std::isnan(tangents[i]));
      continue;
    }
    const double power = x[i] < -126.0F ? 0.0 : std::exp2(static_cast<double>(x[i]));
    EXPECT_NEAR(powers[i], power, 5e-7 * power) << "2^" << x[i];
    // Relative: a soft cap far above the logits multiplies the tangents of tiny numbers.
    const double tangent = std::tanh(static_cast<double>(x[i]));
    const double rounding = std::numeric_limits<float>::denorm_min();
    EXPECT_NEAR(tangents[i], tangent, 1e-6 * std::abs(tangent) + rounding) << "tanh " << x[i];
  }
  EXPECT_EQ(powers[0], 1.0F);
}

// Both kernels, their edges in rows, keys and dims, each option, alone and together.
TEST_P(CpuKernels, RandomAttention) {
  constexpr CacheLayout kSplitLayouts[] = {CacheLayout::kNhd, CacheLayout::kHnd, CacheLayout::kPadded};
  for (int round = 0; round < rounds(60) && !HasFailure(); ++round) {
    Case c{.op = rng_.pick({Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged})};
    const std::int32_t kv_heads = any(1, 4);
    c.params = {.num_qo_heads = kv_heads * rng_.pick({1, 2, 3, 4, 5, 6, 7, 8, 16, 32}),
                .num_kv_heads = kv_heads,
                .head_dim_qk = 8 * any(1, 20),
                .causal = rng_.chance(0.7),
                .window_left = rng_.chance(0.3) ? any(0, 90) : -1,
                .logits_soft_cap = rng_.chance(0.3) ? 5.0F : 0.0F};
    c.params.head_dim_vo = rng_.chance(0.3) ? 8 * any(1, 20) : 0;
    c.q_dtype = rng_.pick(kActivations);
    c.kv_dtype = c.op == Op::kRagged ? rng_.pick(kActivations) : rng_.pick(kAllTypes);
    c.page_size = any(1, 40);
    c.layout = rng_.pick(kSplitLayouts);
    c.spacing = rng_.chance(0.5) ? Spacing::kStrided : Spacing::kContiguous;
    c.sinks = rng_.chance(0.3);
    c.alibi = rng_.chance(0.3);
    c.mask = c.op != Op::kDecode && rng_.chance(0.4);
    if (c.op != Op::kRagged) {
      c.k_scale = rng_.chance(0.5) ? 0.5F : 1.0F;
      c.head_scales = rng_.chance(0.3);
    }
    const std::int32_t window = any(2, 9);
    for (std::int32_t r = any(1, 5); r > 0; --r) {
      c.qo_lens.push_back(c.op == Op::kDecode ? 1 : c.op == Op::kVerify ? window : any(0, 80));
      c.kv_lens.push_back(rng_.chance(0.15) ? any(0, 3) : any(1, 400));
    }
    WorkspaceOptions options{.num_threads = any(1, 3)};
    options.plan.batch_invariant = rng_.chance(0.5);
    options.plan.fixed_split_tokens = any(1, 100);
    expect_right(c, options);
  }
}

TEST_P(CpuKernels, LargeHeadDims) {
  for (const auto& [qk, vo] : {std::pair{576, 512}, {192, 128}, {8, 576}, {264, 8}}) {
    for (const std::int32_t qo_len : {1, 2, 37}) {
      Case c{.op = Op::kPrefill};
      c.params = {.num_qo_heads = 6, .num_kv_heads = 2, .head_dim_qk = qk, .head_dim_vo = vo};
      c.qo_lens = {qo_len, qo_len};
      c.kv_lens = {260, qo_len};
      expect_right(c);
    }
  }
}

// A request gives the same bits alone and in company, on one thread and on several.
TEST_P(CpuKernels, BatchInvariantBits) {
  for (const Op op : {Op::kDecode, Op::kVerify, Op::kPrefill}) {
    Case c{.op = op};
    c.params = {.num_qo_heads = 12, .num_kv_heads = 2, .head_dim_qk = 64};
    const std::int32_t qo_len = op == Op::kDecode ? 1 : op == Op::kVerify ? 3 : 50;
    c.qo_lens = {qo_len, qo_len, qo_len};
    c.kv_lens = {700, 60, 333};
    Problem problem(kCpuDevice, c, rng_);
    WorkspaceOptions options{.num_threads = 1};
    options.plan = {.batch_invariant = true, .fixed_split_tokens = 128};
    problem.call(*make_workspace(kCpuDevice, options));
    ASSERT_TRUE(problem.check());
    std::vector<float> together;
    const auto flatten = [&](std::int64_t first, std::int64_t rows) {
      std::vector<float> values;
      problem.out().download();
      for (std::int64_t row = first; row < first + rows; ++row) {
        for (std::int64_t h = 0; h < 12; ++h) {
          for (std::int64_t d = 0; d < 64; ++d) values.push_back(problem.out().at(row, h, d));
        }
      }
      return values;
    };
    const std::vector<float> expected = flatten(0, 3 * qo_len);

    options.num_threads = 3;
    const auto workspace = make_workspace(kCpuDevice, options);
    problem.call(*workspace);
    EXPECT_EQ(flatten(0, 3 * qo_len), expected) << op << ", three threads";

    for (std::int32_t r = 0; r < 3; ++r) {
      const PageTable& table = problem.table();
      const auto pages = table.indices().subspan(static_cast<std::size_t>(table.indptr()[r]),
                                                 static_cast<std::size_t>(table.page_counts()[r]));
      const std::int32_t indptr[] = {0, table.page_counts()[r]};
      const std::int32_t last[] = {table.last_page_len()[r]};
      const PageTable alone = PageTable::from_csr(table.page_size(), table.num_pages(), indptr, pages, last);
      ConstTensor q = problem.q().device();
      Tensor out = problem.out().device();
      q.rows = out.rows = qo_len;
      q.data = static_cast<const std::uint16_t*>(q.data) + r * qo_len * q.row_stride;
      out.data = static_cast<std::uint16_t*>(out.data) + r * qo_len * out.row_stride;
      problem.out().poison();
      const std::int32_t qo_indptr[] = {0, qo_len};
      if (op == Op::kDecode) workspace->decode(q, problem.cache().device(), alone, c.params, out);
      if (op == Op::kVerify) workspace->verify(q, qo_len, problem.cache().device(), alone, c.params, out);
      if (op == Op::kPrefill) workspace->prefill(q, qo_indptr, problem.cache().device(), alone, c.params, out);
      const auto begin = expected.begin() + std::int64_t{r} * qo_len * 12 * 64;
      EXPECT_EQ(flatten(std::int64_t{r} * qo_len, qo_len),
                std::vector<float>(begin, begin + std::int64_t{qo_len} * 12 * 64))
          << op << ", request " << r << " alone";
    }
  }
}

// NaN in a key or value reaches exactly the rows that see it.
TEST_P(CpuKernels, NanReachesThoseWhoSeeIt) {
  for (const bool in_value : {false, true}) {
    for (const std::int32_t qo_len : {6, 60}) {  // either kernel
      constexpr std::int32_t kHeads = 3;
      constexpr std::int32_t kDim = 40;
      const std::int32_t kv_len = qo_len + 100;
      const std::int32_t hit = kv_len - qo_len / 2;  // rows before it, in time, do not see it
      TestTensor q(kCpuDevice, DType::kFloat32, qo_len, kHeads, kDim, Spacing::kContiguous);
      TestTensor k(kCpuDevice, DType::kFloat32, kv_len, 1, kDim, Spacing::kContiguous);
      TestTensor v(kCpuDevice, DType::kFloat32, kv_len, 1, kDim, Spacing::kContiguous);
      TestTensor out(kCpuDevice, DType::kFloat32, qo_len, kHeads, kDim, Spacing::kContiguous);
      for (TestTensor* tensor : {&q, &k, &v}) tensor->fill_normal(rng_);
      TestTensor& bad = in_value ? v : k;
      bad.set(hit, 0, 5, std::numeric_limits<float>::quiet_NaN());
      bad.upload();
      const std::int32_t qo_indptr[] = {0, qo_len};
      const std::int32_t kv_indptr[] = {0, kv_len};
      const AttentionParams params{.num_qo_heads = kHeads, .num_kv_heads = 1, .head_dim_qk = kDim};
      make_workspace(kCpuDevice)
          ->ragged_prefill(q.device(), qo_indptr, k.device(), v.device(), kv_indptr, params, out.device());
      out.download();
      for (std::int32_t p = 0; p < qo_len; ++p) {
        const bool sees = hit <= kv_len - qo_len + p;
        EXPECT_EQ(std::isnan(out.at(p, 1, 5)), sees) << "row " << p << ", in a value " << in_value;
        EXPECT_EQ(std::isnan(out.at(p, 1, 6)), sees && !in_value) << "row " << p << ", in a value " << in_value;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, CpuKernels, testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

}  // namespace
}  // namespace fiw::test
#endif  // HWY_ONCE
