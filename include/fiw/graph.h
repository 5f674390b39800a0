// Decode and verify steps that are captured once and replayed: CUDA graphs whose plans cannot go stale.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fiw/attention.h"
#include "fiw/kv_cache.h"
#include "fiw/page_table.h"
#include "fiw/types.h"
#include "fiw/workspace.h"

namespace fiw {

namespace detail {
class GraphState;
}  // namespace detail

/// What a session is captured for. Its memory is taken once, for the largest step that these allow.
struct GraphOptions {
  std::int32_t max_batch = 0;  ///< requests in a step, up to 2^24
  std::int32_t max_pages = 0;  ///< entries of a step's page table, all requests together; up to 2^32 slots
  std::int32_t page_size = 16;
  std::int64_t num_pages = 0;  ///< pages of the cache: page ids are below it
  /// Batch sizes to capture, ascending, the last one max_batch. A step runs in the smallest that holds its requests.
  /// Empty: the powers of two below max_batch, and max_batch.
  std::vector<std::int32_t> buckets{};
  /// A page table in device memory, which the captured kernels read at each replay: replay() then enters no planner.
  /// `indptr` has max_batch + 1 entries and `last_page_len` max_batch; a replay reads the first bucket + 1, where
  /// requests that are not there own no page. Its page_size and num_pages must be those above; the version means
  /// nothing. Unset: step() brings the table.
  std::optional<DevicePageTable> live_table{};
  /// With a live table: each replay plans on the device. Off: prepare() plans, and a replay whose table has other page
  /// counts than the prepared one, or that is of another bucket, does no work and raises kStalePlan.
  bool plan_on_device = true;
};

struct GraphStats {
  std::uint64_t captures = 0;   ///< graphs recorded, one a bucket
  std::uint64_t replays = 0;    ///< by step() and replay()
  std::uint64_t plans = 0;      ///< schedules written by the host
  std::uint64_t plan_hits = 0;  ///< steps that found the last schedule right
  std::uint64_t trips = 0;      ///< replays that were found to have no right plan
  std::size_t bytes = 0;        ///< device memory held: schedules, table and float scratch
};

/// Attention steps of one kind, captured once a batch bucket and replayed with other page tables.
///
///     GraphSession graph = GraphSession::decode(workspace, kinds, options);
///     graph.capture([&](std::int32_t batch) { for each layer { ...; graph.run(q, kv, out); ... } }, stream);
///     for each step: graph.step(table, stream);
///
/// A session owns its plan, its copy of the page table and its scratch: no other call on the workspace touches them,
/// and a step rewrites them in place, in the order of the stream, so that a replay is right for any table within the
/// limits. Requests may gain pages, finish or be replaced without another capture. Rows of a bucket that the table does
/// not fill give zeros and an LSE of minus infinity.
///
/// Instead of capture(), a caller may record calls in a graph of its own: begin(), then run() once a layer, all while
/// its stream is being captured; then prepare(table) before each replay, which returns the bucket to replay.
///
/// On the CPU nothing is captured: capture() calls `body` to have its calls checked, and a replay calls it again, when
/// run() and append_kv() compute. Between begin() and the next call of the session they compute as they are called, if
/// the bucket is the one prepared last or the live table has a plan.
///
/// One thread at a time, together with the workspace (kBusy). Steps on one session must be ordered by the caller's
/// streams. The session must outlive the work it enqueued and the graphs that recorded it; it may outlive the
/// workspace, whose close() makes every call throw kClosed.
class GraphSession {
 public:
  /// One query token a request. `kinds` lists the kinds of layer, by options and types: layers of a kind share a plan.
  /// Waits for what the workspace has enqueued.
  static GraphSession decode(FlashInferWorkspace& workspace, std::span<const StepSpec> kinds,
                             const GraphOptions& options);
  /// The last `window` (1..4096) tokens of each request, rows r * window and on. A request with fewer new tokens has
  /// its queries in its last rows; the rows before them are those of older tokens.
  static GraphSession verify(FlashInferWorkspace& workspace, std::int32_t window, std::span<const StepSpec> kinds,
                             const GraphOptions& options);

  GraphSession(GraphSession&&) noexcept;
  GraphSession& operator=(GraphSession&&) noexcept;
  ~GraphSession();

  /// Records `body` once for each bucket, on `stream` (not the default one on CUDA): it is called with the bucket and
  /// enqueues one step of that batch, with run() for the attention of each layer and whatever else the step does. Not
  /// executed. A second call replaces what was captured. An exception from `body` ends the capture and passes through;
  /// what was captured before stays. Within `body` the session's other calls are refused.
  void capture(std::function<void(std::int32_t batch)> body, Stream stream);

  /// Starts a step of the smallest bucket that holds `batch` requests, in a capture of the caller's, which `stream` is
  /// part of; returns the bucket.
  std::int32_t begin(std::int32_t batch, Stream stream);
  /// One layer's attention, within capture() or after begin(). Tensors as AttentionStep::run takes them, with at least
  /// bucket * window rows; the addresses are what is captured. Null `stream`: the step's. `kind` indexes `kinds`. The
  /// calls of a step share scratch, so each comes after the last one, whatever streams a capture forks into.
  void run(const ConstTensor& q, const KvCache& kv, const Tensor& out, float* lse = nullptr,
           const AttentionExtras& extras = {}, Stream stream = nullptr, std::size_t kind = 0);
  /// Writes the step's new tokens, `window` rows a request of k and v [>= bucket * window, num_kv_heads, head_dim], to
  /// the ends of their requests, within capture() or after begin(). Rows of requests that are not there are passed
  /// over.
  void append_kv(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, Stream stream = nullptr);

  /// Rewrites plan and table for the next replay, in stream order; returns the bucket it is for. Throws, and leaves the
  /// last plan in force, for a table beyond the limits: the message names the limit.
  std::int32_t prepare(const PageTable& table, Stream stream);
  /// prepare() and the replay of what capture() recorded.
  void step(const PageTable& table, Stream stream);
  /// The replay alone, of the bucket that holds `batch` requests. With a live table this is the whole step.
  void replay(std::int32_t batch, Stream stream);
  /// Waits for `stream` and throws kStalePlan, naming the first request, if a replay found no right plan since the last
  /// check. step(), prepare() and replay() throw the same as soon as they see it, without waiting.
  void check(Stream stream);
  /// Throws kClosed or kBusy, as a call would now: for bindings that have arguments of their own to check after that.
  void check_ready() const;

  std::span<const std::int32_t> buckets() const noexcept;
  GraphStats stats() const noexcept;

 private:
  explicit GraphSession(std::shared_ptr<detail::GraphState> state) noexcept;
  std::shared_ptr<detail::GraphState> state() const;
  std::shared_ptr<detail::GraphState> state_;
};

}  // namespace fiw
