// Sampling and recomputation of output rows.
#include "row_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "device.h"
#include "mix.h"

namespace fiw::cli {
namespace {

/// One random number out of each of `count` equal stretches of [0, total).
std::vector<std::int64_t> choose(std::int64_t count, std::int64_t total, std::uint64_t seed) {
  std::vector<std::int64_t> chosen;
  chosen.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = i * total / count;
    const std::int64_t end = (i + 1) * total / count;
    const double place = unit_interval(mix(seed, static_cast<std::uint64_t>(i)));
    chosen.push_back(begin + static_cast<std::int64_t>(place * static_cast<double>(end - begin)));
  }
  return chosen;
}

}  // namespace

RowCheck::RowCheck(std::int64_t rows, const SchedulerTotals& totals, std::int32_t layers, const AttentionParams& params,
                   const Tolerance& out_tolerance, std::uint64_t seed)
    : params_(params), out_errors_(out_tolerance) {
  const std::int64_t prefill = totals.prefill_rows * layers;
  const std::int64_t decode = totals.decode_rows * layers;
  rows = std::min(rows, prefill + decode);
  const std::int64_t of_decode = std::min(decode, std::max(rows / 2, rows - prefill));
  samples_[static_cast<std::size_t>(Work::kDecode)].chosen = choose(of_decode, decode, mix(seed, 1U));
  samples_[static_cast<std::size_t>(Work::kPrefill)].chosen = choose(rows - of_decode, prefill, mix(seed, 2U));
}

void RowCheck::check(Work work, const Scheduler& scheduler, const TokenData& data, std::int64_t step,
                     std::int32_t layer, const std::vector<RowSpan>& spans, const ConstTensor& q,
                     const ConstTensor& out, const float* lse) {
  Sample& sample = samples_[static_cast<std::size_t>(work)];
  std::int64_t row = 0;
  for (const RowSpan& span : spans) {
    for (; sample.next < sample.chosen.size(); ++sample.next) {
      const std::int64_t in_span = sample.chosen[sample.next] - sample.passed - row;
      if (in_span >= span.count) break;
      const auto position = static_cast<std::int32_t>(span.start + in_span);
      const auto at = [&](const ConstTensor& tensor) {
        ConstTensor one = tensor;
        one.data = static_cast<const std::byte*>(tensor.data) +
                   static_cast<std::size_t>((row + in_span) * tensor.row_stride) * size_of(tensor.dtype);
        one.rows = 1;
        return one;
      };
      check_row(scheduler, data, span.request, position, layer, at(q), at(out),
                lse + (row + in_span) * params_.num_qo_heads,
                fmt::format("{} step {}, layer {}, request {}, position {}",
                            work == Work::kPrefill ? "prefill" : "decode", step, layer, span.request, position));
    }
    row += span.count;
  }
  sample.passed += row;
}

void RowCheck::check_row(const Scheduler& scheduler, const TokenData& data, std::int32_t request, std::int32_t position,
                         std::int32_t layer, const ConstTensor& q, const ConstTensor& out, const float* lse,
                         const std::string& where) {
  const std::int32_t kv_len = position + 1;
  const OwnedTensor k(DType::kFloat32, kv_len, params_.num_kv_heads, params_.head_dim_qk);
  const OwnedTensor v(DType::kFloat32, kv_len, params_.num_kv_heads, params_.head_dim_qk);
  data.write_kv(scheduler, request, 0, kv_len, layer, k.view, v.view, 0);

  const std::array<std::int32_t, 2> qo_indptr{0, 1};
  const std::array<std::int32_t, 2> kv_indptr{0, kv_len};
  const RaggedKv ragged{k.view, v.view, kv_indptr};
  ReferenceCall call;
  call.q = q;
  call.qo_indptr = qo_indptr;
  call.ragged = &ragged;
  call.params = params_;

  std::vector<double> expected(params_.head_dim_qk);
  for (std::int32_t head = 0; head < params_.num_qo_heads; ++head) {
    const double expected_lse = reference_row(call, 0, head, expected);
    bool ok = lse_errors_.add(lse[head], expected_lse);
    for (std::int32_t d = 0; d < params_.head_dim_qk; ++d) {
      const float value = load_float(out.data, out.dtype, head * out.head_stride + d);
      ok = out_errors_.add(value, expected[d]) && ok;
    }
    if (!ok && first_failure_.empty()) first_failure_ = fmt::format("{}, head {}", where, head);
  }
  ++checked_rows_;
}

}  // namespace fiw::cli
