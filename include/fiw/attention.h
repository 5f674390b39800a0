// What an attention call computes, apart from where its tensors lie.
//
// For query position p of request r, with q_pos = kv_len - qo_len + p and key position j:
//
//   s_j = sm_scale * <q_p, k_j>                       scaled dot product (Vaswani et al. 2017)
//   s_j = s_j + slope_h * (j - q_pos)                 ALiBi (Press et al. 2022), if slopes are given
//   s_j = cap * tanh(s_j / cap)                       logits soft cap (Gemma 2, 2024), if cap > 0
//   visible: j <= q_pos if causal; j >= q_pos - window_left if window_left >= 0; mask bit, if a mask is given
//   out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))      the sink only joins the sum
//   lse = log(sum_j exp(s_j) + exp(sink_h))                        natural logarithm
//
// A row that sees no key gives out = 0 and lse = -infinity, with or without a sink. NaN in a key makes out and lse NaN
// for the rows that see it, and for no others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fiw/types.h"

namespace fiw {

/// The values that shape an attention call; every one is part of a plan's key.
struct AttentionParams {
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads =
      0;                         ///< divides num_qo_heads; query head h reads KV head h / (num_qo_heads / num_kv_heads)
  std::int32_t head_dim_qk = 0;  ///< a multiple of 8, at most 576
  std::int32_t head_dim_vo = 0;  ///< 0: as head_dim_qk
  float sm_scale = 0.0F;         ///< at most 1e30; <= 0: 1 / sqrt(head_dim_qk)
  bool causal = true;            ///< ignored where a custom mask is given: the mask says all
  std::int32_t window_left = -1;  ///< keys a query sees before its own position; -1: all
  float logits_soft_cap = 0.0F;   ///< 0: off

  friend bool operator==(const AttentionParams&, const AttentionParams&) = default;
};

/// Inputs that may differ from layer to layer without a new plan. All pointers are read on the workspace's device.
struct AttentionExtras {
  const float* sinks = nullptr;         ///< [num_qo_heads], logits; -inf switches a head's sink off
  const float* alibi_slopes = nullptr;  ///< [num_qo_heads], finite
  /// Packed booleans, request after request, each starting at a byte: bit (p * kv_len + j) of request r lies at
  /// mask[mask_indptr[r] + bit / 8] >> (bit % 8) & 1, and 1 means visible.
  const std::uint8_t* mask = nullptr;
  const std::int32_t* mask_indptr = nullptr;  ///< [batch + 1], bytes
};

/// One of the states that `merge_states` combines: attention over one part of the keys.
struct PartialState {
  ConstTensor out{};           ///< [rows, num_qo_heads, head_dim_vo]
  const float* lse = nullptr;  ///< [rows, num_qo_heads], natural logarithm
};

/// The slopes of the ALiBi paper for any number of heads: powers of 2^(-8/n) for n = 2^k heads; for other counts, those
/// of the next lower power of two and then every second one of the next higher.
std::vector<float> default_alibi_slopes(std::int32_t num_qo_heads);

/// Packs one byte per boolean (nonzero: visible) into the bit order of AttentionExtras::mask, each request starting at
/// a byte; `qo_lens[r] * kv_lens[r]` booleans a request. Fills `mask_indptr` with batch + 1 byte offsets.
std::vector<std::uint8_t> pack_mask(std::span<const std::uint8_t> booleans, std::span<const std::int32_t> qo_lens,
                                    std::span<const std::int32_t> kv_lens, std::vector<std::int32_t>& mask_indptr);

}  // namespace fiw
