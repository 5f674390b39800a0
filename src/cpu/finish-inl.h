// The end of a row: what the online softmax accumulated becomes an output row, or a partial one when KV is split.
#if defined(FIW_CPU_FINISH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FIW_CPU_FINISH_INL_H_
#undef FIW_CPU_FINISH_INL_H_
#else
#define FIW_CPU_FINISH_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cpu/job.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

/// Writes rounded elements into row `row` and head `head` of a tensor.
template <class D>
void write_row(D d, const Tensor& out, std::int64_t row, std::int32_t head, const float* values, float scale) {
  with_wide_element(out.dtype, [&](auto element) {
    using Element = decltype(element);
    auto* to = static_cast<typename Element::Raw*>(out.data) + row * out.row_stride + head * out.head_stride;
    narrow_row<Element>(d, values, static_cast<std::int32_t>(out.dim), scale, to);
  });
}

/// Ends row (token p, qo_head) of chunk `chunk`, which covers `keys`: `values` are sums weighted by 2^(logit - top),
/// `sum` is the sum of weights. `sum` is NaN if any logit was; `top` may then be anything.
template <class D>
void finish_row(D d, const Job& job, const Request& request, std::int32_t p, std::int32_t qo_head, std::int32_t chunk,
                const KeyRange& keys, const float* values, float top, float sum) {
  constexpr float kLn2 = 0.6931471806F;
  const bool split = job.schedule.split_kv;
  float scale = 0.0F;
  float lse = kNegInf;
  if (sum == 0.0F && !job.sees_any(request, p, keys)) {
    // An empty row.
  } else if (split && sum == 0.0F) {
    scale = 1.0F;  // the values are 0, or NaN where a value was
    lse = Job::kWeightlessLse;
  } else {
    const float highest_logit = top * kLn2;
    // The sink joins once: here, or when the parts are merged.
    if (job.extras.sinks != nullptr && !split) {
      const float sink = job.extras.sinks[qo_head];
      const float highest = std::max(highest_logit, sink);
      const float weight = std::exp(highest_logit - highest);
      sum = sum * weight + std::exp(sink - highest);
      scale = weight / sum;
      lse = highest + std::log(sum);
    } else {
      scale = 1.0F / sum;
      lse = sum == 0.0F ? std::numeric_limits<float>::quiet_NaN() : highest_logit + std::log(sum);
    }
    scale *= job.v.scale_of(qo_head / job.group);
  }
  if (split) {
    const std::int64_t state = job.partial_row(request, p, chunk) * job.params.num_qo_heads + qo_head;
    narrow_row<Float32>(d, values, job.params.head_dim_vo, scale, job.partial_out + state * job.params.head_dim_vo);
    job.partial_lse[state] = lse;
  } else {
    const std::int64_t row = request.qo_begin + p;
    write_row(d, job.out, row, qo_head, values, scale);
    if (job.lse != nullptr) job.lse[row * job.params.num_qo_heads + qo_head] = lse;
  }
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
