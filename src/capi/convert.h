// From what C callers pass (DLTensor, sized structs, handles) to the C++ API's values. Every fault names the argument.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "capi/guard.h"
#include "core/fail.h"
#include "fiw/fiw.h"
#include "fiw/workspace.h"

/// What the opaque handles are. A fiw_workspace is the fiw::FlashInferWorkspace object itself.
struct fiw_page_table {
  fiw::PageTable table;
};
struct fiw_step {
  fiw::AttentionStep step;
};

namespace fiw::capi {

/// A pointer that must not be null.
template <class T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) fail(Reason::kOptions, "{} is null, expected a live handle or struct", name);
  return *pointer;
}

/// A struct of a size that this library knows. There is one version of each so far.
template <class Struct>
Struct& require_struct(Struct* pointer, const char* name) {
  Struct& object = require(pointer, name);
  if (object.struct_size != sizeof(Struct)) {
    fail(Reason::kStructSize, "{}.struct_size is {}, expected {}", name, object.struct_size, sizeof(Struct));
  }
  return object;
}

FlashInferWorkspace& any_workspace(fiw_workspace* ws);
const FlashInferWorkspace& any_workspace(const fiw_workspace* ws);
/// A workspace that is neither closed nor busy: said before any other argument is judged.
FlashInferWorkspace& open_workspace(fiw_workspace* ws);

/// Runs `make` and hands its result out; null on failure.
template <class Handle, class Make>
fiw_status hand_out(Handle** out, fiw_error* err, const Make& make) noexcept {
  if (out != nullptr) *out = nullptr;
  return guard(err, [&] {
    Handle*& place = require(out, "out");  // before anything is made
    place = make();
  });
}

/// As above for what a workspace makes.
template <class Handle, class Make>
fiw_status hand_out(fiw_workspace* ws, Handle** out, fiw_error* err, const Make& make) noexcept {
  if (out != nullptr) *out = nullptr;
  return guard(err, [&] {
    FlashInferWorkspace& workspace = open_workspace(ws);
    Handle*& place = require(out, "out");
    place = make(workspace);
  });
}

const PageTable& page_table(const fiw_page_table* table);

DType element_type(const char* name, DLDataType dtype);

/// A [rows, heads, dim] tensor of any element type.
Tensor tensor(const char* name, const DLTensor* dl);
/// Compact float32 of exactly this shape, on the device of the tensor named `like`.
float* floats(const char* name, const DLTensor* dl, std::initializer_list<std::int64_t> shape, int device,
              const char* like);
/// `floats` [q.rows, q.heads]; null for null. Where q and out disagree, the call will fail for one of them, and lse is
/// not judged by the wrong one.
float* optional_lse(const DLTensor* dl, const ConstTensor& q, const ConstTensor& out);
/// Compact float32 [n] on the CPU.
std::span<float> host_floats(const char* name, const DLTensor* dl);
/// Compact int32 [n] on the CPU.
std::span<std::int32_t> host_indices(const char* name, const DLTensor* dl);
std::span<std::int32_t> optional_host_indices(const char* name, const DLTensor* dl);
/// Compact uint8 [n] on the CPU; bool too if `booleans`.
std::span<std::uint8_t> host_bytes(const char* name, const DLTensor* dl, bool booleans = false);

/// Rows of int32 on the CPU, any row stride.
struct IndexMatrix {
  std::int32_t* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;
};
IndexMatrix host_index_matrix(const char* name, const DLTensor* dl);

/// Its arrays must lie on the workspace's `device`.
DevicePageTable device_page_table(const char* name, const fiw_device_page_table* table, int device);
KvCache kv_cache(const fiw_kv_cache* cache);
/// `extras` may be null. The tensors belong to `q`, and the mask to `batch` requests.
AttentionExtras extras(const fiw_attention_extras* extras, const ConstTensor& q, std::size_t batch);
AttentionParams params(const char* name, const fiw_attention_params* params);
PlanOptions plan_options(const char* name, const fiw_plan_options* options);
WorkspaceLimits limits(const char* name, const fiw_workspace_limits* limits);
StepSpec step_spec(const char* name, const fiw_step_spec* spec);

/// The tensors of one layer's attention over pages.
struct PagedCall {
  Tensor q;
  KvCache kv;
  Tensor out;
  float* lse = nullptr;
  AttentionExtras extras;
};
/// `given` are the extras of `batch` requests.
PagedCall paged_call(const DLTensor* q, const fiw_kv_cache* kv, std::int32_t batch, const DLTensor* out,
                     const DLTensor* lse, const fiw_attention_extras* given);

}  // namespace fiw::capi
