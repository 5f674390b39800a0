// The legality rules of every call, in one place: each names the argument, its value and what was expected.
#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"
#include "fiw/workspace.h"

namespace fiw::support {

inline constexpr std::int32_t kMaxHeadDim = 576;
inline constexpr std::int32_t kMaxVerifyWindow = 64;

/// Checks params and returns them with defaults resolved: sm_scale, head_dim_vo; causal off under a custom mask.
AttentionParams resolve(const AttentionParams& params, bool custom_mask);
/// The spec with resolved params and legal dtypes.
StepSpec resolve(const StepSpec& spec);
void check_options(const WorkspaceOptions& options);
void check_limits(const WorkspaceLimits& limits);

/// `name` must be an indptr of `batch` requests; returns its last entry.
std::int32_t check_indptr(const char* name, std::span<const std::int32_t> indptr, std::int32_t batch);
/// A [rows, heads, dim] tensor of this dtype on this device, with usable strides and an aligned pointer.
void check_tensor(const char* name, const ConstTensor& tensor, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                  DType dtype, int device);
/// A cache that agrees with the spec and holds every page of the table.
void check_kv_cache(const KvCache& kv, const PageTable& table, int device);
void check_kv_matches(const KvCache& kv, const StepSpec& spec);
/// Ragged K and V of `rows` tokens.
void check_ragged(const RaggedKv& ragged, const StepSpec& spec, int device);
/// Exactly the extras that the spec announces; on the CPU also their contents.
void check_extras(const AttentionExtras& extras, const StepSpec& spec, std::span<const std::int32_t> qo_indptr,
                  std::int32_t uniform_qo_len, std::span<const std::int32_t> kv_lens, int device);
/// Any number of heads, a head dim that attention could have given.
void check_merge_shape(const Tensor& out);
/// `out` must not share memory with `in`. Interleaved views of one buffer (equal row strides) may, if their rows do
/// not.
void check_no_overlap(const char* out_name, const ConstTensor& out, const char* in_name, const ConstTensor& in);

}  // namespace fiw::support
