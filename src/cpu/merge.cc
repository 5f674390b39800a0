// Combining attention over disjoint parts of the keys: the chunks of a split call, and the caller's own states.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/merge.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

/// Merges `count` parts, `part(i)` giving an output row and `lse(i)` its logarithm, with a sink (minus infinity: none).
/// If no logarithm is above `weightless`, the parts have no weight to share and the result is NaN. Returns the merged
/// logarithm. `out` may be one of the parts.
template <class In, class Out, class Part, class Lse>
float merge_parts(std::int64_t count, const Part& part, const Lse& lse, float sink, float weightless, std::int32_t dim,
                  typename Out::Raw* out) {
  const Narrow d;
  constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(Narrow()));
  constexpr std::int32_t kStrip = 8;  // vectors whose sums stay in registers

  bool empty = true;
  float highest = sink;
  for (std::int64_t i = 0; i < count; ++i) {
    empty = empty && lse(i) == kNegInf;
    highest = std::max(highest, lse(i));
  }
  float sum = highest == weightless ? std::numeric_limits<float>::quiet_NaN() : std::exp(sink - highest);
  for (std::int64_t i = 0; i < count && !empty; ++i) {
    if (lse(i) != kNegInf) sum += std::exp(lse(i) - highest);
  }
  for (std::int32_t begin = 0; begin < dim; begin += kStrip * kLanes) {
    const std::int32_t vectors = std::min(kStrip, (dim - begin) / kLanes);
    hn::Vec<Narrow> sums[kStrip];
    for (auto& strip : sums) strip = hn::Zero(d);
    for (std::int64_t i = 0; i < count; ++i) {
      if (lse(i) == kNegInf) continue;  // carries no weight, whatever its output holds
      const auto weight = hn::Set(d, std::exp(lse(i) - highest) / sum);
      const typename In::Raw* from = part(i) + begin;
      for (std::int32_t c = 0; c < vectors; ++c) {
        sums[c] = hn::MulAdd(load<In>(d, from + c * kLanes), weight, sums[c]);
      }
    }
    for (std::int32_t c = 0; c < vectors; ++c) store<Out>(d, sums[c], out + begin + c * kLanes);
  }
  return empty ? kNegInf : highest + std::log(sum);
}

template <class Out>
void merge_partials(const Job& job, std::int32_t row) {
  const std::int32_t heads = job.params.num_qo_heads;
  const std::int32_t dim = job.params.head_dim_vo;
  const std::int64_t first = job.schedule.merge_indptr[row];
  const std::int64_t count = job.schedule.merge_indptr[row + 1] - first;
  for (std::int32_t h = 0; h < heads; ++h) {
    const auto part = [&](std::int64_t i) { return job.partial_out + ((first + i) * heads + h) * dim; };
    const auto part_lse = [&](std::int64_t i) { return job.partial_lse[(first + i) * heads + h]; };
    const float sink = job.extras.sinks != nullptr ? job.extras.sinks[h] : kNegInf;
    auto* out = static_cast<typename Out::Raw*>(job.out.data) + row * job.out.row_stride + h * job.out.head_stride;
    const float lse = merge_parts<Float32, Out>(count, part, part_lse, sink, Job::kWeightlessLse, dim, out);
    if (job.lse != nullptr) job.lse[std::int64_t{row} * heads + h] = lse;
  }
}

template <class Element>
void merge_states(const MergeLaunch& launch, std::int64_t row) {
  using Raw = typename Element::Raw;
  const auto offset = [row](const auto& tensor, std::int64_t h) {
    return row * tensor.row_stride + h * tensor.head_stride;
  };
  for (std::int64_t h = 0; h < launch.out.heads; ++h) {
    const auto part = [&](std::int64_t i) {
      const ConstTensor& out = launch.parts[static_cast<std::size_t>(i)].out;
      return static_cast<const Raw*>(out.data) + offset(out, h);
    };
    const auto part_lse = [&](std::int64_t i) {
      return launch.parts[static_cast<std::size_t>(i)].lse[row * launch.out.heads + h];
    };
    Raw* out = static_cast<Raw*>(launch.out.data) + offset(launch.out, h);
    const float lse = merge_parts<Element, Element>(static_cast<std::int64_t>(launch.parts.size()), part, part_lse,
                                                    kNegInf, kNegInf, static_cast<std::int32_t>(launch.out.dim), out);
    if (launch.lse != nullptr) launch.lse[row * launch.out.heads + h] = lse;
  }
}

PartialMergeKernel choose_partial_merge(DType out_dtype) {
  return with_wide_element(out_dtype, [](auto out) -> PartialMergeKernel { return &merge_partials<decltype(out)>; });
}

StateMergeKernel choose_state_merge(DType dtype) {
  return with_wide_element(dtype, [](auto out) -> StateMergeKernel { return &merge_states<decltype(out)>; });
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fiw::cpu {

HWY_EXPORT(choose_partial_merge);
HWY_EXPORT(choose_state_merge);

PartialMergeKernel partial_merge_kernel(DType out_dtype) {
  return HWY_DYNAMIC_DISPATCH(choose_partial_merge)(out_dtype);
}

StateMergeKernel state_merge_kernel(DType dtype) { return HWY_DYNAMIC_DISPATCH(choose_state_merge)(dtype); }

}  // namespace fiw::cpu
#endif
