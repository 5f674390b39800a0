// What the planners are told of a call, from what the workspace knows of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/plan_cache.h"
#include "plan/planner.h"

namespace fiw {

/// The counts of a call whose plan has these traits. The arrays are the caller's.
inline WorkLoad work_load(const PlanTraits& traits, std::span<const std::int32_t> kv_counts,
                          std::span<const std::int32_t> qo_indptr) {
  const AttentionParams& params = traits.spec.params;
  return {.num_qo_heads = params.num_qo_heads,
          .num_kv_heads = params.num_kv_heads,
          .head_dim_qk = params.head_dim_qk,
          .head_dim_vo = params.head_dim_vo,
          .kv_element_bytes = static_cast<std::int32_t>(size_of(traits.spec.kv_dtype)),
          .page_size = traits.page_size,
          .window_left = params.window_left,
          .causal = params.causal,
          .kv_pages = kv_counts,
          .qo_indptr = qo_indptr,
          .uniform_qo_len = traits.uniform_qo_len};
}

inline SplitPolicy split_policy(const PlanOptions& options, bool graph) {
  return {.fixed_chunk_tokens = options.batch_invariant ? options.fixed_split_tokens : 0, .graph = graph};
}

/// Most bytes of K and V that a call over pages copies together before a kHopper kernel reads them: longer ones take
/// another family, which needs no copy.
inline constexpr std::size_t kMostGathered = std::size_t{4} << 30;

/// What the copies of that many tokens' K and V take, in the queries' type.
inline std::size_t gather_bytes(const StepSpec& spec, std::int64_t tokens) noexcept {
  const AttentionParams& params = spec.params;
  return static_cast<std::size_t>(tokens) * params.num_kv_heads * (params.head_dim_qk + params.head_dim_vo) *
         size_of(spec.q_dtype);
}

}  // namespace fiw
