// required_workspace suffices for calls smaller than the limits, which may take a kernel that needs more.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace fiw
