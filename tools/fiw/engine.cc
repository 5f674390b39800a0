// One step: build the page tables, plan each kind of call once, then append and attend layer by layer. With graphs the
// decode rows of all layers go through one replay instead.
#include "engine.h"

namespace fiw::cli {

Engine::Rows::Rows(const EngineOptions& options, std::int64_t rows) {
  const AttentionParams& params = options.params;
  const auto tensor = [&](DType dtype, std::int64_t heads, std::int64_t dim) {
    return MirroredTensor(dtype, rows, heads, dim, options.device);
  };
  q = tensor(options.dtype, params.num_qo_heads, params.head_dim_qk);
  k = tensor(options.dtype, params.num_kv_heads, params.head_dim_qk);
  v = tensor(options.dtype, params.num_kv_heads, params.head_dim_qk);
  out = tensor(options.dtype, params.num_qo_heads, params.head_dim_qk);
  lse = tensor(DType::kFloat32, 1, params.num_qo_heads);
}

Engine::Captured::Captured(const EngineOptions& options, const SchedulerOptions& batching,
                           FlashInferWorkspace& workspace, const StepSpec& spec)
    : stream(options.device), session([&] {
        const GraphOptions limits{.max_batch = batching.max_batch,
                                  .max_pages = options.max_table_pages,
                                  .page_size = batching.page_size,
                                  .num_pages = batching.num_pages};
        return batching.speculate == 0 ? GraphSession::decode(workspace, {&spec, 1}, limits)
                                       : GraphSession::verify(workspace, batching.speculate + 1, {&spec, 1}, limits);
      }()) {
  const std::int64_t rows = std::int64_t{batching.max_batch} * (batching.speculate + 1);
  for (std::int32_t layer = 0; layer < options.layers; ++layer) layers.emplace_back(options, rows);
}

Engine::Engine(const EngineOptions& options, const Scheduler& scheduler)
    : options_(options), scheduler_(scheduler), data_(options.seed, options.params) {
  const SchedulerOptions& batching = scheduler.options();
  const AttentionParams& params = options.params;
  spec_.params = params;
  spec_.q_dtype = options.dtype;
  spec_.kv_dtype = options.kv_dtype;
  spec_.lse = true;

  WorkspaceLimits limits;
  limits.params = params;
  limits.max_batch = batching.max_batch;
  limits.max_total_qo = batching.token_budget;
  limits.max_verify_window = batching.speculate > 0 ? batching.speculate + 1 : 0;
  limits.max_kv_len = options.max_kv_len;
  limits.page_size = batching.page_size;
  limits.kv_dtype = options.kv_dtype;
  WorkspaceOptions workspace_options;
  workspace_options.limits = limits;
  workspace_options.num_threads = options.threads;
  workspace_ = open_workspace(options.device, workspace_options);
  required_workspace_ = FlashInferWorkspace::required_workspace(workspace_->device_props(), limits);

  for (std::int32_t layer = 0; layer < options.layers; ++layer) {
    OwnedKvCache& cache = caches_.emplace_back(options.kv_dtype, batching.num_pages, batching.page_size,
                                               params.num_kv_heads, params.head_dim_qk, KvLayout::kNHD, options.device);
    if (is_fp8(options.kv_dtype)) cache.view.k_scale = cache.view.v_scale = kReplayFp8Scale;
  }
  rows_ = Rows(options, batching.token_budget);
  if (!options.graphs) return;
  captured_.emplace(options, batching, *workspace_, spec_);
  captured_->session.capture(
      [this, rows = std::int64_t{batching.max_batch} * (batching.speculate + 1)](std::int32_t) {
        for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
          const Rows& of = captured_->layers[layer];
          captured_->session.append_kv(of.k.device(rows), of.v.device(rows), caches_[layer].view);
          captured_->session.run(of.q.device(rows), caches_[layer].view, of.out.device(rows),
                                 static_cast<float*>(of.lse.device(rows).data));
        }
      },
      captured_->stream.get());
}

std::optional<GraphStats> Engine::graph_stats() const {
  return captured_ ? std::optional(captured_->session.stats()) : std::nullopt;
}

std::size_t Engine::cache_bytes() const noexcept {
  return caches_.empty() ? 0 : caches_.size() * (caches_.front().k.bytes() + caches_.front().v.bytes());
}

StepTimes Engine::run(const ScheduledStep& step, RowCheck* check, ChromeTrace* trace) {
  StepTimes times;
  const Clock::time_point start = Clock::now();
  prefill_.spans.clear();
  for (const PrefillChunk& chunk : step.prefill) prefill_.spans.push_back({chunk.request, chunk.start, chunk.count});
  decode_.spans.clear();
  for (const std::int32_t r : step.decode) {
    decode_.spans.push_back({r, scheduler_.state(r).kv_len - step.window, step.window});
  }
  lay_out(prefill_);
  if (prefill_.rows() > 0) prefill_.plan = workspace_->plan_prefill(prefill_.qo_indptr, prefill_.table, spec_);
  const Clock::time_point prefill_planned = Clock::now();
  lay_out(decode_);
  if (decode_.rows() > 0 && !captured_) {
    if (step.window == 1) decode_.plan = workspace_->plan_decode(decode_.table, spec_);
    if (step.window > 1) decode_.plan = workspace_->plan_verify(step.window, decode_.table, spec_);
  }
  const Clock::time_point planned = Clock::now();
  times.plan = planned - start;
  times.decode_host = planned - prefill_planned;
  if (trace != nullptr) trace->span("plan", "plan", start, planned);

  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    if (prefill_.rows() > 0) run_layer(Work::kPrefill, prefill_, step.index, layer, times, check, trace);
    if (decode_.rows() > 0 && !captured_) run_layer(Work::kDecode, decode_, step.index, layer, times, check, trace);
  }
  if (decode_.rows() > 0 && captured_) replay(decode_, step.index, times, check, trace);
  if (trace != nullptr) {
    trace->span("step", "step", start, Clock::now(),
                {{"index", step.index},
                 {"prefill_requests", prefill_.spans.size()},
                 {"prefill_rows", prefill_.rows()},
                 {"decode_requests", decode_.spans.size()},
                 {"decode_rows", decode_.rows()}});
    trace->counters("pages", start, {{"used", scheduler_.pool().used()}});
    trace->counters("rows", start, {{"prefill", prefill_.rows()}, {"decode", decode_.rows()}});
  }
  return times;
}

void Engine::lay_out(Group& group) const {
  const SchedulerOptions& batching = scheduler_.options();
  group.qo_indptr.assign(1, 0);
  group.kv_indptr.assign(1, 0);
  group.indices.clear();
  group.last_page_len.clear();
  group.kv_lens.clear();
  for (const RowSpan& span : group.spans) {
    const RequestState& state = scheduler_.state(span.request);
    group.qo_indptr.push_back(group.qo_indptr.back() + span.count);
    group.indices.insert(group.indices.end(), state.pages.begin(), state.pages.end());
    group.kv_indptr.push_back(static_cast<std::int32_t>(group.indices.size()));
    group.last_page_len.push_back((state.kv_len - 1) % batching.page_size + 1);
    group.kv_lens.push_back(state.kv_len);
  }
  group.table = PageTable::from_csr(batching.page_size, batching.num_pages, group.kv_indptr, group.indices,
                                    group.last_page_len, group.kv_lens);
}

void Engine::make_rows(const Group& group, std::int32_t layer, const Rows& rows) const {
  const std::int64_t count = group.rows();
  for (std::size_t i = 0; i < group.spans.size(); ++i) {
    const RowSpan& span = group.spans[i];
    data_.write_kv(scheduler_, span.request, span.start, span.count, layer, rows.k.host(count), rows.v.host(count),
                   group.qo_indptr[i]);
    data_.write_q(scheduler_, span.request, span.start, span.count, layer, rows.q.host(count), group.qo_indptr[i]);
  }
  for (const MirroredTensor* tensor : {&rows.q, &rows.k, &rows.v}) tensor->upload(count);
}

void Engine::check_rows(Work work, const Group& group, std::int64_t step, std::int32_t layer, const Rows& rows,
                        RowCheck& check) const {
  const std::int64_t count = group.rows();
  rows.out.download(count);
  rows.lse.download(count);
  check.check(work, scheduler_, data_, step, layer, group.spans, rows.q.host(count), rows.out.host(count),
              static_cast<const float*>(rows.lse.host(count).data));
}

void Engine::run_layer(Work work, const Group& group, std::int64_t step, std::int32_t layer, StepTimes& times,
                       RowCheck* check, ChromeTrace* trace) {
  const std::int64_t rows = group.rows();
  make_rows(group, layer, rows_);

  const KvCache& cache = caches_[layer].view;
  const Clock::time_point start = Clock::now();
  workspace_->append_kv(rows_.k.device(rows), rows_.v.device(rows), group.qo_indptr, cache, group.table);
  const Clock::time_point append_called = Clock::now();
  synchronize(options_.device);
  const Clock::time_point appended = Clock::now();
  group.plan.run(rows_.q.device(rows), cache, rows_.out.device(rows), static_cast<float*>(rows_.lse.device(rows).data));
  const Clock::time_point attention_called = Clock::now();
  synchronize(options_.device);
  const Clock::time_point attended = Clock::now();

  times.append += appended - start;
  (work == Work::kPrefill ? times.prefill : times.decode) += attended - appended;
  if (work == Work::kDecode) times.decode_host += append_called - start + (attention_called - appended);
  if (trace != nullptr) {
    const nlohmann::json args = {{"layer", layer}, {"rows", rows}};
    trace->span("append", "append", start, appended, args);
    trace->span(work == Work::kPrefill ? "prefill" : "decode", "attention", appended, attended, args);
  }
  if (check != nullptr) check_rows(work, group, step, layer, rows_, *check);
}

void Engine::replay(const Group& group, std::int64_t step, StepTimes& times, RowCheck* check, ChromeTrace* trace) {
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) make_rows(group, layer, captured_->layers[layer]);
  synchronize(options_.device);  // the copies are not of the graph's stream

  const Stream stream = captured_->stream.get();
  const Clock::time_point start = Clock::now();
  captured_->session.step(group.table, stream);
  const Clock::time_point called = Clock::now();
  captured_->session.check(stream);
  const Clock::time_point done = Clock::now();

  times.decode += done - start;
  times.decode_host += called - start;
  if (trace != nullptr) trace->span("replay", "attention", start, done, {{"rows", group.rows()}});
  if (check == nullptr) return;
  for (std::int32_t layer = 0; layer < options_.layers; ++layer) {
    check_rows(Work::kDecode, group, step, layer, captured_->layers[layer], *check);
  }
}

}  // namespace fiw::cli
