// The oracle: attention in float64, one row at a time, straight from the formulas in fiw/attention.h. Never tuned.
#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"

namespace fiw {

/// One attention call over paged (`kv` and `table`) or ragged (`ragged`) K/V, on host memory. Defaults in `params` may
/// be unresolved (sm_scale <= 0, head_dim_vo 0).
struct ReferenceCall {
  ConstTensor q;
  std::span<const std::int32_t> qo_indptr;  ///< [batch + 1]
  const KvCache* kv = nullptr;
  const PageTable* table = nullptr;
  const RaggedKv* ragged = nullptr;
  AttentionParams params;
  AttentionExtras extras;
};

/// One query row and head: writes `out` [head_dim_vo] and returns the LSE (natural logarithm; -infinity for an empty
/// row).
double reference_row(const ReferenceCall& call, std::int64_t row, std::int32_t qo_head, std::span<double> out);

}  // namespace fiw
