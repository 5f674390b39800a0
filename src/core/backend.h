// What a device backend does for the workspace: hold memory, upload plans, run attention. One class a backend.
//
// By the time a backend is called, every argument has been validated and every default resolved (sm_scale,
// head_dim_vo).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>

#include "core/schedule.h"
#include "fiw/attention.h"
#include "fiw/device_props.h"
#include "fiw/kv_cache.h"
#include "fiw/page_table.h"
#include "fiw/types.h"
#include "fiw/workspace.h"

namespace fiw {

class GraphBackend;

/// What decides a route: shapes and options, no pointers.
struct RouteRequest {
  StepSpec spec{};  ///< with resolved params
  std::int32_t page_size = 1;
  std::int32_t max_qo_len = 1;  ///< most query rows of one request
  std::int64_t total_rows = 0;
  std::int64_t total_kv = 0;      ///< tokens of K and V that a prefill call reads
  std::int64_t decode_pages = 0;  ///< of a decode call's table; 0: the route must not depend on the rest of the batch
  std::int32_t batch = 0;
  bool paged = true;  ///< false: ragged K/V
  bool graph = false;
  std::size_t scratch_limit = std::numeric_limits<std::size_t>::max();  ///< what a workspace of fixed size holds
  bool surplus_queries = false;                                         ///< some request has more query rows than keys
  bool any_qo_len = false;  ///< batch-invariant calls: the route must not depend on the query lengths in the batch
};

/// K and V of a ragged call: contiguous tokens, request after request.
struct RaggedKv {
  ConstTensor k{};
  ConstTensor v{};
  std::span<const std::int32_t> indptr{};  ///< [batch + 1]
};

/// Where a captured call finds its requests at each replay, on the device.
struct FixedTable {
  const std::int32_t* qo_indptr = nullptr;      ///< [batch + 1]
  const std::int32_t* indptr = nullptr;         ///< [batch + 1]
  const std::int32_t* indices = nullptr;        ///< [indptr[batch]]
  const std::int32_t* last_page_len = nullptr;  ///< [batch]
  const std::int32_t* kv_lens = nullptr;        ///< [batch]
};

/// One attention call, planned and placed.
struct AttentionLaunch {
  const ScheduleShape* shape = nullptr;
  std::byte* schedule = nullptr;  ///< the plan's slice of int scratch
  const AttentionParams* params = nullptr;
  ConstTensor q{};
  std::span<const std::int32_t> qo_indptr{};  ///< empty: uniform
  std::int32_t uniform_qo_len = 1;
  const KvCache* kv = nullptr;  ///< paged K/V with `table`, else null
  const PageTable* table = nullptr;
  const FixedTable* fixed = nullptr;  ///< a graph's, on backends that capture: read in place of `table`, else null
  const RaggedKv* ragged = nullptr;   ///< ragged K/V, else null
  Tensor out{};
  float* lse = nullptr;
  AttentionExtras extras{};
  std::span<std::byte> scratch{};  ///< at least scratch_bytes(...), 64-byte aligned, contents undefined
  Stream stream = nullptr;
};

/// Rows that would come before the first token of their request are passed over.
struct AppendLaunch {
  ConstTensor k{};
  ConstTensor v{};
  std::span<const std::int32_t> append_indptr{};
  const KvCache* kv = nullptr;
  const PageTable* table = nullptr;
  const FixedTable* fixed = nullptr;  ///< as AttentionLaunch::fixed
  Stream stream = nullptr;
};

struct MergeLaunch {
  std::span<const PartialState> parts{};
  Tensor out{};
  float* lse = nullptr;
  Stream stream = nullptr;
};

/// An array to bring to the host.
struct HostCopy {
  std::span<std::byte> to{};
  const void* from = nullptr;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const DeviceProps& props() const noexcept = 0;

  /// The kernel family that serves a request. Throws kUnsupported with the reason when none does, so "is it supported"
  /// and "what runs" cannot disagree.
  virtual KernelFamily route(const RouteRequest& request) const = 0;
  /// Float scratch that running takes: partial outputs and whatever the kernel itself needs.
  virtual std::size_t scratch_bytes(const ScheduleShape& shape, const StepSpec& spec) const = 0;

  /// Memory that kernels read and write; 64-byte aligned (CPU) or better. Null when out of memory.
  virtual std::byte* allocate(std::size_t bytes, Stream stream) = 0;
  virtual void release(std::byte* memory, std::size_t bytes, Stream stream) noexcept = 0;
  /// Host memory in which a schedule of `bytes` is written; on the CPU that is `device_slice` itself. Valid until
  /// upload().
  virtual std::span<std::byte> stage(std::byte* device_slice, std::size_t bytes) = 0;
  virtual void upload(std::byte* device_slice, std::span<const std::byte> staged, Stream stream) = 0;
  /// upload() into what the caller's own graphs read: in the order of `stream` itself, the default stream included.
  virtual void rewrite(std::byte* device_slice, std::span<const std::byte> staged, Stream stream) {
    upload(device_slice, staged, stream);
  }

  /// Copies arrays out of the device's memory, after all that was enqueued on `stream`, and waits for that.
  virtual void fetch(std::span<const HostCopy> arrays, Stream stream) = 0;

  virtual void attend(const AttentionLaunch& launch) = 0;
  virtual void append(const AppendLaunch& launch) = 0;
  virtual void merge(const MergeLaunch& launch) = 0;
  /// Null where calls compute at once.
  virtual GraphBackend* graphs() noexcept { return nullptr; }
};

/// The CPU backend with `num_threads` threads (0: OpenMP's default).
std::unique_ptr<Backend> make_cpu_backend(std::int32_t num_threads, const Allocator& allocator);
/// The backend of CUDA device `device`; throws kNoDevice when there is none. Not linked in without FIW_HAS_CUDA.
std::unique_ptr<Backend> make_cuda_backend(int device, const Allocator& allocator, std::optional<CudaRoute> route = {});

}  // namespace fiw
