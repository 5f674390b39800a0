// The plan cache on its own: full comparison behind equal hashes, least recently used goes first, objects are reused.
#include "core/plan_cache.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace fiw {
namespace {

using Ints = std::vector<std::int32_t>;

std::shared_ptr<detail::Plan> enter(PlanCache& cache, const PlanKeyView& key) {
  std::shared_ptr<detail::Plan> plan = cache.blank();
  plan->set_key(key);
  cache.insert(plan);
  return plan;
}

PlanKeyView base_key(const Ints& counts) {
  PlanKeyView key;
  key.traits.spec.params = {
      .num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_vo = 64, .sm_scale = 0.125F};
  key.traits.page_size = 16;
  key.kv_counts = counts;
  return key;
}

TEST(PlanCache, EveryFieldIsPartOfTheKeyEvenWhenHashesCollide) {
  const Ints counts{3, 1};
  const std::vector<std::function<void(PlanKeyView&)>> changes{
      [](PlanKeyView& k) { k.traits.kind = PlanKind::kVerify; },
      [](PlanKeyView& k) { k.traits.family = KernelFamily::kCpuTile; },
      [](PlanKeyView& k) { k.traits.spec.params.num_qo_heads = 4; },
      [](PlanKeyView& k) { k.traits.spec.params.num_kv_heads = 4; },
      [](PlanKeyView& k) { k.traits.spec.params.head_dim_qk = 128; },
      [](PlanKeyView& k) { k.traits.spec.params.head_dim_vo = 128; },
      [](PlanKeyView& k) { k.traits.spec.params.sm_scale = 0.375F; },
      [](PlanKeyView& k) { k.traits.spec.params.causal = false; },
      [](PlanKeyView& k) { k.traits.spec.params.window_left = 7; },
      [](PlanKeyView& k) { k.traits.spec.params.logits_soft_cap = 50; },
      [](PlanKeyView& k) { k.traits.spec.q_dtype = DType::kFloat16; },
      [](PlanKeyView& k) { k.traits.spec.kv_dtype = DType::kFloat16; },
      [](PlanKeyView& k) { k.traits.spec.lse = true; },
      [](PlanKeyView& k) { k.traits.spec.sinks = true; },
      [](PlanKeyView& k) { k.traits.spec.alibi = true; },
      [](PlanKeyView& k) { k.traits.spec.custom_mask = true; },
      [](PlanKeyView& k) { k.traits.options.batch_invariant = true; },
      [](PlanKeyView& k) { k.traits.options.fixed_split_tokens = 1; },
      [](PlanKeyView& k) { k.traits.page_size = 32; },
      [](PlanKeyView& k) { k.traits.uniform_qo_len = 4; },
      [](PlanKeyView& k) { k.traits.graph = true; },
      [](PlanKeyView& k) {
        static const Ints kOther{3, 2};
        k.kv_counts = kOther;
      },
      [](PlanKeyView& k) {
        static const Ints kLonger{3, 1, 1};
        k.kv_counts = kLonger;
      },
      [](PlanKeyView& k) {
        static const Ints kIndptr{0, 1, 2};
        k.qo_indptr = kIndptr;
      },
  };
  PlanCache cache(4);
  const auto plan = enter(cache, base_key(counts));  // every key here has hash 0
  for (std::size_t i = 0; i < changes.size(); ++i) {
    PlanKeyView changed = base_key(counts);
    changes[i](changed);
    EXPECT_EQ(cache.find(changed), nullptr) << "change " << i;
  }
  const Ints same_contents_elsewhere = counts;
  EXPECT_EQ(cache.find(base_key(same_contents_elsewhere)), plan);
  EXPECT_EQ(cache.stats().hits, 1U);
  EXPECT_EQ(cache.stats().misses, 1U) << "a look-up whose plan was never made is no miss";
}

TEST(PlanCache, SameAddressOtherContentsIsAMiss) {
  PlanCache cache(4);
  Ints counts{3, 1};
  enter(cache, base_key(counts));
  counts[0] = 4;
  EXPECT_EQ(cache.find(base_key(counts)), nullptr);
}

TEST(PlanCache, EvictsTheLeastRecentlyUsed) {
  PlanCache cache(2);
  const Ints a{1};
  const Ints b{2};
  const Ints c{3};
  enter(cache, base_key(a));
  enter(cache, base_key(b));
  EXPECT_NE(cache.find(base_key(a)), nullptr);
  enter(cache, base_key(c));
  EXPECT_NE(cache.find(base_key(a)), nullptr);
  EXPECT_EQ(cache.find(base_key(b)), nullptr);
  EXPECT_NE(cache.find(base_key(c)), nullptr);
  EXPECT_EQ(cache.stats().evictions, 1U);
  EXPECT_EQ(cache.stats().entries, 2U);
}

TEST(PlanCache, DroppedPlansServeTheirHoldersAndFreeOnesAreReused) {
  PlanCache cache(1);
  const Ints a{1};
  auto held = enter(cache, base_key(a));
  cache.invalidate();
  EXPECT_EQ(cache.stats().invalidations, 1U);
  EXPECT_EQ(held->kv_counts, a);
  EXPECT_NE(cache.blank(), held);  // still in use: never handed out again

  const detail::Plan* free_plan = enter(cache, base_key(a)).get();
  cache.invalidate();
  EXPECT_EQ(cache.blank().get(), free_plan);
}

}  // namespace
}  // namespace fiw
