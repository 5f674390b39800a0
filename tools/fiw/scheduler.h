// Continuous batching as a serving engine does it, without any attention: which tokens each step computes, on which
// pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "page_pool.h"
#include "trace.h"

namespace fiw::cli {

struct SchedulerOptions {
  std::int32_t page_size = 16;
  std::int32_t num_pages = 4096;
  std::int32_t max_batch = 32;      ///< requests in flight
  std::int32_t token_budget = 512;  ///< query tokens a step; decoding is served first, chunks of prompts take the rest
  std::int32_t speculate = 0;       ///< draft tokens a decode window verifies beside its first token
  double acceptance = 0.7;          ///< chance that a draft token is accepted, given that those before it were
  std::uint64_t seed = 1;
};

/// A piece of a request's prompt, computed in one step.
struct PrefillChunk {
  std::int32_t request = 0;
  std::int32_t start = 0;  ///< tokens already in the cache
  std::int32_t count = 0;
};

/// The work of one step. Both lists name requests by their place in the trace.
struct ScheduledStep {
  std::int64_t index = 0;
  std::vector<PrefillChunk> prefill;
  std::vector<std::int32_t> decode;  ///< each computes `window` tokens
  std::int32_t window = 1;
};

/// One request on its way.
struct RequestState {
  std::int32_t kv_len = 0;             ///< tokens in the cache, those of the step at hand included
  std::int32_t generated = 0;          ///< output tokens so far; the first one comes out of the prompt's last chunk
  std::int32_t shared_tokens = 0;      ///< prompt tokens found in the cache at admission
  std::vector<std::int32_t> pages;     ///< in order of tokens
  std::vector<std::int32_t> prefixes;  ///< the prefix-tree node of each full block of the prompt
  std::vector<std::int64_t> written_in_step;  ///< for each token past the prompt, the step that computed it
  std::int32_t reserved_pages = 0;            ///< may still be allocated
  std::int32_t published_pages = 0;           ///< leading pages that others can find
};

struct SchedulerTotals {
  std::int64_t steps = 0;
  std::int64_t finished = 0;
  std::int64_t prompt_tokens = 0;  ///< of finished requests
  std::int64_t shared_tokens = 0;  ///< of those, taken from the cache
  std::int64_t generated_tokens = 0;
  std::int64_t shared_pages = 0;  ///< pages taken over from an earlier request
  std::int64_t draft_tokens = 0;
  std::int64_t accepted_tokens = 0;
  std::int64_t prefill_rows = 0;  ///< query rows a layer
  std::int64_t decode_rows = 0;
};

/// Serves a trace in order of arrival, each request as soon as there is room.
///
/// Admission reserves the pages that a request can need in the worst case (its prompt, its whole answer and one
/// speculative window), less those it shares, so a request in flight always finishes without waiting for another: there
/// is no deadlock and nothing is ever preempted. Pages are still taken only when tokens reach them. A request that
/// could never fit the pool is rejected.
///
/// Use: while next() gives a step, compute it, then finish() it. Deterministic for equal inputs.
class Scheduler {
 public:
  /// `trace` must outlive the scheduler. Throws fiw::Error for options that make no sense.
  Scheduler(std::span<const TraceRequest> trace, const SchedulerOptions& options);

  /// Admits what fits and lays out the next step; its pages are allocated. False when every request is served.
  bool next(ScheduledStep& step);
  /// Accounts for the step's results: publishes prompt pages, accepts or rolls back drafts, frees finished requests.
  void finish(const ScheduledStep& step);

  const RequestState& state(std::int32_t request) const { return states_[request]; }
  const TraceRequest& request(std::int32_t request) const { return trace_[request]; }
  const SchedulerOptions& options() const noexcept { return options_; }
  const PagePool& pool() const noexcept { return pool_; }
  const SchedulerTotals& totals() const noexcept { return totals_; }
  /// Requests larger than the pool, by their place in the trace. Complete from the start.
  std::span<const std::int32_t> rejected() const noexcept { return rejected_; }
  std::int32_t running() const noexcept { return static_cast<std::int32_t>(running_.size()); }

  /// Pages that a request can need in the worst case, shared ones included.
  std::int64_t worst_case_pages(const TraceRequest& request) const noexcept;

 private:
  std::int32_t pages_of(std::int64_t tokens) const noexcept;
  void admit();
  bool try_admit(std::int32_t request);
  void grow(std::int32_t request, std::int32_t tokens, std::int64_t step);
  void roll_back(RequestState& state, std::int32_t tokens, std::int32_t prompt_tokens);
  void publish(std::int32_t request);
  void retire(std::int32_t request);
  std::int32_t draw_accepted(std::int32_t request) const noexcept;

  std::span<const TraceRequest> trace_;
  SchedulerOptions options_;
  PagePool pool_;
  PrefixTree prefixes_;
  std::vector<RequestState> states_;
  std::vector<std::int32_t> waiting_;  ///< the front is at waiting_[next_waiting_]
  std::size_t next_waiting_ = 0;
  std::vector<std::int32_t> running_;  ///< by admission
  std::vector<std::int32_t> rejected_;
  std::int64_t reserved_pages_ = 0;  ///< sum over running_; never above pool_.available()
  SchedulerTotals totals_;
};

}  // namespace fiw::cli
