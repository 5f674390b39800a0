// See support.h.
#include "core/support.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fail.h"

namespace fiw::support {
namespace {

// Beyond it the logits of ordinary data leave float32.
constexpr float kMaxSmScale = 1e30F;

void check_heads(std::int32_t num_qo_heads, std::int32_t num_kv_heads) {
  if (num_qo_heads < 1) fail(Reason::kHeadCount, "num_qo_heads is {}, expected at least 1", num_qo_heads);
  if (num_kv_heads < 1) fail(Reason::kHeadCount, "num_kv_heads is {}, expected at least 1", num_kv_heads);
  if (num_qo_heads % num_kv_heads != 0) {
    fail(Reason::kHeadCount, "num_qo_heads is {}, expected a multiple of num_kv_heads = {}", num_qo_heads,
         num_kv_heads);
  }
}

void check_head_dim(const char* name, std::int32_t head_dim) {
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    unsupported(Reason::kHeadDim, "{} is {}, expected a multiple of 8 in 8..{}", name, head_dim, kMaxHeadDim);
  }
}

void check_cache_scale(const char* name, float scale) {
  if (!std::isfinite(scale) || scale <= 0) {
    fail(Reason::kScale, "{} is {}, expected a finite value above 0", name, scale);
  }
}

std::string dtype_name(DType dtype) {
  return is_dtype(dtype) ? std::string(to_string(dtype)) : fmt::format("DType({})", static_cast<int>(dtype));
}

void check_is_dtype(const char* name, DType dtype, const char* expected) {
  if (!is_dtype(dtype)) fail(Reason::kTensorDType, "{} is {}, expected {}", name, dtype_name(dtype), expected);
}

constexpr const char* kWideTypes = "float32, float16 or bfloat16";
constexpr const char* kAllTypes = "float32, float16, bfloat16, float8_e4m3 or float8_e5m2";

/// One of the types that queries, outputs and new tokens may have.
void check_is_wide(const char* name, DType dtype) {
  check_is_dtype(name, dtype, kWideTypes);
  if (is_fp8(dtype)) {
    unsupported(Reason::kDTypeCombination, "{} is {}, expected {}", name, to_string(dtype), kWideTypes);
  }
}

std::string device_name(int device) { return device == kCpuDevice ? "the CPU" : fmt::format("CUDA device {}", device); }

void check_device(const char* name, int device, int expected) {
  if (device != expected) {
    fail(Reason::kTensorDevice, "{} is on {}, the workspace is on {}", name, device_name(device),
         device_name(expected));
  }
}

void check_pointer(const char* name, const void* data, std::size_t alignment) {
  if (data == nullptr) fail(Reason::kTensorNull, "{} is null", name);
  if (reinterpret_cast<std::uintptr_t>(data) % alignment != 0) {
    fail(Reason::kTensorAlignment, "{} is at address {}, expected a multiple of its element size {}", name, data,
         alignment);
  }
}

void check_stride(const char* name, const char* axis, std::int64_t stride, std::int64_t least, std::int64_t extent) {
  if (extent > 1 && stride < least) {
    fail(Reason::kTensorStride, "{}: the stride of its {} axis is {} elements, expected at least {}", name, axis,
         stride, least);
  }
}

void check_dtype(const char* name, DType dtype, DType expected) {
  if (dtype != expected) {
    fail(Reason::kTensorDType, "{} is {}, expected {}", name, dtype_name(dtype), to_string(expected));
  }
}

void check_axis(const char* name, const char* axis, std::int64_t value, std::int64_t expected) {
  if (value != expected) fail(Reason::kTensorShape, "{} has {} {}, expected {}", name, value, axis, expected);
}

template <class T>
void check_array_of(const char* name, const T* data, std::int64_t count, Regions& regions) {
  if (data == nullptr) return;
  check_pointer(name, data, alignof(T));
  regions.add(name, data, sizeof(T), count);
}

}  // namespace

AttentionParams resolve(const AttentionParams& params, bool custom_mask) {
  check_heads(params.num_qo_heads, params.num_kv_heads);
  AttentionParams resolved = params;
  if (resolved.head_dim_vo == 0) resolved.head_dim_vo = resolved.head_dim_qk;
  check_head_dim("head_dim_qk", resolved.head_dim_qk);
  check_head_dim("head_dim_vo", resolved.head_dim_vo);
  if (!std::isfinite(params.sm_scale) || params.sm_scale > kMaxSmScale) {
    fail(Reason::kScale, "sm_scale is {}, expected a finite value of at most {} (<= 0: 1 / sqrt(head_dim_qk))",
         params.sm_scale, kMaxSmScale);
  }
  if (resolved.sm_scale <= 0) resolved.sm_scale = 1.0F / std::sqrt(static_cast<float>(resolved.head_dim_qk));
  if (params.window_left < -1) {
    fail(Reason::kWindow, "window_left is {}, expected at least -1 (-1: off)", params.window_left);
  }
  if (!std::isfinite(params.logits_soft_cap) || params.logits_soft_cap < 0) {
    fail(Reason::kSoftCap, "logits_soft_cap is {}, expected a finite value of at least 0 (0: off)",
         params.logits_soft_cap);
  }
  if (custom_mask) resolved.causal = false;
  return resolved;
}

StepSpec resolve(const StepSpec& spec) {
  StepSpec resolved = spec;
  resolved.params = resolve(spec.params, spec.custom_mask);
  check_is_wide("q_dtype", spec.q_dtype);
  check_is_dtype("kv_dtype", spec.kv_dtype, kAllTypes);
  return resolved;
}

void check_options(const WorkspaceOptions& options) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    fail(Reason::kOptions, "num_threads is {}, expected 0..{} (0: OpenMP's default)", options.num_threads, kMaxThreads);
  }
  if (options.cache_entries < 1 || options.cache_entries > 1024) {
    fail(Reason::kOptions, "cache_entries is {}, expected 1..1024", options.cache_entries);
  }
  check_plan_options(options.plan);
  if (options.cuda_route && *options.cuda_route > CudaRoute::kPrefill) {
    fail(Reason::kOptions, "cuda_route is {}, expected 0..{}", static_cast<int>(*options.cuda_route),
         static_cast<int>(CudaRoute::kPrefill));
  }
  if ((options.allocator.allocate == nullptr) != (options.allocator.free == nullptr)) {
    fail(Reason::kOptions, "allocator sets one of its two callbacks, expected both or none");
  }
  if (options.fixed_size && options.workspace_bytes == 0 && !options.limits) {
    fail(Reason::kOptions, "fixed_size is set without workspace_bytes or limits to size the workspace by");
  }
  if (options.limits) check_limits(*options.limits);
}

void check_plan_options(const PlanOptions& options) {
  if (options.batch_invariant && options.fixed_split_tokens < 1) {
    fail(Reason::kOptions, "fixed_split_tokens is {}, expected at least 1", options.fixed_split_tokens);
  }
}

void check_device(const DeviceProps& device) {
  const auto within = [](const char* name, std::int32_t value, std::int32_t least, std::int32_t most) {
    if (value < least || value > most) {
      fail(Reason::kOptions, "device.{} is {}, expected {}..{}", name, value, least, most);
    }
  };
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  if (device.kind != DeviceKind::kCpu && device.kind != DeviceKind::kCuda) {
    fail(Reason::kOptions, "device.kind is {}, expected kCpu (0) or kCuda (1)", static_cast<int>(device.kind));
  }
  within("num_workers", device.num_workers, 1, kMaxThreads);
  within("compute_capability", device.compute_capability, 0, kMost);
  within("max_shared_bytes", device.max_shared_bytes, 0, kMost);
  within("decode_blocks_per_sm", device.decode_blocks_per_sm, 1, 1024);
  within("tile_blocks_per_sm", device.tile_blocks_per_sm, 1, 1024);
}

void check_limits(const WorkspaceLimits& limits) {
  resolve(limits.params, false);
  check_is_dtype("limits: kv_dtype", limits.kv_dtype, kAllTypes);
  const auto at_least = [](const char* name, std::int32_t value, std::int32_t least) {
    if (value < least) fail(Reason::kOptions, "limits: {} is {}, expected at least {}", name, value, least);
  };
  at_least("max_batch", limits.max_batch, 0);
  at_least("max_total_qo", limits.max_total_qo, 0);
  at_least("max_verify_window", limits.max_verify_window, 0);
  at_least("max_kv_len", limits.max_kv_len, 0);
  at_least("page_size", limits.page_size, 1);
  if (limits.max_verify_window > kMaxVerifyWindow) {
    fail(Reason::kOptions, "limits: max_verify_window is {}, expected at most {}", limits.max_verify_window,
         kMaxVerifyWindow);
  }
}

void check_pool(std::int32_t page_size, std::int64_t num_pages) {
  if (page_size < 1) fail(Reason::kPageSize, "page_size is {}, expected at least 1", page_size);
  if (num_pages < 0) fail(Reason::kTableSize, "num_pages is {}, expected at least 0", num_pages);
}

std::int32_t check_indptr(const char* name, std::span<const std::int32_t> indptr, std::int32_t batch) {
  if (static_cast<std::int64_t>(indptr.size()) != std::int64_t{batch} + 1) {
    fail(Reason::kQoIndptr, "{} has {} entries, expected batch + 1 = {}", name, indptr.size(), std::int64_t{batch} + 1);
  }
  if (indptr[0] != 0) fail(Reason::kQoIndptr, "{}[0] is {}, expected 0", name, indptr[0]);
  for (std::size_t r = 0; r + 1 < indptr.size(); ++r) {
    if (indptr[r + 1] < indptr[r]) {
      fail_at(r, Reason::kQoIndptr, "request {}: {}[{}] is {}, below {}[{}] = {}", r, name, r + 1, indptr[r + 1], name,
              r, indptr[r]);
    }
  }
  return indptr.back();
}

void check_tensor(const char* name, const ConstTensor& tensor, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                  DType dtype, int device, Regions& regions) {
  check_device(name, tensor.device, device);
  check_axis(name, "rows", tensor.rows, rows);
  check_axis(name, "heads", tensor.heads, heads);
  check_axis(name, "elements a head", tensor.dim, dim);
  check_dtype(name, tensor.dtype, dtype);
  if (rows == 0) return;
  const std::size_t element = size_of(dtype);
  check_pointer(name, tensor.data, element);
  check_stride(name, "head", tensor.head_stride, dim, heads);
  check_stride(name, "row", tensor.row_stride, dim, rows);
  regions.add(name, tensor.data, static_cast<std::int64_t>(element), dim,
              {{"row", rows, tensor.row_stride}, {"head", heads, tensor.head_stride}});
}

void check_append_dtype(DType dtype) { check_is_wide("k", dtype); }

void check_array(const char* name, const float* data, std::int64_t count, Regions& regions) {
  check_array_of(name, data, count, regions);
}

void check_array(const char* name, const std::int32_t* data, std::int64_t count, Regions& regions) {
  check_array_of(name, data, count, regions);
}

void check_kv_cache(const KvCache& kv, const PageTable& table, int device, Regions& slots, Regions& scales) {
  check_device("kv", kv.device, device);
  check_is_dtype("kv", kv.dtype, kAllTypes);
  check_head_dim("kv.head_dim_qk", kv.head_dim_qk);
  check_head_dim("kv.head_dim_vo", kv.head_dim_vo);
  if (kv.num_kv_heads < 1) fail(Reason::kHeadCount, "kv.num_kv_heads is {}, expected at least 1", kv.num_kv_heads);
  if (kv.page_size < 1) fail(Reason::kPageSize, "kv.page_size is {}, expected at least 1", kv.page_size);
  if (kv.page_size != table.page_size() && table.batch() > 0) {
    fail(Reason::kPageSize, "kv.page_size is {}, the page table's is {}", kv.page_size, table.page_size());
  }
  if (kv.num_pages < 0) fail(Reason::kTensorShape, "kv.num_pages is {}, expected at least 0", kv.num_pages);
  if (table.max_page_index() >= kv.num_pages) {
    for (std::int32_t r = 0; r < table.batch(); ++r) {
      for (std::int32_t i = table.indptr()[static_cast<std::size_t>(r)];
           i < table.indptr()[static_cast<std::size_t>(r) + 1]; ++i) {
        const std::int32_t page = table.indices()[static_cast<std::size_t>(i)];
        if (page >= kv.num_pages) {
          fail_at(r, Reason::kPageIndex, "request {} uses page {}, kv has {} pages", r, page, kv.num_pages);
        }
      }
    }
  }
  check_cache_scale("kv.k_scale", kv.k_scale);
  check_cache_scale("kv.v_scale", kv.v_scale);
  check_array("kv.k_head_scale", kv.k_head_scale, kv.num_kv_heads, scales);
  check_array("kv.v_head_scale", kv.v_head_scale, kv.num_kv_heads, scales);
  if (device == kCpuDevice) {
    for (std::int32_t h = 0; h < kv.num_kv_heads; ++h) {
      if (kv.k_head_scale != nullptr) check_cache_scale("a value of kv.k_head_scale", kv.k_head_scale[h]);
      if (kv.v_head_scale != nullptr) check_cache_scale("a value of kv.v_head_scale", kv.v_head_scale[h]);
    }
  }
  if (kv.num_pages == 0) return;
  const auto check_side = [&](const char* name, const void* data, const KvCache::Strides& stride, std::int32_t dim) {
    const std::size_t element = size_of(kv.dtype);
    check_pointer(name, data, element);
    check_stride(name, "token", stride.token, dim, kv.page_size);
    check_stride(name, "head", stride.head, dim, kv.num_kv_heads);
    check_stride(name, "page", stride.page, dim, kv.num_pages);
    slots.add(name, data, static_cast<std::int64_t>(element), dim,
              {{"page", kv.num_pages, stride.page},
               {"token", kv.page_size, stride.token},
               {"head", kv.num_kv_heads, stride.head}});
  };
  check_side("kv.k", kv.k, kv.k_stride, kv.head_dim_qk);
  check_side("kv.v", kv.v, kv.v_stride, kv.head_dim_vo);
}

void check_kv_matches(const KvCache& kv, const StepSpec& spec) {
  check_dtype("kv", kv.dtype, spec.kv_dtype);
  check_axis("kv", "heads", kv.num_kv_heads, spec.params.num_kv_heads);
  check_axis("kv.k", "elements a head", kv.head_dim_qk, spec.params.head_dim_qk);
  check_axis("kv.v", "elements a head", kv.head_dim_vo, spec.params.head_dim_vo);
}

void check_ragged(const RaggedKv& ragged, const StepSpec& spec, int device, Regions& regions) {
  if (is_fp8(spec.kv_dtype)) {
    unsupported(Reason::kDTypeCombination,
                "k is {}, expected float32, float16 or bfloat16 (fp8 is for caches, with scales)",
                to_string(spec.kv_dtype));
  }
  const std::int64_t rows = ragged.indptr.back();
  check_tensor("k", ragged.k, rows, spec.params.num_kv_heads, spec.params.head_dim_qk, spec.kv_dtype, device, regions);
  check_tensor("v", ragged.v, rows, spec.params.num_kv_heads, spec.params.head_dim_vo, spec.kv_dtype, device, regions);
  check_array("kv_indptr", ragged.indptr.data(), std::ssize(ragged.indptr), regions);
}

void check_extras(const AttentionExtras& extras, const StepSpec& spec, std::span<const std::int32_t> qo_indptr,
                  std::int32_t uniform_qo_len, std::span<const std::int32_t> kv_lens, bool readable, Regions& regions) {
  const auto announced = [](const char* name, const void* pointer, bool expected, Reason reason) {
    if ((pointer != nullptr) != expected) {
      fail(reason, "extras.{} is {}, the step was planned {} it", name, pointer == nullptr ? "null" : "given",
           expected ? "with" : "without");
    }
  };
  announced("sinks", extras.sinks, spec.sinks, Reason::kSinks);
  announced("alibi_slopes", extras.alibi_slopes, spec.alibi, Reason::kAlibi);
  announced("mask", extras.mask, spec.custom_mask, Reason::kMask);
  announced("mask_indptr", extras.mask_indptr, spec.custom_mask, Reason::kMask);
  check_array("extras.sinks", extras.sinks, spec.params.num_qo_heads, regions);
  check_array("extras.alibi_slopes", extras.alibi_slopes, spec.params.num_qo_heads, regions);
  for (std::int32_t h = 0; readable && extras.alibi_slopes != nullptr && h < spec.params.num_qo_heads; ++h) {
    if (!std::isfinite(extras.alibi_slopes[h])) {
      fail(Reason::kAlibi, "extras.alibi_slopes[{}] is {}, expected a finite value", h, extras.alibi_slopes[h]);
    }
  }
  if (!spec.custom_mask) return;
  check_array("extras.mask_indptr", extras.mask_indptr, std::ssize(kv_lens) + 1, regions);
  if (!readable) return;  // then the host cannot tell how long the mask is
  std::int64_t mask_bytes = 0;
  for (std::size_t r = 0; r < kv_lens.size(); ++r) {
    const std::int64_t qo_len = qo_indptr.empty() ? uniform_qo_len : qo_indptr[r + 1] - qo_indptr[r];
    const std::int64_t needed = (qo_len * kv_lens[r] + 7) / 8;
    const std::int64_t held = std::int64_t{extras.mask_indptr[r + 1]} - extras.mask_indptr[r];
    if (extras.mask_indptr[r] < 0 || held < needed) {
      fail_at(r, Reason::kMask,
              "request {}: mask_indptr {}..{} gives {} bytes of mask, expected at least {} for {} x {} bits", r,
              extras.mask_indptr[r], extras.mask_indptr[r + 1], held, needed, qo_len, kv_lens[r]);
    }
    mask_bytes = std::max(mask_bytes, extras.mask_indptr[r] + needed);
  }
  regions.add("extras.mask", extras.mask, 1, mask_bytes);
}

void check_merge_shape(const Tensor& out) {
  check_is_wide("out", out.dtype);
  if (out.rows < 0) fail(Reason::kTensorShape, "out has {} rows, expected at least 0", out.rows);
  if (out.heads < 1) fail(Reason::kHeadCount, "out has {} heads, expected at least 1", out.heads);
  if (out.dim < 8 || out.dim > kMaxHeadDim || out.dim % 8 != 0) {
    unsupported(Reason::kHeadDim, "out has {} elements a head, expected a multiple of 8 in 8..{}", out.dim,
                kMaxHeadDim);
  }
}

void check_distinct(const Regions& written) {
  for (const Region& region : written) {
    const Region::Axis* axis = region.aliasing_axis();
    if (axis == nullptr) continue;
    fail(Reason::kTensorStride,
         "{}: the stride of its {} axis is {} elements, expected at least {}, so that no two elements share memory",
         region.name(), axis->name, axis->stride / region.element(), region.span_within(*axis) / region.element());
  }
  for (const Region& region : written) {
    for (const Region* other = &region + 1; other != written.end(); ++other) check_apart(*other, region);
  }
}

void check_apart(const Region& written, const Region& read) {
  if (meet(written, read)) {
    fail(Reason::kTensorOverlap, "{} overlaps {} in memory, expected them apart", written.name(), read.name());
  }
}

void check_apart(const Regions& written, const Regions& read) {
  for (const Region& w : written) {
    for (const Region& r : read) check_apart(w, r);
  }
}

}  // namespace fiw::support
