// What a workspace owns: a backend, int and float scratch, the three plan caches, and the order of events in a call.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/backend.h"
#include "core/device_tables.h"
#include "core/plan_cache.h"
#include "fiw/workspace.h"

namespace fiw::detail {

/// Kept from plan to plan, so that a steady state allocates nothing.
struct HopperScratch {
  std::vector<std::int32_t> kv_indptr;
  std::vector<std::byte> bytes;
};

class WorkspaceState : public std::enable_shared_from_this<WorkspaceState> {
 public:
  /// `options` have been checked.
  WorkspaceState(int device_index, std::unique_ptr<Backend> backend, const WorkspaceOptions& options);
  ~WorkspaceState();

  /// Waits for a call in flight on another thread, then frees everything that no step holds.
  void close() noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  enum class Scope : std::uint8_t { kRuntime, kPrefill, kVerify };
  void invalidate(Scope scope);

  PageTable read_table(const DevicePageTable& table, Stream stream);

  /// What is planned: the same facts whatever the kind.
  struct Request {
    PlanKind kind = PlanKind::kDecode;
    const PageTable* table = nullptr;           ///< null for ragged
    std::span<const std::int32_t> qo_indptr{};  ///< prefill and ragged only; the other kinds are uniform
    std::int32_t uniform_qo_len = 1;
    std::span<const std::int32_t> kv_lens{};  ///< ragged only; filled in by call()
  };
  /// The tensors of one layer.
  struct Operands {
    ConstTensor q{};
    const KvCache* kv = nullptr;
    const RaggedKv* ragged = nullptr;
    Tensor out{};
    float* lse = nullptr;
    AttentionExtras extras{};
    Stream stream = nullptr;
  };

  template <class Step>
  Step plan_step(const Request& request, const StepSpec& spec);
  /// Plan and run in one.
  void call(Request request, const Operands& operands, const AttentionParams& params);
  void run(const AttentionStep& step, const Operands& operands);
  void append(const AppendLaunch& launch);
  void merge(const MergeLaunch& launch);

  /// Throws what a call that came now would: kClosed or kBusy.
  void check_ready() const;
  WorkspaceStats stats() const;
  int device_index() const noexcept { return device_index_; }
  const DeviceProps& device_props() const noexcept { return props_; }
  const WorkspaceOptions& options() const noexcept { return options_; }
  bool verify_cuda_graph() const noexcept { return verify_cuda_graph_; }

 private:
  friend class GraphState;  // whose calls are this workspace's too
  struct Found {
    std::shared_ptr<Plan> plan;
    bool hit = false;
  };
  Found plan(const Request& request, const StepSpec& spec);
  // The rest expects the caller to hold busy_.
  /// `spec` is resolved, and the request has `total_rows` query rows.
  Found find_or_make(const Request& request, const StepSpec& spec, std::int64_t total_rows, Stream stream);
  std::shared_ptr<Plan> make(const PlanKeyView& key, const Request& request, Stream stream);
  void attend(const Plan& plan, const PageTable* table, const Operands& operands);
  /// What is attended to and by which rows, apart from where the tensors lie.
  struct Extent {
    std::int64_t total_rows = 0;
    std::span<const std::int32_t> qo_indptr{};  ///< empty: uniform
    std::int32_t uniform_qo_len = 1;
    std::span<const std::int32_t> kv_lens{};
    const PageTable* table = nullptr;  ///< null for ragged
    bool captured = false;             ///< the requests come later: what depends on their lengths goes unchecked
  };
  void check_operands(const StepSpec& spec, const Extent& extent, const Operands& operands) const;
  /// All but that the tokens appended are among those that the table counts.
  void check_append(const AppendLaunch& launch) const;
  std::span<const std::int32_t> ragged_lens(std::span<const std::int32_t> qo_indptr,
                                            std::span<const std::int32_t> kv_indptr);
  void reserve_scratch(std::size_t bytes, Stream stream);
  PlanCache& cache_of(PlanKind kind) noexcept;
  void check_open() const;

  const int device_index_;
  const WorkspaceOptions options_;
  const bool verify_cuda_graph_;
  std::shared_ptr<Backend> backend_;
  const DeviceProps props_;
  std::shared_ptr<Arena> arena_;
  std::span<std::byte> scratch_;
  std::size_t scratch_peak_ = 0;
  PlanCache decode_cache_;
  PlanCache prefill_cache_;
  PlanCache verify_cache_;
  DeviceTables device_tables_;
  std::vector<std::int32_t> ragged_lens_;  ///< of the ragged call at hand
  HopperScratch hopper_scratch_;
  std::uint64_t runtime_epoch_ = 0;  ///< counts the invalidations of decode plans
  std::uint64_t verify_epoch_ = 0;   ///< ... of verify plans
  std::uint64_t plan_nanoseconds_ = 0;
  std::uint64_t run_nanoseconds_ = 0;
  std::atomic<bool> closed_{false};
  mutable std::atomic<bool> busy_{false};
};

template <class Step>
Step WorkspaceState::plan_step(const Request& request, const StepSpec& spec) {
  Found found = plan(request, spec);
  Step step;
  step.workspace_ = shared_from_this();
  step.plan_ = std::move(found.plan);
  step.table_ = *request.table;
  step.cache_hit_ = found.hit;
  return step;
}

}  // namespace fiw::detail
