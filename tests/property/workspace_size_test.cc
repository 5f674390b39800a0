// required_workspace: a fixed workspace of that size is enough for any call within its limits.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "property/random_case.h"

namespace fiw::test {
namespace {

class WorkspaceSize : public testing::TestWithParam<int>, public Seeded {
 protected:
  WorkspaceLimits random_limits() {
    WorkspaceLimits limits;
    limits.params.num_kv_heads = rng_.uniform(1, 4);
    limits.params.num_qo_heads = limits.params.num_kv_heads * rng_.uniform(1, 8);
    limits.params.head_dim_qk = 8 * rng_.uniform(1, 20);
    limits.params.head_dim_vo = 8 * rng_.uniform(1, 20);
    limits.max_batch = rng_.uniform(1, 20);
    limits.max_total_qo = rng_.chance(0.7) ? rng_.uniform(1, 200) : 0;
    limits.max_verify_window = rng_.chance(0.7) ? rng_.uniform(1, 8) : 0;
    limits.max_kv_len = rng_.pick({16, 300, 3000, 20000});
    limits.page_size = rng_.pick({1, 3, 16, 128});
    limits.kv_dtype = rng_.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3});
    return limits;
  }

  /// Prefills so long that a Hopper device copies their K and V together.
  WorkspaceLimits long_limits() {
    WorkspaceLimits limits = random_limits();
    limits.params.num_qo_heads = 8 * limits.params.num_kv_heads;
    limits.params.head_dim_qk = limits.params.head_dim_vo = 128;
    limits.max_batch = rng_.uniform(1, 4);
    limits.max_total_qo = rng_.uniform(2000, 6000);
    limits.max_kv_len = 6000;
    return limits;
  }

  /// Plans random work within the limits: every call reserves its scratch when it is planned.
  void plan_within(FlashInferWorkspace& workspace, const WorkspaceLimits& limits) {
    const std::int32_t batch = rng_.chance(0.3) ? limits.max_batch : rng_.uniform(0, limits.max_batch);
    std::vector<std::vector<std::int32_t>> pages;
    std::vector<std::int32_t> kv_lens;
    std::vector<std::int32_t> qo_indptr{0};
    for (std::int32_t r = 0; r < batch; ++r) {
      kv_lens.push_back(rng_.chance(0.3) ? limits.max_kv_len : rng_.uniform(0, limits.max_kv_len));
      pages.emplace_back(static_cast<std::size_t>((kv_lens.back() + limits.page_size - 1) / limits.page_size), 0);
      const std::int32_t left = limits.max_total_qo - qo_indptr.back();
      qo_indptr.push_back(qo_indptr.back() + rng_.pick({0, std::min(1, left), left / 2, left}));
    }
    const PageTable table = PageTable::from_pages(limits.page_size, 1, pages, kv_lens);
    StepSpec spec{.params = limits.params, .kv_dtype = limits.kv_dtype, .lse = rng_.chance(0.5)};
    spec.params.causal = rng_.chance(0.7);
    if (rng_.chance(0.3)) spec.params.window_left = rng_.uniform(0, limits.max_kv_len);
    spec.sinks = rng_.chance(0.2);
    spec.custom_mask = rng_.chance(0.2);
    workspace.plan_decode(table, spec);
    if (limits.max_total_qo > 0) workspace.plan_prefill(qo_indptr, table, spec);
    if (limits.max_verify_window > 0) workspace.plan_verify(rng_.uniform(1, limits.max_verify_window), table, spec);
  }
};

TEST_P(WorkspaceSize, SufficesForAnyCallWithinTheLimits) {
  for (int i = 0; i < 60; ++i) {
    const WorkspaceLimits limits = i % 4 == 0 ? long_limits() : random_limits();
    // A workspace that may grow shows what it would have liked to have.
    WorkspaceOptions options{.fixed_size = rng_.chance(0.5), .limits = limits, .num_threads = rng_.pick({1, 2, 7})};
    options.plan.batch_invariant = rng_.chance(0.3);
    options.plan.fixed_split_tokens = rng_.pick({16, 64, 500});
    const DeviceProps device = make_workspace(GetParam(), {.num_threads = options.num_threads})->device_props();
    const std::size_t required = FlashInferWorkspace::required_workspace(device, limits, options.plan);
    if (required > std::size_t{8} << 30) continue;  // more than a machine that runs tests may have
    const auto workspace = make_workspace(GetParam(), options);
    for (int call = 0; call < 20; ++call) {
      try {
        plan_within(*workspace, limits);
      } catch (const Error& error) {
        // FlashInfer's kernels reckon offsets in 32 bits, which may reach less far than the workspace does.
        ASSERT_TRUE(GetParam() != kCpuDevice && error.reason() == Reason::kSizeOverflow)
            << error.what() << "\n"
            << "heads " << limits.params.num_qo_heads << "/" << limits.params.num_kv_heads << ", head dims "
            << limits.params.head_dim_qk << "/" << limits.params.head_dim_vo << ", max_batch " << limits.max_batch
            << ", max_total_qo " << limits.max_total_qo << ", max_verify_window " << limits.max_verify_window
            << ", max_kv_len " << limits.max_kv_len << ", page_size " << limits.page_size << ", threads "
            << options.num_threads << ", batch-invariant " << options.plan.batch_invariant << " at "
            << options.plan.fixed_split_tokens << ", workspace of " << required << " bytes";
      }
    }
    EXPECT_LE(workspace->stats().float_scratch_peak, required);
    EXPECT_LE(workspace->stats().float_scratch_bytes, required);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, WorkspaceSize, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
