// One attention call as the kernels see it: the launch flattened, and the arithmetic of which keys an item covers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/backend.h"

namespace fiw::cpu {

/// K or V in memory. A ragged request reads as one long page whose id is its first token.
struct TokenArray {
  const void* data = nullptr;
  KvCache::Strides stride{};  ///< elements
  float scale = 1.0F;
  const float* head_scale = nullptr;

  float scale_of(std::int32_t head) const noexcept { return head_scale == nullptr ? scale : scale * head_scale[head]; }
};

struct Request {
  std::int32_t index = 0;
  std::int64_t qo_begin = 0;
  std::int32_t qo_len = 0;
  std::int32_t kv_len = 0;
  const std::int32_t* pages = nullptr;

  /// May be negative: then a causal row sees nothing.
  std::int32_t q_pos(std::int32_t p) const noexcept { return kv_len - qo_len + p; }
};

/// Keys [begin, end).
struct KeyRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// The parts of the plan, as arrays.
struct Schedule {
  const std::int32_t* request_indices = nullptr;
  const std::int32_t* qo_tile_indices = nullptr;
  const std::int32_t* kv_tile_indices = nullptr;
  const std::int32_t* o_indptr = nullptr;
  const std::int32_t* merge_indptr = nullptr;
  std::int32_t items = 0;
  std::int32_t tile_rows = 0;
  std::int32_t kv_chunk_tokens = 0;
  std::int32_t total_rows = 0;
  bool split_kv = false;
};

struct Job {
  AttentionParams params{};
  std::int32_t group = 1;
  ConstTensor q{};
  Tensor out{};
  float* lse = nullptr;
  AttentionExtras extras{};
  const std::int32_t* qo_indptr = nullptr;  ///< null: every request has uniform_qo_len rows
  std::int32_t uniform_qo_len = 1;

  DType kv_dtype = DType::kFloat32;
  TokenArray k{};
  TokenArray v{};
  const std::int32_t* page_indptr = nullptr;  ///< null: ragged
  const std::int32_t* page_indices = nullptr;
  const std::int32_t* kv_lens = nullptr;
  const std::int32_t* kv_indptr = nullptr;  ///< ragged only
  std::int32_t page_size = 1;

  Schedule schedule{};
  float* partial_out = nullptr;  ///< [partial_rows, num_qo_heads, head_dim_vo], only when split
  float* partial_lse = nullptr;  ///< [partial_rows, num_qo_heads]
  /// The partial_lse of a part whose logits are all minus infinity. A part that sees no key has minus infinity instead:
  /// the two differ where no other part has any weight either.
  static constexpr float kWeightlessLse = std::numeric_limits<float>::lowest();

  Request request(std::int32_t r) const noexcept {
    Request request{.index = r};
    request.qo_begin = qo_indptr != nullptr ? qo_indptr[r] : std::int64_t{r} * uniform_qo_len;
    request.qo_len = qo_indptr != nullptr ? qo_indptr[r + 1] - qo_indptr[r] : uniform_qo_len;
    request.kv_len = page_indptr != nullptr ? kv_lens[r] : kv_indptr[r + 1] - kv_indptr[r];
    request.pages = page_indptr != nullptr ? page_indices + page_indptr[r] : kv_indptr + r;
    return request;
  }

  /// What query token p sees, the custom mask aside.
  KeyRange visible(const Request& request, std::int32_t p) const noexcept {
    const std::int32_t q_pos = request.q_pos(p);
    KeyRange keys{0, request.kv_len};
    if (params.causal) keys.end = std::clamp(q_pos + 1, 0, request.kv_len);
    if (params.window_left >= 0) {
      keys.begin =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(std::int64_t{q_pos} - params.window_left, 0, keys.end));
    }
    return keys;
  }

  /// The keys of chunk `chunk` of a tile with query tokens first .. last.
  KeyRange chunk(const Request& request, std::int32_t first, std::int32_t last, std::int32_t chunk) const noexcept {
    const KeyRange tile{visible(request, first).begin, visible(request, last).end};
    if (!schedule.split_kv) return tile;
    const std::int64_t begin = tile.begin + std::int64_t{chunk} * schedule.kv_chunk_tokens;
    return {static_cast<std::int32_t>(std::min<std::int64_t>(begin, tile.end)),
            static_cast<std::int32_t>(std::min<std::int64_t>(begin + schedule.kv_chunk_tokens, tile.end))};
  }

  bool masked(const Request& request, std::int32_t p, std::int32_t key) const noexcept {
    const std::int64_t bit = std::int64_t{p} * request.kv_len + key;
    return (extras.mask[extras.mask_indptr[request.index] + bit / 8] >> (bit % 8) & 1) == 0;
  }

  /// Whether query token p sees any of `keys`.
  bool sees_any(const Request& request, std::int32_t p, const KeyRange& keys) const noexcept {
    const KeyRange seen = visible(request, p);
    const std::int32_t begin = std::max(seen.begin, keys.begin);
    const std::int32_t end = std::min(seen.end, keys.end);
    if (extras.mask == nullptr) return begin < end;
    const std::int64_t row = std::int64_t{p} * request.kv_len;
    const std::uint8_t* bytes = extras.mask + extras.mask_indptr[request.index];
    for (std::int64_t bit = row + begin; bit < row + end;) {
      const unsigned rest = static_cast<unsigned>(bytes[bit / 8]) >> (bit % 8);
      if (rest != 0) return bit + std::countr_zero(rest) < row + end;
      bit = (bit / 8 + 1) * 8;
    }
    return false;
  }

  /// Element offsets of head 0 of tokens first .. first + count - 1.
  void token_offsets(const Request& request, std::int32_t first, std::int32_t count, std::int64_t* k_offsets,
                     std::int64_t* v_offsets) const noexcept {
    const std::int32_t* page = request.pages + first / page_size;
    std::int32_t slot = first % page_size;
    for (std::int32_t t = 0; t < count; ++t) {
      k_offsets[t] = *page * k.stride.page + slot * k.stride.token;
      v_offsets[t] = *page * v.stride.page + slot * v.stride.token;
      if (++slot == page_size) {
        slot = 0;
        ++page;
      }
    }
  }

  /// Where chunk `chunk` of query token p of a request goes among the partial rows.
  std::int64_t partial_row(const Request& request, std::int32_t p, std::int32_t chunk) const noexcept {
    const std::int32_t begin = schedule.o_indptr[request.index];
    const std::int64_t chunks = (schedule.o_indptr[request.index + 1] - begin) / request.qo_len;
    return begin + p * chunks + chunk;
  }

  /// Softmax works on base-2 logits. Without a soft cap the factor goes into the queries; with one, it follows the
  /// tanh.
  bool capped() const noexcept { return params.logits_soft_cap > 0.0F; }
  float logit_unit() const noexcept { return capped() ? 1.0F : kLog2E; }
  float q_scale(std::int32_t kv_head) const noexcept { return params.sm_scale * k.scale_of(kv_head) * logit_unit(); }
  /// Finite, so that a distance of 0 gives 0.
  float slope(std::int32_t qo_head) const noexcept {
    constexpr float kMax = std::numeric_limits<float>::max();
    return std::clamp(extras.alibi_slopes[qo_head] * logit_unit(), -kMax, kMax);
  }

  static constexpr float kLog2E = 1.442695041F;
};

}  // namespace fiw::cpu
