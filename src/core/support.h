// The legality rules of every call, in one place: each names the argument, its value and what was expected.
#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"
#include "core/region.h"
#include "fiw/workspace.h"

namespace fiw::support {

inline constexpr std::int32_t kMaxHeadDim = 576;
inline constexpr std::int32_t kMaxVerifyWindow = 64;
inline constexpr std::int32_t kMaxThreads = 4096;

/// Checks params and returns them with defaults resolved: sm_scale, head_dim_vo; causal off under a custom mask.
AttentionParams resolve(const AttentionParams& params, bool custom_mask);
/// The spec with resolved params and legal dtypes.
StepSpec resolve(const StepSpec& spec);
void check_options(const WorkspaceOptions& options);
void check_plan_options(const PlanOptions& options);
void check_limits(const WorkspaceLimits& limits);
void check_device(const DeviceProps& device);

/// A pool of `num_pages` pages that a page table may name.
void check_pool(std::int32_t page_size, std::int64_t num_pages);
/// `name` must be an indptr of `batch` requests; returns its last entry.
std::int32_t check_indptr(const char* name, std::span<const std::int32_t> indptr, std::int32_t batch);
// What a check has passed it enters into the caller's list of what the call reads or writes.

/// A [rows, heads, dim] tensor of this dtype on this device, with usable strides and an aligned pointer.
void check_tensor(const char* name, const ConstTensor& tensor, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                  DType dtype, int device, Regions& regions);
/// A type of new tokens for a cache, which append_kv converts.
void check_append_dtype(DType dtype);
/// A contiguous array; nothing when null.
void check_array(const char* name, const float* data, std::int64_t count, Regions& regions);
void check_array(const char* name, const std::int32_t* data, std::int64_t count, Regions& regions);

/// A cache that holds every page of the table.
void check_kv_cache(const KvCache& kv, const PageTable& table, int device, Regions& slots, Regions& scales);
void check_kv_matches(const KvCache& kv, const StepSpec& spec);
/// Ragged K and V of `rows` tokens.
void check_ragged(const RaggedKv& ragged, const StepSpec& spec, int device, Regions& regions);

/// Exactly the extras that the spec announces; where the host may read them now, also their contents.
void check_extras(const AttentionExtras& extras, const StepSpec& spec, std::span<const std::int32_t> qo_indptr,
                  std::int32_t uniform_qo_len, std::span<const std::int32_t> kv_lens, bool readable, Regions& regions);
/// Any number of heads, a head dim that attention could have given.
void check_merge_shape(const Tensor& out);
/// No two elements of what is written may share memory.
void check_distinct(const Regions& written);
/// What is written must share no memory with what is read. Views may interleave.
void check_apart(const Region& written, const Region& read);
void check_apart(const Regions& written, const Regions& read);

}  // namespace fiw::support
