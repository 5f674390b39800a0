// See convert.h.
#include "capi/convert.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

namespace fiw::capi {
namespace {

constexpr int kMaxRank = 5;

std::string device_name(int device) { return device == kCpuDevice ? "the CPU" : fmt::format("CUDA device {}", device); }

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool is(DLDataType dtype, int code, int bits) { return dtype.code == code && dtype.bits == bits && dtype.lanes == 1; }

[[noreturn]] void fail_dtype(const char* name, DLDataType dtype, const char* expected) {
  fail(Reason::kTensorDType, "{}: dtype {{code {}, bits {}, lanes {}}}, expected {}", name, int{dtype.code},
       int{dtype.bits}, int{dtype.lanes}, expected);
}

int device_index(const char* name, const DLDevice& device) {
  // The caller may have put any number there, and an enumeration must not hold one that it does not name.
  std::int32_t type = 0;
  static_assert(sizeof(type) == sizeof(device.device_type));
  std::memcpy(&type, &device.device_type, sizeof(type));
  if (type == kDLCPU) return kCpuDevice;
  if (type == kDLCUDA && device.device_id >= 0) return device.device_id;
  fail(Reason::kTensorDevice, "{}: device {{type {}, id {}}}, expected kDLCPU or {{kDLCUDA, id >= 0}}", name, type,
       device.device_id);
}

void check_on_host(const char* name, int device) {
  if (device != kCpuDevice) {
    fail(Reason::kTensorDevice, "{} is on {}, expected the CPU", name, device_name(device));
  }
}

/// A checked DLTensor with its strides filled in.
struct View {
  void* data = nullptr;
  int device = kCpuDevice;
  int rank = 0;
  bool empty = false;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  std::span<const std::int64_t> extents() const { return std::span(shape).first(static_cast<std::size_t>(rank)); }
};

/// Null, rank, shape, strides, device, address. `axes` says what was expected; `size` is an element's, in bytes.
View view(const char* name, const DLTensor* dl, int rank, const char* axes, std::size_t size) {
  if (dl == nullptr) fail(Reason::kTensorNull, "{} is null, expected a tensor {}", name, axes);
  if (dl->ndim != rank) fail(Reason::kTensorRank, "{}: rank {}, expected {} {}", name, dl->ndim, rank, axes);
  if (dl->shape == nullptr) fail(Reason::kTensorShape, "{}: shape is null, expected {}", name, axes);
  View result;
  result.rank = rank;
  result.device = device_index(name, dl->device);
  // Compact strides, innermost first. An axis of extent 1 takes the compact one, whatever the caller's says: no element
  // is ever reached through it. `reach` is the distance to the last element.
  std::int64_t compact = 1;
  std::int64_t reach = 0;
  bool overflow = false;
  for (int axis = rank - 1; axis >= 0; --axis) {
    const auto a = static_cast<std::size_t>(axis);
    const std::int64_t extent = dl->shape[axis];
    if (extent < 0) {
      fail(Reason::kTensorShape, "{}: axis {} has {} entries, expected at least 0", name, axis, extent);
    }
    const bool given = dl->strides != nullptr && extent > 1;
    result.shape[a] = extent;
    result.stride[a] = given ? dl->strides[axis] : compact;
    result.empty |= extent == 0;
    if (given && axis == rank - 1 && result.stride[a] != 1) {
      fail(Reason::kTensorStride, "{}: the stride of its last axis is {}, expected 1", name, result.stride[a]);
    }
    if (given && result.stride[a] < 1) {
      fail(Reason::kTensorStride, "{}: the stride of axis {} is {}, expected at least 1", name, axis, result.stride[a]);
    }
    if (extent == 0) continue;
    std::int64_t step = 0;
    overflow |= __builtin_mul_overflow(extent - 1, result.stride[a], &step);
    overflow |= __builtin_add_overflow(reach, step, &reach);
    overflow |= __builtin_mul_overflow(extent, result.stride[a], &compact);
  }
  overflow |= __builtin_mul_overflow(reach, static_cast<std::int64_t>(size), &reach);
  const auto base = reinterpret_cast<std::uintptr_t>(dl->data);
  std::uintptr_t address = 0;
  overflow |= __builtin_add_overflow(base, dl->byte_offset, &address);
  if (overflow) fail(Reason::kSizeOverflow, "{}: shape, strides or byte_offset reach past 64 bits", name);
  if (dl->data == nullptr) {
    if (!result.empty)
      fail(Reason::kTensorNull, "{}: data is null, expected {} elements", name, shape_text(result.extents()));
    return result;
  }
  if (address % size != 0) {
    fail(Reason::kTensorAlignment, "{}: data + byte_offset is {:#x}, expected a multiple of {}", name, address, size);
  }
  result.data = static_cast<std::byte*>(dl->data) + dl->byte_offset;
  return result;
}

void check_shape(const char* name, const View& view, std::initializer_list<std::int64_t> shape) {
  if (!std::ranges::equal(view.extents(), shape)) {
    fail(Reason::kTensorShape, "{}: shape {}, expected {}", name, shape_text(view.extents()), shape_text(shape));
  }
}

/// One stride per axis is checked by view(); compact means that rows follow each other without a gap.
void check_compact(const char* name, const View& view) {
  if (view.rank == 2 && view.shape[0] > 1 && view.stride[0] != view.shape[1]) {
    fail(Reason::kTensorStride, "{}: the stride of its rows is {}, expected {} (compact)", name, view.stride[0],
         view.shape[1]);
  }
}

void check_index_type(const char* name, const DLTensor* dl) {
  if (dl == nullptr) fail(Reason::kTensorNull, "{} is null, expected an int32 array", name);
  if (is(dl->dtype, kDLInt, 32)) return;
  if (is(dl->dtype, kDLInt, 64)) fail(Reason::kIndexType, "{}: int64, expected int32", name);
  fail(Reason::kIndexType, "{}: dtype {{code {}, bits {}, lanes {}}}, expected int32", name, int{dl->dtype.code},
       int{dl->dtype.bits}, int{dl->dtype.lanes});
}

View float_view(const char* name, const DLTensor* dl, int rank, const char* axes) {
  const View result = view(name, dl, rank, axes, sizeof(float));
  if (!is(dl->dtype, kDLFloat, 32)) fail_dtype(name, dl->dtype, "float32");
  check_compact(name, result);
  return result;
}

View byte_view(const char* name, const DLTensor* dl, bool booleans) {
  const View result = view(name, dl, 1, "[bytes]", 1);
  if (!is(dl->dtype, kDLUInt, 8) && !(booleans && is(dl->dtype, FIW_DL_BOOL, 8))) {
    fail_dtype(name, dl->dtype, booleans ? "uint8 or bool" : "uint8");
  }
  return result;
}

View index_view(const char* name, const DLTensor* dl, int rank, const char* axes) {
  check_index_type(name, dl);
  return view(name, dl, rank, axes, sizeof(std::int32_t));
}

void check_device_like(const char* name, int device, int expected, const char* like) {
  if (device != expected) {
    fail(Reason::kTensorDevice, "{} is on {}, expected {}, as {}", name, device_name(device), device_name(expected),
         like);
  }
}

std::int32_t narrow(const char* name, const char* axis, std::int64_t value) {
  if (value > std::numeric_limits<std::int32_t>::max()) {
    fail(Reason::kSizeOverflow, "{}: {} {}, more than int32 holds", name, value, axis);
  }
  return static_cast<std::int32_t>(value);
}

void check_reserved(const char* name, std::int32_t reserved) {
  if (reserved != 0) fail(Reason::kOptions, "{}.reserved is {}, expected 0", name, reserved);
}

/// What one of K and V looks like: extents and strides by meaning, not by layout.
struct Side {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int device = kCpuDevice;
  std::int64_t num_pages = 0;
  std::int32_t page_size = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  KvCache::Strides stride;
};

/// The axes of `view` from `page_axis` on, the page itself being axis 0.
Side side(const char* name, const View& view, DType dtype, bool hnd, std::size_t page_axis) {
  const std::size_t token = page_axis + (hnd ? 1 : 0);
  const std::size_t head = page_axis + (hnd ? 0 : 1);
  Side result;
  result.data = view.data;
  result.dtype = dtype;
  result.device = view.device;
  result.num_pages = view.shape[0];
  result.page_size = narrow(name, "tokens a page", view.shape[token]);
  result.num_kv_heads = narrow(name, "heads", view.shape[head]);
  result.head_dim = narrow(name, "elements a head", view.shape[page_axis + 2]);
  result.stride = {.page = view.stride[0], .token = view.stride[token], .head = view.stride[head]};
  return result;
}

KvCache assemble(const Side& k, const Side& v) {
  KvCache result;
  result.k = k.data;
  result.v = v.data;
  result.dtype = k.dtype;
  result.device = k.device;
  result.num_pages = k.num_pages;
  result.page_size = k.page_size;
  result.num_kv_heads = k.num_kv_heads;
  result.head_dim_qk = k.head_dim;
  result.head_dim_vo = v.head_dim;
  result.k_stride = k.stride;
  result.v_stride = v.stride;
  return result;
}

KvCache separate(const fiw_kv_cache& cache, bool hnd) {
  const char* axes =
      hnd ? "[num_pages, num_kv_heads, page_size, head_dim]" : "[num_pages, page_size, num_kv_heads, head_dim]";
  const auto read = [&](const char* name, const DLTensor* dl) {
    if (dl == nullptr) fail(Reason::kTensorNull, "{} is null, expected kv.k and kv.v, or kv.kv alone", name);
    const DType dtype = element_type(name, dl->dtype);
    return side(name, view(name, dl, 4, axes, size_of(dtype)), dtype, hnd, 1);
  };
  const Side k = read("kv.k", cache.k);
  const Side v = read("kv.v", cache.v);
  if (v.dtype != k.dtype) {
    fail(Reason::kTensorDType, "kv.v is {}, expected {}, as kv.k", to_string(v.dtype), to_string(k.dtype));
  }
  check_device_like("kv.v", v.device, k.device, "kv.k");
  const auto same = [](const char* axis, std::int64_t v_extent, std::int64_t k_extent) {
    if (v_extent != k_extent) {
      fail(Reason::kTensorShape, "kv.v has {} {}, expected {}, as kv.k", v_extent, axis, k_extent);
    }
  };
  same("pages", v.num_pages, k.num_pages);
  same("tokens a page", v.page_size, k.page_size);
  same("heads", v.num_kv_heads, k.num_kv_heads);
  return assemble(k, v);
}

KvCache interleaved(const fiw_kv_cache& cache, bool hnd) {
  if (cache.k != nullptr || cache.v != nullptr) {
    fail(Reason::kOptions, "kv.kv is given beside kv.k or kv.v, expected kv.k and kv.v, or kv.kv alone");
  }
  const DType dtype = element_type("kv.kv", cache.kv->dtype);
  const char* axes =
      hnd ? "[num_pages, 2, num_kv_heads, page_size, head_dim]" : "[num_pages, 2, page_size, num_kv_heads, head_dim]";
  const View both = view("kv.kv", cache.kv, 5, axes, size_of(dtype));
  if (both.shape[1] != 2)
    fail(Reason::kTensorShape, "kv.kv: axis 1 has {} entries, expected 2: K and V", both.shape[1]);
  const Side k = side("kv.kv", both, dtype, hnd, 2);
  Side v = k;
  if (k.data != nullptr) {
    v.data = static_cast<std::byte*>(k.data) + both.stride[1] * static_cast<std::int64_t>(size_of(dtype));
  }
  return assemble(k, v);
}

}  // namespace

FlashInferWorkspace& any_workspace(fiw_workspace* ws) {
  return *reinterpret_cast<FlashInferWorkspace*>(&require(ws, "ws"));
}

const FlashInferWorkspace& any_workspace(const fiw_workspace* ws) {
  return *reinterpret_cast<const FlashInferWorkspace*>(&require(ws, "ws"));
}

FlashInferWorkspace& open_workspace(fiw_workspace* ws) {
  FlashInferWorkspace& workspace = any_workspace(ws);
  workspace.check_ready();
  return workspace;
}

const PageTable& page_table(const fiw_page_table* table) {
  if (table == nullptr) fail(Reason::kTableNull, "table is null, expected a page table");
  return table->table;
}

DType element_type(const char* name, DLDataType dtype) {
  if (is(dtype, kDLFloat, 32)) return DType::kFloat32;
  if (is(dtype, kDLFloat, 16)) return DType::kFloat16;
  if (is(dtype, kDLBfloat, 16)) return DType::kBFloat16;
  if (is(dtype, FIW_DL_FLOAT8_E4M3FN, 8)) return DType::kFloat8E4M3;
  if (is(dtype, FIW_DL_FLOAT8_E5M2, 8)) return DType::kFloat8E5M2;
  fail_dtype(name, dtype, "float32, float16, bfloat16, float8_e4m3fn or float8_e5m2");
}

Tensor tensor(const char* name, const DLTensor* dl) {
  constexpr const char* kAxes = "[rows, heads, dim]";
  if (dl == nullptr) fail(Reason::kTensorNull, "{} is null, expected a tensor {}", name, kAxes);
  const DType dtype = element_type(name, dl->dtype);
  const View v = view(name, dl, 3, kAxes, size_of(dtype));
  return {v.data, dtype, v.shape[0], v.shape[1], v.shape[2], v.stride[0], v.stride[1], v.device};
}

float* floats(const char* name, const DLTensor* dl, std::initializer_list<std::int64_t> shape, int device,
              const char* like) {
  const View v = float_view(name, dl, static_cast<int>(shape.size()), shape_text(shape).c_str());
  check_shape(name, v, shape);
  check_device_like(name, v.device, device, like);
  return static_cast<float*>(v.data);
}

float* optional_lse(const DLTensor* dl, const ConstTensor& q, const ConstTensor& out) {
  if (dl == nullptr || q.rows != out.rows || q.heads != out.heads) return nullptr;
  return floats("lse", dl, {q.rows, q.heads}, q.device, "q");
}

std::span<float> host_floats(const char* name, const DLTensor* dl) {
  const View v = float_view(name, dl, 1, "[n]");
  check_on_host(name, v.device);
  return {static_cast<float*>(v.data), static_cast<std::size_t>(v.shape[0])};
}

std::span<std::int32_t> host_indices(const char* name, const DLTensor* dl) {
  const View v = index_view(name, dl, 1, "[n]");
  check_on_host(name, v.device);
  return {static_cast<std::int32_t*>(v.data), static_cast<std::size_t>(v.shape[0])};
}

std::span<std::int32_t> optional_host_indices(const char* name, const DLTensor* dl) {
  return dl == nullptr ? std::span<std::int32_t>{} : host_indices(name, dl);
}

std::span<std::uint8_t> host_bytes(const char* name, const DLTensor* dl, bool booleans) {
  const View v = byte_view(name, dl, booleans);
  check_on_host(name, v.device);
  return {static_cast<std::uint8_t*>(v.data), static_cast<std::size_t>(v.shape[0])};
}

IndexMatrix host_index_matrix(const char* name, const DLTensor* dl) {
  const View v = index_view(name, dl, 2, "[batch, max_pages]");
  check_on_host(name, v.device);
  narrow(name, "columns", v.shape[1]);
  if (v.shape[0] > 1 && v.stride[0] < v.shape[1]) {
    fail(Reason::kTensorStride, "{}: the stride of its rows is {}, expected at least {}", name, v.stride[0],
         v.shape[1]);
  }
  return {static_cast<std::int32_t*>(v.data), v.shape[0], v.shape[1], v.stride[0]};
}

DevicePageTable device_page_table(const char* name, const fiw_device_page_table* table, int device) {
  const fiw_device_page_table& given = require_struct(table, name);
  check_reserved(name, given.reserved);
  const auto read = [&](const char* field, const DLTensor* dl) -> std::span<const std::int32_t> {
    const std::string array = fmt::format("{}.{}", name, field);
    const View v = index_view(array.c_str(), dl, 1, "[n]");
    check_device_like(array.c_str(), v.device, device, "the workspace");
    return {static_cast<const std::int32_t*>(v.data), static_cast<std::size_t>(v.shape[0])};
  };
  return {.page_size = given.page_size,
          .num_pages = given.num_pages,
          .indptr = read("indptr", given.indptr),
          .indices = read("indices", given.indices),
          .last_page_len = read("last_page_len", given.last_page_len),
          .version = given.version};
}

KvCache kv_cache(const fiw_kv_cache* cache) {
  const fiw_kv_cache& given = require_struct(cache, "kv");
  check_reserved("kv", given.reserved);
  if (given.layout != FIW_LAYOUT_NHD && given.layout != FIW_LAYOUT_HND) {
    fail(Reason::kOptions, "kv.layout is {}, expected FIW_LAYOUT_NHD (0) or FIW_LAYOUT_HND (1)", given.layout);
  }
  const bool hnd = given.layout == FIW_LAYOUT_HND;
  KvCache result = given.kv == nullptr ? separate(given, hnd) : interleaved(given, hnd);
  result.k_scale = given.k_scale;
  result.v_scale = given.v_scale;
  const auto head_scale = [&](const char* name, const DLTensor* dl) {
    return dl == nullptr ? nullptr : floats(name, dl, {result.num_kv_heads}, result.device, "the cache");
  };
  result.k_head_scale = head_scale("kv.k_head_scale", given.k_head_scale);
  result.v_head_scale = head_scale("kv.v_head_scale", given.v_head_scale);
  return result;
}

AttentionExtras extras(const fiw_attention_extras* extras, const ConstTensor& q, std::size_t batch) {
  AttentionExtras result;
  if (extras == nullptr) return result;
  const fiw_attention_extras& given = require_struct(extras, "extras");
  if (given.sinks != nullptr) result.sinks = floats("extras.sinks", given.sinks, {q.heads}, q.device, "q");
  if (given.alibi_slopes != nullptr) {
    result.alibi_slopes = floats("extras.alibi_slopes", given.alibi_slopes, {q.heads}, q.device, "q");
  }
  if ((given.mask == nullptr) != (given.mask_indptr == nullptr)) {
    fail(Reason::kMask, "extras.{} is null beside a given extras.{}, expected both or none",
         given.mask == nullptr ? "mask" : "mask_indptr", given.mask == nullptr ? "mask_indptr" : "mask");
  }
  if (given.mask == nullptr) return result;
  const View mask = byte_view("extras.mask", given.mask, false);
  const View indptr = index_view("extras.mask_indptr", given.mask_indptr, 1, "[batch + 1]");
  check_device_like("extras.mask", mask.device, q.device, "q");
  check_device_like("extras.mask_indptr", indptr.device, q.device, "q");
  check_shape("extras.mask_indptr", indptr, {static_cast<std::int64_t>(batch) + 1});
  result.mask_indptr = static_cast<const std::int32_t*>(indptr.data);
  if (q.device == kCpuDevice) {
    for (std::size_t r = 0; r <= batch; ++r) {
      if (result.mask_indptr[r] < 0 || result.mask_indptr[r] > mask.shape[0]) {
        fail(Reason::kMask, "extras.mask_indptr[{}] is {}, expected 0..{}, the bytes of extras.mask", r,
             result.mask_indptr[r], mask.shape[0]);
      }
    }
  }
  // A mask of no bytes is still a mask, and null would say that there is none.
  static constexpr std::uint8_t kNoBytes = 0;
  result.mask = mask.data == nullptr ? &kNoBytes : static_cast<const std::uint8_t*>(mask.data);
  return result;
}

AttentionParams params(const char* name, const fiw_attention_params* params) {
  const fiw_attention_params& given = require_struct(params, name);
  return {.num_qo_heads = given.num_qo_heads,
          .num_kv_heads = given.num_kv_heads,
          .head_dim_qk = given.head_dim_qk,
          .head_dim_vo = given.head_dim_vo,
          .sm_scale = given.sm_scale,
          .causal = given.causal != 0,
          .window_left = given.window_left,
          .logits_soft_cap = given.logits_soft_cap};
}

PlanOptions plan_options(const char* name, const fiw_plan_options* options) {
  if (options == nullptr) return {};
  const fiw_plan_options& given = require_struct(options, name);
  return {.batch_invariant = given.batch_invariant != 0, .fixed_split_tokens = given.fixed_split_tokens};
}

WorkspaceLimits limits(const char* name, const fiw_workspace_limits* limits) {
  const fiw_workspace_limits& given = require_struct(limits, name);
  check_reserved(name, given.reserved);
  WorkspaceLimits result;
  result.params = params(fmt::format("{}.params", name).c_str(), given.params);
  result.max_batch = given.max_batch;
  result.max_total_qo = given.max_total_qo;
  result.max_verify_window = given.max_verify_window;
  result.max_kv_len = given.max_kv_len;
  result.page_size = given.page_size;
  result.kv_dtype = element_type(fmt::format("{}.kv_dtype", name).c_str(), given.kv_dtype);
  result.graph = given.graph != 0;
  return result;
}

StepSpec step_spec(const char* name, const fiw_step_spec* spec) {
  const fiw_step_spec& given = require_struct(spec, name);
  const auto field = [name](const char* part) { return fmt::format("{}.{}", name, part); };
  return {.params = params(field("params").c_str(), given.params),
          .q_dtype = element_type(field("q_dtype").c_str(), given.q_dtype),
          .kv_dtype = element_type(field("kv_dtype").c_str(), given.kv_dtype),
          .lse = given.lse != 0,
          .sinks = given.sinks != 0,
          .alibi = given.alibi != 0,
          .custom_mask = given.custom_mask != 0};
}

PagedCall paged_call(const DLTensor* q, const fiw_kv_cache* kv, std::int32_t batch, const DLTensor* out,
                     const DLTensor* lse, const fiw_attention_extras* given) {
  PagedCall call;
  call.q = tensor("q", q);
  call.kv = kv_cache(kv);
  call.out = tensor("out", out);
  call.lse = optional_lse(lse, call.q, call.out);
  call.extras = extras(given, call.q, static_cast<std::size_t>(batch));
  return call;
}

}  // namespace fiw::capi
