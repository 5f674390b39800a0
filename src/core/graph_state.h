// What a graph session owns: memory at fixed addresses, the shapes that fit it, and what was recorded for each bucket.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "core/graph_backend.h"
#include "core/plan_cache.h"
#include "core/workspace_state.h"
#include "fiw/graph.h"

namespace fiw::detail {

class GraphState {
 public:
  using Operands = WorkspaceState::Operands;
  using Body = std::function<void(std::int32_t batch)>;

  /// `window` query tokens a request.
  GraphState(std::shared_ptr<WorkspaceState> workspace, PlanKind kind, std::int32_t window,
             std::span<const StepSpec> kinds, const GraphOptions& options);
  GraphState(const GraphState&) = delete;
  GraphState& operator=(const GraphState&) = delete;
  ~GraphState();

  void capture(Body body, Stream stream);
  std::int32_t begin(std::int32_t batch, Stream stream);
  void run(const Operands& operands, std::size_t kind);
  void append(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, Stream stream);

  std::int32_t prepare(const PageTable& table, Stream stream);
  void step(const PageTable& table, Stream stream);
  void replay(std::int32_t batch, Stream stream);
  void check(Stream stream);
  /// Throws what a call that came now would: kClosed or kBusy.
  void check_ready() const { workspace_->check_ready(); }

  std::span<const std::int32_t> buckets() const noexcept { return buckets_; }
  GraphStats stats() const noexcept;

 private:
  static constexpr std::size_t kNoBucket = static_cast<std::size_t>(-1);

  /// A kind of layer: its plan's traits, its place in memory, and its schedule in each bucket.
  struct Kind {
    PlanTraits traits;
    std::size_t offset = 0;
    std::vector<ScheduleShape> shapes;  ///< [bucket], of empty requests: what any table's has in common with them
    ScheduleShape shape;                ///< of the table that was prepared last
    std::size_t scratch_bytes = 0;
  };
  /// Offsets of the session's copy of the table, int32 arrays.
  struct TableLayout {
    std::size_t qo_indptr = 0;      ///< [max_batch + 1]
    std::size_t prepared = 0;       ///< [1 + 2 * kinds], see ReplanLaunch
    std::size_t indptr = 0;         ///< [max_batch + 1]
    std::size_t last_page_len = 0;  ///< [max_batch]
    std::size_t kv_lens = 0;        ///< [max_batch]
    std::size_t indices = 0;        ///< [max_pages]
  };
  /// What the device memory was last written for.
  struct Prepared {
    std::size_t bucket = kNoBucket;
    std::uint64_t epoch = 0;
    PageTable table;
  };

  /// Leaves the body when the scope ends: in_body_ was set under the lock.
  class InBody;

  static std::shared_ptr<Backend> backend_of(WorkspaceState& workspace);
  void add_kind(const StepSpec& spec);
  void lay_out();
  bool planned_by_replay() const noexcept { return options_.live_table.has_value() && options_.plan_on_device; }
  std::size_t bucket_of(std::int32_t batch) const;
  std::uint64_t epoch() const noexcept;
  /// The work of page_counts_.
  WorkLoad work_of(const Kind& kind) const;
  SplitPolicy policy_of(const Kind& kind, std::size_t bucket) const;
  /// The counts of `table` as those of a whole bucket.
  void pad(const PageTable& table, std::size_t bucket);
  void plan_kinds(std::size_t bucket);
  std::size_t prepare_bucket(const PageTable& table, Stream stream);
  /// The session's copy of a table but for qo_indptr, which never changes; `base` is where its indptr goes.
  void write_table(const PageTable& table, std::byte* base) const;
  PageTable padded_table(const PageTable& table, std::size_t bucket) const;
  /// From here on run() and append() are layers of a step of this bucket. Enqueues its head.
  void open_step(std::size_t bucket, Stream stream);
  /// The head of a captured step.
  void enqueue_head(std::size_t bucket, Stream stream);
  /// Reads the live table as the head of a captured step does: what stops it raises the alarm.
  bool read_live_table(std::size_t bucket);
  FixedTable fixed_table() const noexcept;
  std::int32_t rows_of(std::size_t bucket) const noexcept { return buckets_[bucket] * window_; }
  std::size_t active_or_throw() const;
  /// Throws unless `stream` is part of the capture in which the step was opened.
  void check_recording(Stream stream) const;
  Stream stream_or_step(Stream stream) const noexcept { return stream != nullptr ? stream : step_stream_; }
  void check_cache(const KvCache& kv) const;
  void check_open() const { workspace_->check_open(); }
  /// Throws unless the workspace is open and the session outside its body; `call` is what is asked for.
  void check_outside(const char* call) const;
  void check_prepared(std::size_t bucket) const;
  void throw_if_stale();

  const std::shared_ptr<WorkspaceState> workspace_;
  const std::shared_ptr<Backend> backend_;  ///< outlives the workspace's close()
  GraphBackend* const graphs_;              ///< null: replays call the body
  const PlanKind kind_;
  const std::int32_t window_;
  const GraphOptions options_;
  std::vector<std::int32_t> buckets_;
  std::vector<Kind> kinds_;
  std::vector<std::int32_t> qo_indptr_;  ///< [max_batch + 1]: every request has window_ rows
  TableLayout table_;
  std::byte* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  std::byte* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
  std::shared_ptr<GraphAlarm> alarm_;

  Body body_;
  std::vector<std::unique_ptr<GraphBackend::Recording>> recordings_;  ///< [bucket]
  std::vector<PageTable> blanks_;                                     ///< [bucket], tables of empty requests
  std::size_t active_ = kNoBucket;  ///< the bucket whose step is being recorded or computed
  Stream step_stream_ = nullptr;    ///< its stream
  std::uint64_t recording_ = 0;     ///< the capture that it is part of
  bool computing_ = false;          ///< where there are no graphs: the step has a plan, and its layers compute
  std::thread::id in_body_;         ///< the thread that is calling the body

  Prepared prepared_;
  PageTable host_table_;                   ///< prepared_.table padded to its bucket, where there are no graphs
  std::vector<std::int32_t> page_counts_;  ///< of the step being planned, padded to its bucket
  std::vector<ScheduleShape> next_;        ///< [kind], of the step being planned
  std::uint32_t seen_trips_ = 0;
  GraphStats stats_;
};

}  // namespace fiw::detail
