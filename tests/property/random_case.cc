#include "property/random_case.h"

#include <algorithm>

namespace fiw::test {
namespace {

struct Limits {
  std::int32_t batch;
  std::int32_t kv_heads;
  std::int32_t group;
  std::int32_t head_dim;
  std::int32_t qo_len;
  std::int32_t kv_len;
};

std::int32_t random_head_dim(Rng& rng, std::int32_t limit) {
  return rng.chance(0.5) ? std::min(rng.pick({64, 80, 96, 128}), limit) : 8 * rng.uniform(1, limit / 8);
}

/// None, a few or many tokens, up to the limit.
std::int32_t random_len(Rng& rng, std::int32_t limit) {
  const std::int32_t most = std::min(limit, rng.pick({0, 3, 20, 20, 100, 100, limit}));
  return rng.uniform(0, most);
}

Case random_case_within(Op op, Rng& rng, const Limits& limits) {
  Case c{.op = op};
  AttentionParams& params = c.params;
  params.num_kv_heads = rng.uniform(1, limits.kv_heads);
  params.num_qo_heads = params.num_kv_heads * rng.uniform(1, limits.group);
  params.head_dim_qk = random_head_dim(rng, limits.head_dim);
  if (rng.chance(0.3)) params.head_dim_vo = random_head_dim(rng, limits.head_dim);
  if (rng.chance(0.3)) params.sm_scale = 0.02F * static_cast<float>(rng.uniform(1, 20));
  params.causal = rng.chance(0.7);
  if (rng.chance(0.3)) params.window_left = random_len(rng, limits.kv_len);
  if (rng.chance(0.25)) params.logits_soft_cap = static_cast<float>(rng.pick({1, 5, 30, 50}));

  c.q_dtype = rng.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  c.kv_dtype = rng.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  c.page_size = rng.pick({1, 2, 3, 7, 16, 16, 33, 64, 129});
  const bool equal_dims = params.head_dim_vo == 0 || params.head_dim_vo == params.head_dim_qk;
  c.layout =
      equal_dims ? rng.pick(kAllLayouts) : rng.pick({CacheLayout::kNhd, CacheLayout::kHnd, CacheLayout::kPadded});
  c.spacing = rng.pick({Spacing::kContiguous, Spacing::kStrided});
  if (op != Op::kRagged && rng.chance(0.4)) {
    c.kv_dtype = rng.pick({DType::kFloat8E4M3, DType::kFloat8E5M2});
    c.k_scale = rng.pick({0.125F, 0.37F, 1.0F});
    c.v_scale = rng.pick({0.5F, 0.9F, 2.0F});
    c.head_scales = rng.chance(0.5);
  }
  c.lse = rng.chance(0.7);
  c.sinks = rng.chance(0.25);
  c.alibi = rng.chance(0.25);
  c.mask = rng.chance(0.25);
  c.q_deviation = rng.pick({0.3F, 1.0F, 1.0F, 4.0F});
  c.spare_pages = rng.uniform(0, 20);

  const std::int32_t batch = rng.uniform(0, limits.batch);
  const std::int32_t window = rng.uniform(1, 8);
  for (std::int32_t r = 0; r < batch; ++r) {
    c.kv_lens.push_back(random_len(rng, limits.kv_len));
    switch (op) {
      case Op::kDecode:
        c.qo_lens.push_back(1);
        break;
      case Op::kVerify:
        c.qo_lens.push_back(window);
        break;
      case Op::kPrefill:
      case Op::kRagged:
        c.qo_lens.push_back(random_len(rng, limits.qo_len));
        break;
    }
  }
  return c;
}

}  // namespace

Case random_case(Op op, Rng& rng) {
  return random_case_within(op, rng,
                            {.batch = 8, .kv_heads = 4, .group = 16, .head_dim = 256, .qo_len = 60, .kv_len = 2000});
}

Case small_random_case(Op op, Rng& rng) {
  return random_case_within(op, rng,
                            {.batch = 5, .kv_heads = 2, .group = 5, .head_dim = 64, .qo_len = 12, .kv_len = 90});
}

Op random_op(Rng& rng) { return rng.pick({Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}); }

}  // namespace fiw::test
