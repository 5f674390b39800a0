// The formulas of fiw/attention.h, term by term, in float64.
#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.h"

namespace fiw {
namespace {

/// Where the elements of one key (or value) lie, and what to multiply them by.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t offset = 0;
  double scale = 1.0;

  double operator[](std::int64_t d) const { return scale * static_cast<double>(load_float(data, dtype, offset + d)); }
};

Vector tensor_vector(const ConstTensor& tensor, std::int64_t row, std::int64_t head) {
  return {tensor.data, tensor.dtype, row * tensor.row_stride + head * tensor.head_stride, 1.0};
}

/// K and V of one request and KV head, by token.
class Keys {
 public:
  Keys(const ReferenceCall& call, std::int32_t request, std::int32_t head)
      : call_(call), request_(request), head_(head) {}

  std::int64_t size() const {
    if (call_.ragged != nullptr) return call_.ragged->indptr[request_ + 1] - call_.ragged->indptr[request_];
    return call_.table->kv_lens()[request_];
  }

  Vector key(std::int64_t token) const {
    if (call_.ragged != nullptr) return tensor_vector(call_.ragged->k, call_.ragged->indptr[request_] + token, head_);
    const KvCache& kv = *call_.kv;
    return {kv.k, kv.dtype, slot(token, kv.k_stride), scale(kv.k_scale, kv.k_head_scale)};
  }

  Vector value(std::int64_t token) const {
    if (call_.ragged != nullptr) return tensor_vector(call_.ragged->v, call_.ragged->indptr[request_] + token, head_);
    const KvCache& kv = *call_.kv;
    return {kv.v, kv.dtype, slot(token, kv.v_stride), scale(kv.v_scale, kv.v_head_scale)};
  }

 private:
  std::int64_t slot(std::int64_t token, const KvCache::Strides& stride) const {
    const std::int64_t page_size = call_.table->page_size();
    const std::int64_t page = call_.table->indices()[call_.table->indptr()[request_] + token / page_size];
    return page * stride.page + token % page_size * stride.token + head_ * stride.head;
  }

  double scale(float tensor_scale, const float* head_scale) const {
    return static_cast<double>(tensor_scale) * (head_scale != nullptr ? static_cast<double>(head_scale[head_]) : 1.0);
  }

  const ReferenceCall& call_;
  std::int32_t request_;
  std::int32_t head_;
};

bool mask_bit(const AttentionExtras& extras, std::int32_t request, std::int64_t bit) {
  return (extras.mask[extras.mask_indptr[request] + bit / 8] >> (bit % 8) & 1) != 0;
}

}  // namespace

double reference_row(const ReferenceCall& call, std::int64_t row, std::int32_t qo_head, std::span<double> out) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const AttentionParams& params = call.params;
  const AttentionExtras& extras = call.extras;

  // The last request that starts at or before the row: requests without query rows start there too, and come earlier.
  const auto after = std::upper_bound(call.qo_indptr.begin(), call.qo_indptr.end(), row);
  const auto request = static_cast<std::int32_t>(after - call.qo_indptr.begin()) - 1;
  const Keys keys(call, request, qo_head / (params.num_qo_heads / params.num_kv_heads));

  const std::int64_t kv_len = keys.size();
  const std::int64_t qo_len = call.qo_indptr[request + 1] - call.qo_indptr[request];
  const std::int64_t p = row - call.qo_indptr[request];
  const std::int64_t q_pos = kv_len - qo_len + p;
  const Vector q = tensor_vector(call.q, row, qo_head);
  const double sm_scale = params.sm_scale > 0.0F ? static_cast<double>(params.sm_scale)
                                                 : 1.0 / std::sqrt(static_cast<double>(params.head_dim_qk));
  const auto cap = static_cast<double>(params.logits_soft_cap);

  const auto visible = [&](std::int64_t j) {
    if (params.window_left >= 0 && j < q_pos - params.window_left) return false;
    if (extras.mask != nullptr) return mask_bit(extras, request, p * kv_len + j);
    return !params.causal || j <= q_pos;
  };
  const auto logit = [&](std::int64_t j) {
    const Vector k = keys.key(j);
    double dot = 0.0;
    for (std::int32_t d = 0; d < params.head_dim_qk; ++d) dot += q[d] * k[d];
    double s = sm_scale * dot;
    if (extras.alibi_slopes != nullptr)
      s += static_cast<double>(extras.alibi_slopes[qo_head]) * static_cast<double>(j - q_pos);
    return cap > 0.0 ? cap * std::tanh(s / cap) : s;
  };

  std::fill(out.begin(), out.end(), 0.0);
  std::vector<std::int64_t> tokens;
  std::vector<double> logits;
  for (std::int64_t j = 0; j < kv_len; ++j) {
    if (!visible(j)) continue;
    tokens.push_back(j);
    logits.push_back(logit(j));
  }
  if (tokens.empty()) return kNone;

  const double sink = extras.sinks != nullptr ? static_cast<double>(extras.sinks[qo_head]) : kNone;
  const double largest = std::max(sink, *std::max_element(logits.begin(), logits.end()));
  double sum = std::exp(sink - largest);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const double weight = std::exp(logits[i] - largest);
    const Vector v = keys.value(tokens[i]);
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * v[static_cast<std::int64_t>(d)];
  }
  for (double& element : out) element /= sum;
  return largest + std::log(sum);
}

}  // namespace fiw
