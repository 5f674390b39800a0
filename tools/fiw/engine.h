// Computes scheduled steps with real attention: what a serving engine's model runner does, less the model.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "device.h"
#include "fiw/graph.h"
#include "perfetto.h"
#include "row_check.h"
#include "scheduler.h"
#include "token_data.h"

namespace fiw::cli {

struct EngineOptions {
  AttentionParams params;
  DType dtype = DType::kBFloat16;     ///< of q, new k and v, and out
  DType kv_dtype = DType::kBFloat16;  ///< of the cache
  std::int32_t layers = 2;
  std::int32_t max_kv_len = 0;       ///< of any request, drafts included
  bool graphs = false;               ///< decode steps and verify windows are captured once and replayed
  std::int32_t max_table_pages = 0;  ///< entries of any decode step's page table; with `graphs` only
  int device = kCpuDevice;
  std::int32_t threads = 0;
  std::uint64_t seed = 1;
};

/// Where a step's time went, on a device until its work is done. Making up q, K and V, copying them to a device and
/// checking rows are not part of it.
struct StepTimes {
  using Duration = std::chrono::steady_clock::duration;
  Duration plan{};  ///< page tables and plans, once a step
  Duration append{};
  Duration prefill{};
  Duration decode{};       ///< a replayed step's append and plan included
  Duration decode_host{};  ///< of the decode rows, the host's part alone: page table, plan and calls

  Duration attention() const noexcept { return prefill + decode; }
  Duration total() const noexcept { return plan + append + attention(); }
};

class Engine {
 public:
  /// Allocates the caches of all layers. `scheduler` must outlive the engine.
  Engine(const EngineOptions& options, const Scheduler& scheduler);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs every layer of `step`, which the scheduler has just laid out. `check` and `trace` may be null.
  StepTimes run(const ScheduledStep& step, RowCheck* check, ChromeTrace* trace);

  const FlashInferWorkspace& workspace() const noexcept { return *workspace_; }
  /// Float scratch that the declared limits call for.
  std::size_t required_workspace() const noexcept { return required_workspace_; }
  std::size_t cache_bytes() const noexcept;
  /// Nothing without graphs.
  std::optional<GraphStats> graph_stats() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// The rows of one kind of call in a step; the vectors keep their memory from step to step.
  struct Group {
    std::vector<RowSpan> spans;
    std::vector<std::int32_t> qo_indptr;
    std::vector<std::int32_t> kv_indptr;
    std::vector<std::int32_t> indices;
    std::vector<std::int32_t> last_page_len;
    std::vector<std::int32_t> kv_lens;
    PageTable table;
    AttentionStep plan;

    std::int32_t rows() const noexcept { return qo_indptr.back(); }
  };
  /// One layer's rows of one kind of call.
  struct Rows {
    Rows() = default;
    Rows(const EngineOptions& options, std::int64_t rows);

    MirroredTensor q;
    MirroredTensor k;
    MirroredTensor v;
    MirroredTensor out;
    MirroredTensor lse;  ///< [rows, 1, num_qo_heads]
  };
  /// The decode step that is captured, whose rows are all in place before it runs.
  struct Captured {
    Captured(const EngineOptions& options, const SchedulerOptions& batching, FlashInferWorkspace& workspace,
             const StepSpec& spec);

    OwnedStream stream;
    std::vector<Rows> layers;
    GraphSession session;
  };

  void lay_out(Group& group) const;
  void make_rows(const Group& group, std::int32_t layer, const Rows& rows) const;
  void check_rows(Work work, const Group& group, std::int64_t step, std::int32_t layer, const Rows& rows,
                  RowCheck& check) const;
  void replay(const Group& group, std::int64_t step, StepTimes& times, RowCheck* check, ChromeTrace* trace);
  void run_layer(Work work, const Group& group, std::int64_t step, std::int32_t layer, StepTimes& times,
                 RowCheck* check, ChromeTrace* trace);

  EngineOptions options_;
  const Scheduler& scheduler_;
  TokenData data_;
  StepSpec spec_;
  std::size_t required_workspace_ = 0;
  std::unique_ptr<FlashInferWorkspace> workspace_;
  std::vector<OwnedKvCache> caches_;  ///< one a layer
  Rows rows_;
  std::optional<Captured> captured_;
  Group prefill_;
  Group decode_;
};

}  // namespace fiw::cli
