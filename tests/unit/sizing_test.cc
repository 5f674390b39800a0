// required_workspace suffices for calls smaller than the limits, which may take a kernel that needs more.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "fiw/workspace.h"

namespace fiw {
namespace {

PageTable table_of(std::int32_t batch, std::int32_t kv_len, std::int32_t page_size) {
  const std::int32_t pages = (kv_len + page_size - 1) / page_size;
  std::vector<std::int32_t> one(static_cast<std::size_t>(pages));
  std::iota(one.begin(), one.end(), 0);
  const std::vector<std::vector<std::int32_t>> all(static_cast<std::size_t>(batch), one);
  return PageTable::from_pages(page_size, pages, all,
                               std::vector<std::int32_t>(static_cast<std::size_t>(batch), kv_len));
}

TEST(Sizing, EveryVerifyWindowUpToTheLargestFits) {
  const AttentionParams params{.num_qo_heads = 32, .num_kv_heads = 32, .head_dim_qk = 128};
  const WorkspaceLimits limits{
      .params = params, .max_batch = 2, .max_verify_window = 64, .max_kv_len = 100, .kv_dtype = DType::kFloat32};
  const auto workspace =
      FlashInferWorkspace::create(kCpuDevice, {.fixed_size = true, .limits = limits, .num_threads = 2});
  const PageTable table = table_of(2, 100, limits.page_size);
  const StepSpec spec{.params = params, .q_dtype = DType::kFloat32, .kv_dtype = DType::kFloat32};
  for (std::int32_t window = 1; window <= 64; ++window) {
    EXPECT_NO_THROW(workspace->plan_verify(window, table, spec)) << "window " << window;
  }
}

TEST(Sizing, BatchInvariantPrefillsFit) {
  const AttentionParams params{.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64};
  const WorkspaceLimits limits{
      .params = params, .max_batch = 1, .max_total_qo = 4, .max_kv_len = 100, .kv_dtype = DType::kFloat32};
  const auto workspace = FlashInferWorkspace::create(
      kCpuDevice, {.fixed_size = true, .limits = limits, .num_threads = 2, .plan = {.batch_invariant = true}});
  const PageTable table = table_of(1, 100, limits.page_size);
  const StepSpec spec{.params = params, .q_dtype = DType::kFloat32, .kv_dtype = DType::kFloat32};
  for (std::int32_t rows = 1; rows <= 4; ++rows) {
    EXPECT_NO_THROW(workspace->plan_prefill(std::vector<std::int32_t>{0, rows}, table, spec)) << rows << " rows";
  }
}

/// Every combination of absurd limits is either a size that a pointer difference holds, or refused for its size.
TEST(Sizing, AbsurdLimitsNeverWrap) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int32_t sizes[] = {1, 1 << 20, kMost};
  int refused = 0;
  for (const DeviceProps& device : {DeviceProps::cpu(1), DeviceProps::cpu(4096), DeviceProps::h200()}) {
    for (const std::int32_t heads : sizes) {
      for (const std::int32_t batch : sizes) {
        for (const std::int32_t rows : {0, 1 << 20, kMost}) {
          for (const std::int32_t kv_len : sizes) {
            for (const std::int32_t page_size : {1, kMost}) {
              for (const std::int32_t split : {0, 1, kMost}) {
                WorkspaceLimits limits{.params = {.num_qo_heads = heads, .num_kv_heads = heads, .head_dim_qk = 576},
                                       .max_batch = batch,
                                       .max_total_qo = rows,
                                       .max_verify_window = rows == 0 ? 0 : 64,
                                       .max_kv_len = kv_len,
                                       .page_size = page_size,
                                       .graph = split == 0};
                const PlanOptions options{.batch_invariant = split > 0, .fixed_split_tokens = split};
                try {
                  const std::size_t bytes = FlashInferWorkspace::required_workspace(device, limits, options);
                  ASSERT_LE(bytes, std::size_t{1} << 63);
                  // At the least one partial output for each row of a batch that is always split.
                  if (split == 1) {
                    ASSERT_GE(static_cast<double>(bytes), 4.0 * 576 * batch * static_cast<double>(heads));
                  }
                } catch (const Error& error) {
                  ASSERT_EQ(error.reason(), Reason::kSizeOverflow) << error.what();
                  ++refused;
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(Sizing, CountsTheCopyThatLongPrefillsAreReadFromOnHopper) {
  constexpr std::size_t kMost = std::size_t{4} << 30;
  WorkspaceLimits limits{.params = {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim_qk = 192, .head_dim_vo = 128},
                         .max_batch = 3,
                         .max_total_qo = 2000,
                         .max_kv_len = 5000,
                         .kv_dtype = DType::kFloat8E4M3};
  const auto required = [&](const DeviceProps& device, const PlanOptions& options = {}) {
    return FlashInferWorkspace::required_workspace(device, limits, options);
  };
  DeviceProps ampere = DeviceProps::h200();
  ampere.compute_capability = 80;
  const std::size_t token = std::size_t{8} * (192 + 128) * 2;  // in the type of the queries, whatever the cache's is
  EXPECT_EQ(required(DeviceProps::h200()), std::max(required(ampere), 3 * 5000 * token));
  EXPECT_GT(required(DeviceProps::h200()), required(ampere));
  limits.max_kv_len = 1 << 20;
  EXPECT_EQ(required(DeviceProps::h200()), std::max(required(ampere), kMost / token * token));
  const PlanOptions invariant{.batch_invariant = true};
  EXPECT_EQ(required(DeviceProps::h200(), invariant), required(ampere, invariant));
  limits.max_total_qo = 0;
  EXPECT_EQ(required(DeviceProps::h200()), required(ampere));
}

TEST(Sizing, RefusesWhatCreateRefuses) {
  const WorkspaceLimits good{
      .params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64}, .max_batch = 4, .max_kv_len = 100};
  const auto reason = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.reason();
    }
    return Reason::kNone;
  };
  const auto both = [&](const WorkspaceLimits& limits, const PlanOptions& plan, std::int32_t threads, Reason expected) {
    EXPECT_EQ(reason([&] { FlashInferWorkspace::required_workspace(DeviceProps::cpu(threads), limits, plan); }),
              expected);
    EXPECT_EQ(reason([&] {
                FlashInferWorkspace::create(kCpuDevice, {.limits = limits, .num_threads = threads, .plan = plan});
              }),
              expected);
  };
  both(good, {}, 2, Reason::kNone);
  both(good, {.fixed_split_tokens = 0}, 2, Reason::kNone);  // of no meaning unless batch_invariant
  for (const std::int32_t tokens : {0, -1}) {
    both(good, {.batch_invariant = true, .fixed_split_tokens = tokens}, 2, Reason::kOptions);
  }
  both(good, {.batch_invariant = true, .fixed_split_tokens = std::numeric_limits<std::int32_t>::max()}, 2,
       Reason::kNone);
  both(good, {}, 4097, Reason::kOptions);
  both(good, {}, -1, Reason::kOptions);
  WorkspaceLimits bad = good;
  bad.page_size = 0;
  both(bad, {}, 2, Reason::kOptions);
  bad = good;
  bad.max_verify_window = 65;
  both(bad, {}, 2, Reason::kOptions);
}

TEST(Sizing, TheLongestFixedSplitPlans) {
  const AttentionParams params{.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64};
  const auto workspace = FlashInferWorkspace::create(
      kCpuDevice, {.num_threads = 2,
                   .plan = {.batch_invariant = true, .fixed_split_tokens = std::numeric_limits<std::int32_t>::max()}});
  const StepSpec spec{.params = params, .q_dtype = DType::kFloat32, .kv_dtype = DType::kFloat32};
  for (const std::int32_t page_size : {1, 7, 16}) {
    EXPECT_NO_THROW(workspace->plan_decode(table_of(2, 100, page_size), spec)) << page_size;
  }
}

// A call without query rows launches nothing, so it fits whatever the limits left out.
TEST(Sizing, CallsWithoutRowsNeedNothing) {
  const AttentionParams params{.num_qo_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64};
  const StepSpec spec{.params = params, .q_dtype = DType::kFloat32, .kv_dtype = DType::kFloat32};
  const WorkspaceLimits none{.params = params, .max_batch = 0, .max_kv_len = 64, .kv_dtype = DType::kFloat32};
  const auto idle = FlashInferWorkspace::create(kCpuDevice, {.fixed_size = true, .limits = none, .num_threads = 2});
  EXPECT_NO_THROW(idle->plan_decode(table_of(0, 1, none.page_size), spec));

  WorkspaceLimits decode_only = none;
  decode_only.max_batch = 2;
  const auto invariant = FlashInferWorkspace::create(
      kCpuDevice, {.fixed_size = true, .limits = decode_only, .num_threads = 2, .plan = {.batch_invariant = true}});
  const PageTable table = table_of(2, 40, decode_only.page_size);
  EXPECT_NO_THROW(invariant->plan_prefill(std::vector<std::int32_t>{0, 0, 0}, table, spec));
  EXPECT_NO_THROW(invariant->plan_decode(table, spec));
}

TEST(Sizing, ARefusedPlanCountsNothing) {
  const AttentionParams params{.num_qo_heads = 64, .num_kv_heads = 1, .head_dim_qk = 64};
  const auto workspace = FlashInferWorkspace::create(
      kCpuDevice, {.num_threads = 2, .plan = {.batch_invariant = true, .fixed_split_tokens = 1}});
  const StepSpec spec{.params = params, .q_dtype = DType::kFloat32, .kv_dtype = DType::kFloat32};
  const std::vector<std::vector<std::int32_t>> pages = {std::vector<std::int32_t>(40'000'000, 0)};
  const PageTable table = PageTable::from_pages(1, 1, pages, std::vector<std::int32_t>{40'000'000});
  EXPECT_THROW(workspace->plan_verify(64, table, spec), Error);
  EXPECT_EQ(workspace->stats().plan_nanoseconds, 0U);
  EXPECT_EQ(workspace->stats().verify.misses, 0U);
}

}  // namespace
}  // namespace fiw
