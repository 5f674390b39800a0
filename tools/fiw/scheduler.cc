// The batching policy. Pure host code: tests drive it without a workspace.
#include "scheduler.h"

#include <fmt/format.h>

#include <algorithm>

#include "fiw/error.h"
#include "mix.h"

namespace fiw::cli {
namespace {

void require(bool ok, std::string_view name, std::int64_t value, std::string_view expected) {
  if (ok) return;
  throw Error(Status::kInvalidArgument, Reason::kOptions, fmt::format("{} is {}, expected {}", name, value, expected));
}

}  // namespace

Scheduler::Scheduler(std::span<const TraceRequest> trace, const SchedulerOptions& options)
    : trace_(trace), options_(options), pool_(std::max(options.num_pages, 0)), states_(trace.size()) {
  require(options.page_size >= 1, "page size", options.page_size, "at least 1");
  require(options.num_pages >= 1, "pages", options.num_pages, "at least 1");
  require(options.max_batch >= 1, "max batch", options.max_batch, "at least 1");
  require(options.speculate >= 0 && options.speculate <= 63, "speculate", options.speculate, "0 to 63");
  if (!(options.acceptance >= 0.0 && options.acceptance <= 1.0)) {
    throw Error(Status::kInvalidArgument, Reason::kOptions,
                fmt::format("acceptance is {}, expected a probability from 0 to 1", options.acceptance));
  }
  const std::int64_t decode_tokens = std::int64_t{options.max_batch} * (options.speculate + 1);
  require(options.token_budget >= decode_tokens, "token budget", options.token_budget,
          fmt::format("at least {}: max batch {} times a window of {} token{}", decode_tokens, options.max_batch,
                      options.speculate + 1, options.speculate == 0 ? "" : "s"));
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(trace.size()); ++i) {
    (worst_case_pages(trace[i]) > options.num_pages ? rejected_ : waiting_).push_back(i);
  }
}

std::int32_t Scheduler::pages_of(std::int64_t tokens) const noexcept {
  return static_cast<std::int32_t>((tokens + options_.page_size - 1) / options_.page_size);
}

std::int64_t Scheduler::worst_case_pages(const TraceRequest& request) const noexcept {
  // The last output token is never stored; a window may store its drafts after the last token that is.
  const std::int64_t decoded = std::max(request.output_tokens - 1, 0);
  return pages_of(request.prompt_tokens + decoded + (decoded > 0 ? options_.speculate : 0));
}

bool Scheduler::next(ScheduledStep& step) {
  admit();
  step.index = totals_.steps;
  step.window = options_.speculate + 1;
  step.prefill.clear();
  step.decode.clear();
  if (running_.empty()) return false;

  std::int32_t budget = options_.token_budget;
  for (const std::int32_t r : running_) {
    if (states_[r].kv_len < trace_[r].prompt_tokens) continue;
    grow(r, step.window, step.index);
    step.decode.push_back(r);
    budget -= step.window;
  }
  for (const std::int32_t r : running_) {
    const std::int32_t left = trace_[r].prompt_tokens - states_[r].kv_len;
    if (left <= 0 || budget <= 0) continue;
    const std::int32_t count = std::min(left, budget);
    step.prefill.push_back({r, states_[r].kv_len, count});
    grow(r, count, step.index);
    budget -= count;
  }
  return true;
}

void Scheduler::finish(const ScheduledStep& step) {
  for (const PrefillChunk& chunk : step.prefill) {
    totals_.prefill_rows += chunk.count;
    publish(chunk.request);
    RequestState& state = states_[chunk.request];
    if (state.kv_len == trace_[chunk.request].prompt_tokens && trace_[chunk.request].output_tokens > 0) {
      state.generated = 1;
    }
  }
  for (const std::int32_t r : step.decode) {
    RequestState& state = states_[r];
    totals_.decode_rows += step.window;
    const std::int32_t drafts = step.window - 1;
    const std::int32_t accepted = std::min(draw_accepted(r), trace_[r].output_tokens - state.generated - 1);
    totals_.draft_tokens += drafts;
    totals_.accepted_tokens += accepted;
    roll_back(state, drafts - accepted, trace_[r].prompt_tokens);
    state.generated += accepted + 1;
  }
  std::erase_if(running_, [this](std::int32_t r) {
    const bool done = states_[r].kv_len >= trace_[r].prompt_tokens && states_[r].generated == trace_[r].output_tokens;
    if (done) retire(r);
    return done;
  });
  ++totals_.steps;
}

void Scheduler::admit() {
  while (next_waiting_ < waiting_.size() && running() < options_.max_batch && try_admit(waiting_[next_waiting_])) {
    ++next_waiting_;
  }
}

bool Scheduler::try_admit(std::int32_t r) {
  const TraceRequest& request = trace_[r];
  RequestState& state = states_[r];
  // Only full blocks: the hash of a partial one says nothing about the tokens that would follow.
  if (state.prefixes.empty() && !request.block_hashes.empty()) {
    std::int32_t node = PrefixTree::kRoot;
    for (std::int32_t block = 0; block < request.prompt_tokens / kHashBlockTokens; ++block) {
      node = prefixes_.child(node, request.block_hashes[block]);
      state.prefixes.push_back(node);
    }
  }
  // At least the prompt's last token is computed, because the first output token comes out of it.
  std::vector<PageKey> shared;
  std::int32_t revived = 0;  // pages that are available now and would not be once shared
  for (std::int32_t page = 0; (page + std::int64_t{1}) * options_.page_size < request.prompt_tokens; ++page) {
    const auto block = ((page + std::int64_t{1}) * options_.page_size - 1) / kHashBlockTokens;
    if (block >= static_cast<std::int64_t>(state.prefixes.size())) break;
    const PageKey key{state.prefixes[block], page};
    if (!pool_.contains(key)) break;
    shared.push_back(key);
    if (!pool_.in_use(key)) ++revived;
  }
  const auto shared_pages = static_cast<std::int32_t>(shared.size());
  const auto needed = static_cast<std::int32_t>(worst_case_pages(request)) - shared_pages;
  if (pool_.available() - revived - reserved_pages_ < needed) return false;

  for (const PageKey& key : shared) state.pages.push_back(*pool_.acquire(key));
  state.kv_len = state.shared_tokens = shared_pages * options_.page_size;
  state.published_pages = shared_pages;
  state.reserved_pages = needed;
  reserved_pages_ += needed;
  totals_.shared_pages += shared_pages;
  running_.push_back(r);
  return true;
}

void Scheduler::grow(std::int32_t r, std::int32_t tokens, std::int64_t step) {
  RequestState& state = states_[r];
  state.kv_len += tokens;
  while (static_cast<std::int32_t>(state.pages.size()) < pages_of(state.kv_len)) {
    state.pages.push_back(pool_.allocate());
    --state.reserved_pages;
    --reserved_pages_;
  }
  const std::int32_t past_prompt = std::max(state.kv_len - trace_[r].prompt_tokens, 0);
  state.written_in_step.resize(past_prompt, step);
}

void Scheduler::roll_back(RequestState& state, std::int32_t tokens, std::int32_t prompt_tokens) {
  state.kv_len -= tokens;
  state.written_in_step.resize(state.kv_len - prompt_tokens);
  while (static_cast<std::int32_t>(state.pages.size()) > pages_of(state.kv_len)) {
    pool_.release(state.pages.back());
    state.pages.pop_back();
    ++state.reserved_pages;
    ++reserved_pages_;
  }
}

void Scheduler::publish(std::int32_t r) {
  RequestState& state = states_[r];
  while (true) {
    const std::int64_t end = (state.published_pages + std::int64_t{1}) * options_.page_size;
    const auto block = (end - 1) / kHashBlockTokens;
    if (end > state.kv_len || block >= static_cast<std::int64_t>(state.prefixes.size())) return;
    pool_.publish(state.pages[state.published_pages], {state.prefixes[block], state.published_pages});
    ++state.published_pages;
  }
}

void Scheduler::retire(std::int32_t r) {
  RequestState& state = states_[r];
  // From the back, so that a prefix's last pages are reused before its first.
  for (auto page = state.pages.rbegin(); page != state.pages.rend(); ++page) pool_.release(*page);
  state.pages.clear();
  reserved_pages_ -= state.reserved_pages;
  state.reserved_pages = 0;
  ++totals_.finished;
  totals_.prompt_tokens += trace_[r].prompt_tokens;
  totals_.shared_tokens += state.shared_tokens;
  totals_.generated_tokens += state.generated;
}

std::int32_t Scheduler::draw_accepted(std::int32_t r) const noexcept {
  std::int32_t accepted = 0;
  const auto generated = static_cast<std::uint64_t>(states_[r].generated);
  while (accepted < options_.speculate &&
         unit_interval(mix(options_.seed, static_cast<std::uint64_t>(r), generated, accepted)) < options_.acceptance) {
    ++accepted;
  }
  return accepted;
}

}  // namespace fiw::cli
