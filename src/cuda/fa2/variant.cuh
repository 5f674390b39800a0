// Our formulas as the hooks that FlashInfer's FA2 and CUDA-core kernels call.
//
// Where the keys are not split, a kernel's own result is final: the sink joins the sum here, and (m, d) are rewritten
// so that the kernel's base-2 `log2(d) + m` comes out as the natural logarithm. Where they are split, partial results
// keep base 2 and the merge kernel finishes.
#pragma once

#include <cstdint>
#include <flashinfer/attention/variant_helper.cuh>
#include <flashinfer/math.cuh>

#include "cuda/soft_tanh.cuh"

namespace fiw::cuda {

/// `kOptions`: soft cap, ALiBi, sinks, windows and per-head scales, each decided at run time. `kMasked`: LogitsMask
/// says everything, the kernel assumes nothing.
template <bool kOptions, bool kMasked>
struct Variant : flashinfer::AttentionVariantBase {
  static constexpr bool use_softmax = true;

  std::uint32_t qo_len, kv_len;
  std::uint32_t window_left;  // what the kernel skips by
  float sm_scale_log2;
  const std::uint8_t* mask;

  template <class Params>
  __device__ Variant(const Params& params, std::uint32_t request, std::uint8_t*) {
    qo_len = static_cast<std::uint32_t>(params.q_indptr[request + 1] - params.q_indptr[request]);
    kv_len = params.kv_len(request);
    window_left = params.skip_window >= 0 ? static_cast<std::uint32_t>(params.skip_window) : kv_len;
    sm_scale_log2 = changes_logits(params) ? flashinfer::math::log2e : params.sm_scale * flashinfer::math::log2e;
    mask = kMasked && params.mask != nullptr ? params.mask + params.mask_indptr[request] : nullptr;
  }

  /// Whether scores are more than scaled. Where they are not, every variant rounds alike, so that a request's result
  /// does not hang on which variant its batch takes.
  template <class Params>
  __device__ __forceinline__ static bool changes_logits(const Params& params) {
    return kOptions && (params.soft_cap > 0 || params.alibi_slopes != nullptr || params.k_head_scale != nullptr);
  }

  template <class Params, class T>
  __device__ __forceinline__ T LogitsTransform(const Params& params, T logits, std::uint32_t, std::uint32_t qo_idx,
                                               std::uint32_t kv_idx, std::uint32_t qo_head, std::uint32_t kv_head) {
    if constexpr (kOptions) {
      if (!changes_logits(params)) return logits;
      float x = logits * params.sm_scale;
      if (params.k_head_scale != nullptr) x *= params.k_head_scale[kv_head];
      if (params.alibi_slopes != nullptr) {
        const auto distance = static_cast<std::int32_t>(kv_idx + qo_len) - static_cast<std::int32_t>(kv_len + qo_idx);
        x += params.alibi_slopes[qo_head] * static_cast<float>(distance);
      }
      if (params.soft_cap > 0) x = params.soft_cap * soft_tanh(x / params.soft_cap);
      return x;
    }
    return logits;
  }

  template <class Params>
  __device__ __forceinline__ bool LogitsMask(const Params& params, std::uint32_t, std::uint32_t qo_idx,
                                             std::uint32_t kv_idx, std::uint32_t, std::uint32_t) {
    bool visible = true;
    if constexpr (kMasked) {
      visible = qo_idx < qo_len && kv_idx < kv_len;
      if (params.causal) visible &= kv_idx + qo_len <= kv_len + qo_idx;
      if (visible && mask != nullptr) {
        const std::uint64_t bit = static_cast<std::uint64_t>(qo_idx) * kv_len + kv_idx;
        visible = (mask[bit / 8] >> (bit % 8)) & 1;
      }
    }
    if constexpr (kOptions) {
      if (params.window_left >= 0) {
        visible &= kv_idx + qo_len + static_cast<std::uint32_t>(params.window_left) >= kv_len + qo_idx;
      }
    }
    return visible;
  }

  /// What turns the running sum into the result; a row that saw no key gets 0 and keeps m = -inf. A NaN is missing in
  /// m, never in d.
  template <class Params>
  __device__ __forceinline__ float finish(const Params& params, std::uint32_t qo_head, float& m, float& d) {
    const bool empty = m == -flashinfer::math::inf && !isnan(d);
    if (params.partition_kv) return empty ? 0.0F : flashinfer::math::ptx_rcp(d);
    if (empty) {
      d = 1.0F;
      return 0.0F;
    }
    float shrink = 1.0F;
    if constexpr (kOptions) {
      if (params.sinks != nullptr) {
        const float sink = params.sinks[qo_head] * flashinfer::math::log2e;
        const float top = fmaxf(m, sink);
        shrink = exp2f(m - top);
        d = d * shrink + exp2f(sink - top);
        m = top;
      }
    }
    const float scale = shrink / d;
    m = (m + log2f(d)) * flashinfer::math::loge2;
    d = 1.0F;
    return scale;
  }

  template <class Params, class M>
  __device__ __forceinline__ void update_m_d(const Params& params, std::uint32_t, std::uint32_t qo_head, M& m, float& d,
                                             float& scale) {
    scale = finish(params, qo_head, m, d);
  }

  template <class Params, class T, class M>
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, std::uint32_t, std::uint32_t,
                                               std::uint32_t qo_head, M&, float&, float scale) {
    float v_scale = params.v_scale;
    if (params.v_head_scale != nullptr) v_scale *= params.v_head_scale[qo_head / params.group_size];
    return output * scale * v_scale;
  }
};

/// The CUDA-core kernel knows no update_m_d: its first call of OutputTransform finishes the row.
template <bool kOptions>
struct CoreVariant : Variant<kOptions, false> {
  using Base = Variant<kOptions, false>;

  float final_scale = 0;
  bool finished = false;

  template <class Params>
  __device__ CoreVariant(const Params& params, std::uint32_t request, std::uint8_t* shared)
      : Base(params, request, shared) {}

  template <class Params, class T>
  __device__ __forceinline__ T OutputTransform(const Params& params, T output, std::uint32_t request,
                                               std::uint32_t qo_idx, std::uint32_t qo_head, float& m, float& d, float) {
    if (!finished) {
      final_scale = this->finish(params, qo_head, m, d);
      finished = true;
    }
    return Base::OutputTransform(params, output, request, qo_idx, qo_head, m, d, final_scale);
  }
};

}  // namespace fiw::cuda
