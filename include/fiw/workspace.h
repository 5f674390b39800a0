// The workspace: scratch memory, plans, plan caches and attention calls of one device or tensor-parallel rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "fiw/attention.h"
#include "fiw/device_props.h"
#include "fiw/error.h"
#include "fiw/kv_cache.h"
#include "fiw/page_table.h"
#include "fiw/types.h"

/// The C ABI's view of a workspace; see fiw.h.
struct fiw_workspace;

namespace fiw {

namespace detail {
class WorkspaceState;
struct Plan;
}  // namespace detail

/// The largest work a workspace will be asked for, so that its scratch is sized once at start.
struct WorkspaceLimits {
  AttentionParams params{};            ///< the widest layer
  std::int32_t max_batch = 0;          ///< requests in one call
  std::int32_t max_total_qo = 0;       ///< query rows in one prefill call; 0: no prefill
  std::int32_t max_verify_window = 0;  ///< tokens a request in a verify call; 0: no verify
  std::int32_t max_kv_len = 0;         ///< tokens of one request
  std::int32_t page_size = 16;
  DType kv_dtype = DType::kBFloat16;
  bool graph = false;  ///< decode and verify run from captured graphs, whose grids are padded
};

/// Memory from the caller's own pool, in place of cudaMallocAsync and cudaFreeAsync, or of the heap on the CPU: all
/// scratch, plans and copies of page tables on the device. Pinned host memory for uploads is not asked for here.
///
/// Both callbacks must be set, may be called from any thread that calls the workspace or lets go of a step, and must
/// neither throw nor call back into the workspace. They, and `context`, must live until the workspace and its steps are
/// gone.
struct Allocator {
  /// At least `bytes` (> 0) on the workspace's device, at a multiple of `alignment`; null: out of memory. On CUDA that
  /// device is current, `stream` is never null (the workspace has one of its own for calls without), and the memory is
  /// for work that is enqueued on it from now on.
  void* (*allocate)(void* context, std::size_t bytes, std::size_t alignment, Stream stream) = nullptr;
  /// Takes back what `allocate` gave for `bytes`. On CUDA, work that `stream` holds already may still use it: what is
  /// enqueued there later may not.
  void (*free)(void* context, void* memory, std::size_t bytes, Stream stream) = nullptr;
  void* context = nullptr;  ///< passed through
};

/// How plans are made. Part of every plan's key.
struct PlanOptions {
  /// Cut every request's keys at multiples of `fixed_split_tokens`, whatever else is in the batch: a request's result
  /// is then the same bit for bit in any batch, on any number of threads.
  bool batch_invariant = false;
  std::int32_t fixed_split_tokens = 2048;

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

/// Which CUDA kernels serve a call, wherever they can; docs/cuda-routes.md describes them. For tests and measurements.
enum class CudaRoute : std::uint8_t {
  kTable,        ///< what is expected to take the least time
  kCore,         ///< FlashInfer's CUDA-core decode
  kTile,         ///< FlashInfer's FA2 tiles
  kHopper,       ///< FA3 over contiguous K and V
  kHopperPaged,  ///< FA3 over pages
  kAny,          ///< the general kernel, which serves everything
  kStream,       ///< our own decode and verify kernels
  kPrefill,      ///< our own prefill kernels
};

struct WorkspaceOptions {
  std::size_t workspace_bytes = 0;  ///< float scratch hint; 0: sized from `limits`, else a default that grows
  /// Never grow: what does not fit is kWorkspaceTooSmall with the bytes needed. Needs `workspace_bytes` or `limits`.
  bool fixed_size = false;
  std::optional<WorkspaceLimits> limits{};
  std::int32_t num_threads = 0;     ///< CPU only; 0: OpenMP's default
  std::int32_t cache_entries = 16;  ///< plans kept in each of the three scopes, and device page tables (1..1024)
  PlanOptions plan{};
  /// Captured speculative-verify graphs; unset: on when the environment has SMILE_VERIFY_CUDA_GRAPH=1 at create, the
  /// name that its first caller, an engine, gave it. On the CPU there are no graphs, and it changes nothing.
  std::optional<bool> verify_cuda_graph{};
  /// Unset: as FIW_CUDA_ROUTE in the environment says at create ("core", "tile", "hopper", "hopper_paged", "any",
  /// "stream", "prefill"), or kTable. Without effect on the CPU.
  std::optional<CudaRoute> cuda_route{};
  Allocator allocator{};  ///< unset callbacks: the backend's own
};

/// Counters of one cache scope since creation. `entries` and `bytes` are what is held now.
struct CacheStats {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t evictions = 0;      ///< plans dropped to make room
  std::uint64_t invalidations = 0;  ///< plans dropped by an invalidate call
  std::uint64_t entries = 0;
  std::uint64_t bytes = 0;  ///< schedule bytes of the live plans
};

struct WorkspaceStats {
  CacheStats decode;
  CacheStats prefill;
  CacheStats verify;
  std::size_t float_scratch_bytes = 0;  ///< capacity held
  std::size_t float_scratch_peak = 0;   ///< most that one call needed
  std::size_t int_scratch_bytes = 0;    ///< capacity held for schedules
  std::uint64_t plan_nanoseconds = 0;   ///< time in lookups and planning
  std::uint64_t run_nanoseconds = 0;    ///< time in attention calls (host time; on the CPU that is the work)
  std::uint64_t tables_known = 0;       ///< device page tables that were known by their version
  std::uint64_t tables_copied = 0;      ///< device page tables that were copied to the host
};

/// What a step was planned as.
struct PlanInfo {
  std::int32_t batch = 0;
  std::int32_t items = 0;            ///< work items before the kernel's own second grid axis
  std::int32_t padded_items = 0;     ///< grid size under graphs; else equal to items
  std::int32_t kv_chunk_tokens = 0;  ///< keys an item covers; 0: all of a request's
  std::int32_t tile_rows = 0;        ///< packed (token, head) rows of a query tile; 0: one tile a request
  bool split_kv = false;
  bool cache_hit = false;          ///< found, not made, by the call that returned the step
  std::size_t schedule_bytes = 0;  ///< the plan's own slice of int scratch
  std::size_t scratch_bytes = 0;   ///< float scratch that running it takes
};

/// Element types and options of a step's calls, fixed when it is planned.
struct StepSpec {
  AttentionParams params{};
  DType q_dtype = DType::kBFloat16;  ///< of q and out
  DType kv_dtype = DType::kBFloat16;
  bool lse = false;          ///< whether runs may ask for the LSE
  bool sinks = false;        ///< whether runs pass AttentionExtras::sinks
  bool alibi = false;        ///< ... alibi_slopes
  bool custom_mask = false;  ///< ... mask and mask_indptr

  friend bool operator==(const StepSpec&, const StepSpec&) = default;
};

/// A planned step: `run` once a layer. Looks nothing up, allocates nothing, and refuses tensors that differ from the
/// plan.
///
/// Holds its plan and page table alive, and keeps working after an invalidate call; after the workspace is closed,
/// `run` throws kClosed. One thread at a time, like the workspace.
class AttentionStep {
 public:
  AttentionStep() = default;

  /// q [total_q, num_qo_heads, head_dim_qk], out [total_q, num_qo_heads, head_dim_vo] of the same dtype, lse float32
  /// [total_q, num_qo_heads] or null. Out and lse share no memory with each other or with anything that is read, and no
  /// two elements of out share theirs. On the CPU the result is there on return; on CUDA it is enqueued.
  void run(const ConstTensor& q, const KvCache& kv, const Tensor& out, float* lse = nullptr,
           const AttentionExtras& extras = {}, Stream stream = nullptr) const;

  /// Throws kClosed or kBusy, as `run` would now: for bindings that have arguments of their own to check after that.
  void check_ready() const;
  const PageTable& page_table() const noexcept { return table_; }
  PlanInfo info() const;

 protected:
  friend class detail::WorkspaceState;
  std::shared_ptr<detail::WorkspaceState> workspace_;
  std::shared_ptr<detail::Plan> plan_;
  PageTable table_;
  bool cache_hit_ = false;
};

/// One query token a request.
class DecodeStep final : public AttentionStep {};
/// The last qo_len tokens of each request.
class PrefillStep final : public AttentionStep {};
/// The last `window` tokens of each request.
class VerifyStep final : public AttentionStep {};

/// The opaque workspace / plan handle, one per CUDA device or tensor-parallel rank.
///
/// One thread at a time: a second thread in a call gets kBusy and changes nothing. Workspaces share no mutable state,
/// so each may have its own thread. Results of the calls are ordered by the caller's stream on CUDA and complete on
/// return on the CPU. Every call validates all its arguments before any work, planning included: one that is refused
/// for an argument leaves caches, scratch and counters as they were.
class FlashInferWorkspace {
 public:
  /// A workspace on CUDA device `device_index`, or on the CPU (-1). Null when that backend is not compiled in. Throws
  /// when the device does not exist (kNoDevice) or memory is short (kOutOfMemory). The current CUDA device is left as
  /// found.
  static std::unique_ptr<FlashInferWorkspace> create(int device_index, std::size_t workspace_bytes = 0);
  static std::unique_ptr<FlashInferWorkspace> create(int device_index, const WorkspaceOptions& options);

  ~FlashInferWorkspace();
  FlashInferWorkspace(const FlashInferWorkspace&) = delete;
  FlashInferWorkspace& operator=(const FlashInferWorkspace&) = delete;

  /// The native handle for calls through the C ABI, valid until close(); null afterwards.
  fiw_workspace* handle() const noexcept;
  /// Frees everything once the work that uses it is done. A second call does nothing.
  void close() noexcept;
  bool closed() const noexcept;
  /// Throws kClosed or kBusy, as a call would now: for bindings that have arguments of their own to check after that.
  void check_ready() const;

  /// Drops decode and prefill plans, on CUDA with the K/V gathered for prefills, and the versions of device page
  /// tables; the verify plan stays. No-ops on a closed workspace; kBusy if a call is running.
  void invalidate_runtime_cache();
  /// Drops prefill plans, and what was gathered for them, only.
  void invalidate_prefill_runtime_cache();
  /// Drops verify plans only.
  void invalidate_verify_runtime_cache();

  // --- page tables in device memory
  // ---------------------------------------------------------------------------------------

  /// The contents of `table` as a PageTable, for the calls below: once a step, which is how the workspace knows of one.
  ///
  /// Where these very arrays were read before with this version, and it is not 0: what was read then, at once. Else
  /// the arrays are copied to the host in stream order and the call waits for that, so it is not for streams under
  /// capture. Contents equal to those of a table read before give that table back, whose plans and device copies the
  /// layers of the step then find without comparing; others are validated as PageTable::from_csr does, so that nothing
  /// is launched with a page outside the cache. Once read, the arrays may change. Throws fiw::Error naming the
  /// argument, or request, value and limit.
  PageTable read_table(const DevicePageTable& table, Stream stream = nullptr);

  // --- planning: validate, look the plan up or make it, return a step
  // -------------------------------------------------

  /// One query token for each of the table's requests.
  DecodeStep plan_decode(const PageTable& table, const StepSpec& spec);
  /// `qo_indptr` [batch + 1]: request r's queries are rows qo_indptr[r] .. qo_indptr[r+1), its last tokens; 0 is legal.
  PrefillStep plan_prefill(std::span<const std::int32_t> qo_indptr, const PageTable& table, const StepSpec& spec);
  /// `window` query tokens for every request (1..64): the rows of request r are r * window ...
  VerifyStep plan_verify(std::int32_t window, const PageTable& table, const StepSpec& spec);

  // --- attention calls: plan_* and run in one
  // ---------------------------------------------------------------------------

  void decode(const ConstTensor& q, const KvCache& kv, const PageTable& table, const AttentionParams& params,
              const Tensor& out, float* lse = nullptr, const AttentionExtras& extras = {}, Stream stream = nullptr);
  void prefill(const ConstTensor& q, std::span<const std::int32_t> qo_indptr, const KvCache& kv, const PageTable& table,
               const AttentionParams& params, const Tensor& out, float* lse = nullptr,
               const AttentionExtras& extras = {}, Stream stream = nullptr);
  void verify(const ConstTensor& q, std::int32_t window, const KvCache& kv, const PageTable& table,
              const AttentionParams& params, const Tensor& out, float* lse = nullptr,
              const AttentionExtras& extras = {}, Stream stream = nullptr);
  /// Attention over k, v [total_kv, num_kv_heads, head_dim] with no cache; `kv_indptr` [batch + 1] as `qo_indptr`.
  void ragged_prefill(const ConstTensor& q, std::span<const std::int32_t> qo_indptr, const ConstTensor& k,
                      const ConstTensor& v, std::span<const std::int32_t> kv_indptr, const AttentionParams& params,
                      const Tensor& out, float* lse = nullptr, const AttentionExtras& extras = {},
                      Stream stream = nullptr);

  /// Writes new tokens into the cache: rows append_indptr[r] .. append_indptr[r+1) of k and v become the last tokens of
  /// request r, whose `table` entry already counts them. Converts to the cache's dtype, dividing by its scales and
  /// saturating (fp8, fp16). A page that two requests share must not be appended to through both. No two slots of the
  /// cache may share memory, of K, of V or of one each, nor may k and v lie in it; K and V may interleave.
  void append_kv(const ConstTensor& k, const ConstTensor& v, std::span<const std::int32_t> append_indptr,
                 const KvCache& kv, const PageTable& table, Stream stream = nullptr);

  /// Combines attention over disjoint sets of keys into attention over their union. All parts and `out` have equal
  /// shapes and dtypes; `out` and `lse` may be those of a part, and otherwise share no memory with any. Any number of
  /// parts (>= 1); empty ones (lse = -inf) carry no weight.
  void merge_states(std::span<const PartialState> parts, const Tensor& out, float* lse = nullptr,
                    Stream stream = nullptr);

  // --- what it holds
  // ------------------------------------------------------------------------------------------------------

  int device_index() const noexcept;
  const DeviceProps& device_props() const noexcept;
  /// Counters and sizes; zeros after close(). kBusy while a call runs in another thread.
  WorkspaceStats stats() const;
  bool verify_cuda_graph() const noexcept;

  /// Float scratch bytes that suffice for any call within `limits` on such a device. Host only; no device is touched.
  /// Where `limits` allow prefill, a Hopper device's include the copy of all requests' K and V, up to 4 GiB, that long
  /// prefills are read from; a workspace of fixed size that has less serves these without a copy, more slowly.
  static std::size_t required_workspace(const DeviceProps& device, const WorkspaceLimits& limits,
                                        const PlanOptions& options = {});
  /// True when this build has a backend for `kind`.
  static bool compiled_with(DeviceKind kind) noexcept;

 private:
  friend class GraphSession;
  explicit FlashInferWorkspace(std::shared_ptr<detail::WorkspaceState> state) noexcept;
  std::shared_ptr<detail::WorkspaceState> state_;
};

}  // namespace fiw
