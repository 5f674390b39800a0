// `fiw replay`: a serving trace through continuous batching and paged attention, with the figures at the end.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "commands.h"
#include "compare.h"
#include "device.h"
#include "engine.h"
#include "fiw/error.h"
#include "flags.h"
#include "perfetto.h"
#include "progress.h"
#include "row_check.h"
#include "scheduler.h"
#include "table.h"
#include "trace.h"

namespace fiw::cli {
namespace {

constexpr const char* kReplayHelp =
    "Replays a serving trace: continuous batching over a paged KV cache, with real attention in every layer.\n\n"
    "TRACE is either form, told apart by its first line:\n"
    "  Azure CSV            TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "  Mooncake JSON lines  {\"timestamp\": ms, \"input_length\": n, \"output_length\": n, \"hash_ids\": [...]},\n"
    "                       \"hash_ids\" has one id for every 512 prompt tokens begun, or none: [].\n\n"
    "A prompt shares the pages of the blocks whose ids it starts with, if they are computed when it is admitted;\n"
    "prompts in flight together do not wait for each other (--max-batch 1 shows the most that can be shared).\n\n"
    "Requests are served in order of arrival, each as soon as there is room: arrival times give the order only.\n"
    "Each step decodes one token (or one speculative window) for every request in flight and fills the rest of the\n"
    "token budget with chunks of prompts. Admission reserves the pages a request can need at worst, so nothing is\n"
    "preempted and nothing deadlocks; a request that could never fit the pool is rejected and counted.\n"
    "With --graphs the decode rows of all layers, their new K and V included, are captured once for each size of "
    "batch\n"
    "and replayed (CUDA graphs; on the CPU the same calls again); prompts are computed as without.\n"
    "q, K and V are made up from --seed; the time to make them and to check rows is not part of any figure but\n"
    "the wall time.";

struct ReplayOptions {
  std::string trace;
  std::int64_t requests = 100;
  EngineOptions engine;
  HeadCounts heads;
  std::int32_t head_dim = 128;
  SchedulerOptions batching;
  std::int64_t verify = 0;
  std::string trace_out;
  bool simulate = false;
  bool json = false;
};

struct ReplayTimes {
  StepTimes sum;
  std::vector<double> steps_ms;
  std::vector<double> decode_host_us;  ///< of steps that decode
  double wall_s = 0.0;
};

double seconds(StepTimes::Duration duration) { return std::chrono::duration<double>(duration).count(); }

/// Nearest rank; `sorted` is ascending.
double percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0.0;
  const double rank = std::ceil(percent / 100.0 * static_cast<double>(sorted.size()));
  return sorted[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
}

Trace load(const ReplayOptions& options, std::size_t& in_file) {
  Trace trace = read_trace_file(options.trace);
  in_file = trace.requests.size();
  if (options.requests > 0 && std::cmp_less(options.requests, in_file)) {
    trace.requests.resize(static_cast<std::size_t>(options.requests));
  }
  return trace;
}

/// Warns about requests that cannot fit; an error when none can.
void report_rejected(const Scheduler& scheduler, std::size_t requests) {
  const auto rejected = scheduler.rejected();
  if (rejected.empty()) return;
  const TraceRequest& first = scheduler.request(rejected.front());
  const std::string message = fmt::format(
      "{} of {} requests need more than the pool's {} pages; the first is request {}: {} + {} tokens, {} pages",
      rejected.size(), requests, scheduler.pool().num_pages(), rejected.front(), first.prompt_tokens,
      first.output_tokens, scheduler.worst_case_pages(first));
  if (rejected.size() == requests) throw Error(Status::kInvalidArgument, Reason::kTableSize, message);
  fmt::print(stderr, "rejected: {}\n", message);
}

/// What the whole run will compute; scheduling alone is fast and always comes out the same.
SchedulerTotals rehearse(const Trace& trace, const SchedulerOptions& options) {
  Scheduler scheduler(trace.requests, options);
  ScheduledStep step;
  while (scheduler.next(step)) scheduler.finish(step);
  return scheduler.totals();
}

/// Refuses what this machine's memory cannot hold before anything is made; page sizes and counts multiply quickly.
void check_memory_of(const ReplayOptions& options) {
  const SchedulerOptions& batching = options.batching;
  const double pages = batching.num_pages;
  const double accounts = pages * static_cast<double>(PagePool::bytes_per_page());
  if (options.simulate) {
    check_memory(fmt::format("the accounts of {} pages", batching.num_pages), accounts);
    return;
  }
  const double token = 2.0 * options.heads.kv * options.head_dim;  // K and V
  const double cache = options.engine.layers * pages * batching.page_size * token *
                       static_cast<double>(size_of(options.engine.kv_dtype));
  const double captured = options.engine.graphs
                              ? 1.0 * options.engine.layers * batching.max_batch * (batching.speculate + 1)
                              : 0.0;                                        // each layer has its rows
  const double row = (2.0 * options.heads.qo * options.head_dim + token) *  // q, out, new k and v
                         static_cast<double>(size_of(options.engine.dtype)) +
                     options.heads.qo * sizeof(float);
  const bool on_host = options.engine.device == kCpuDevice;
  const double host = 2.0 * accounts;  // the rehearsal has accounts of its own
  check_memory(fmt::format("a cache of {} layers, {} pages of {} tokens, {} KV heads of {} {} elements, with steps of "
                           "{} tokens,",
                           options.engine.layers, batching.num_pages, batching.page_size, options.heads.kv,
                           options.head_dim, short_name(options.engine.kv_dtype), batching.token_budget),
               cache + (batching.token_budget + captured) * row + (on_host ? host : 0.0), options.engine.device);
  if (!on_host) check_memory(fmt::format("the accounts of {} pages", batching.num_pages), host);
}

/// As far as a page table counts.
std::int32_t sum_of_largest(std::vector<std::int64_t> values, std::int32_t count) {
  std::sort(values.begin(), values.end(), std::greater<>());
  values.resize(std::min(values.size(), static_cast<std::size_t>(count)));
  const std::int64_t sum = std::accumulate(values.begin(), values.end(), std::int64_t{0});
  return static_cast<std::int32_t>(std::min<std::int64_t>(sum, std::numeric_limits<std::int32_t>::max()));
}

void run_steps(Scheduler& scheduler, Engine& engine, RowCheck* check, ChromeTrace* chrome,
               const SchedulerTotals& expected, ReplayTimes& times) {
  const auto begin = std::chrono::steady_clock::now();
  Progress progress;
  ScheduledStep step;
  while (scheduler.next(step)) {
    const StepTimes spent = engine.run(step, check, chrome);
    scheduler.finish(step);
    times.sum.plan += spent.plan;
    times.sum.append += spent.append;
    times.sum.prefill += spent.prefill;
    times.sum.decode += spent.decode;
    if (!step.decode.empty()) times.decode_host_us.push_back(seconds(spent.decode_host) * 1e6);
    times.steps_ms.push_back(seconds(spent.total()) * 1e3);
    progress.update([&] {
      const SchedulerTotals& totals = scheduler.totals();
      return fmt::format("step {} of {}: {} requests done, {} in flight, {} of {} pages, {:.0f} s", totals.steps,
                         expected.steps, totals.finished, scheduler.running(), scheduler.pool().used(),
                         scheduler.pool().num_pages(), seconds(std::chrono::steady_clock::now() - begin));
    });
  }
  times.wall_s = seconds(std::chrono::steady_clock::now() - begin);
}

nlohmann::json to_json(const CacheStats& stats) {
  return {{"hits", stats.hits}, {"misses", stats.misses}, {"evictions", stats.evictions}};
}

/// What scheduling alone decides.
nlohmann::json scheduling_results(const ReplayOptions& options, const Trace& trace, std::size_t in_file,
                                  const Scheduler& scheduler) {
  const SchedulerTotals& totals = scheduler.totals();
  return {{"trace", options.trace},
          {"form", to_string(trace.form)},
          {"requests",
           {{"in_file", in_file},
            {"replayed", trace.requests.size()},
            {"served", totals.finished},
            {"rejected", scheduler.rejected().size()}}},
          {"tokens",
           {{"prompt", totals.prompt_tokens},
            {"prompt_shared", totals.shared_tokens},
            {"generated", totals.generated_tokens}}},
          {"speculation",
           {{"drafts", options.batching.speculate},
            {"proposed", totals.draft_tokens},
            {"accepted", totals.accepted_tokens}}},
          {"steps", totals.steps},
          {"pages",
           {{"pool", scheduler.pool().num_pages()},
            {"size", options.batching.page_size},
            {"peak", scheduler.pool().peak_used()},
            {"shared", totals.shared_pages}}}};
}

/// What computing adds.
void add_engine_results(const ReplayOptions& options, const SchedulerTotals& totals, const Engine& engine,
                        const RowCheck& check, ReplayTimes& times, nlohmann::json& results) {
  std::sort(times.steps_ms.begin(), times.steps_ms.end());
  std::sort(times.decode_host_us.begin(), times.decode_host_us.end());
  const WorkspaceStats stats = engine.workspace().stats();
  const double total_s = seconds(times.sum.total());
  const auto computed = totals.prompt_tokens - totals.shared_tokens + totals.generated_tokens;
  results["layers"] = options.engine.layers;
  results["cache_bytes"] = engine.cache_bytes();
  results["plans"] = {
      {"decode", to_json(stats.decode)}, {"prefill", to_json(stats.prefill)}, {"verify", to_json(stats.verify)}};
  if (const std::optional<GraphStats> graphs = engine.graph_stats()) {
    results["graphs"] = {{"captures", graphs->captures},
                         {"replays", graphs->replays},
                         {"plans", graphs->plans},
                         {"plan_hits", graphs->plan_hits},
                         {"guard_trips", graphs->trips}};
  }
  results["decode_host_us"] = percentile(times.decode_host_us, 50);
  results["seconds"] = {{"planning", seconds(times.sum.plan)},
                        {"append", seconds(times.sum.append)},
                        {"prefill_attention", seconds(times.sum.prefill)},
                        {"decode_attention", seconds(times.sum.decode)},
                        {"attention", seconds(times.sum.attention())},
                        {"steps", total_s},
                        {"wall", times.wall_s}};
  results["tokens_per_second"] = total_s > 0.0 ? static_cast<double>(computed) / total_s : 0.0;
  results["step_ms"] = {{"p50", percentile(times.steps_ms, 50)},
                        {"p90", percentile(times.steps_ms, 90)},
                        {"p99", percentile(times.steps_ms, 99)}};
  results["scratch_bytes"] = {{"peak", stats.float_scratch_peak}, {"required", engine.required_workspace()}};
  results["verify"] = {{"rows", check.checked_rows()},
                       {"values", check.out_errors().compared() + check.lse_errors().compared()},
                       {"largest_error_out", check.out_errors().largest()},
                       {"largest_error_lse", check.lse_errors().largest()},
                       {"tolerance_out_absolute", check.out_errors().tolerance().absolute},
                       {"tolerance_out_relative", check.out_errors().tolerance().relative},
                       {"tolerance_lse", check.lse_errors().tolerance().absolute},
                       {"ok", check.ok()}};
}

std::string megabytes(const nlohmann::json& bytes) { return fmt::format("{:.1f} MB", bytes.get<double>() / 1e6); }

void print_table(const ReplayOptions& options, const nlohmann::json& r) {
  Table table({{"", Table::Align::kLeft}, {"", Table::Align::kLeft}});
  const auto number = [](const nlohmann::json& value) { return value.get<std::int64_t>(); };
  table.add({"trace", fmt::format("{} ({})", r["trace"].get<std::string>(), r["form"].get<std::string>())});
  table.add({"requests", fmt::format("{} served, {} rejected, of {} in the file", number(r["requests"]["served"]),
                                     number(r["requests"]["rejected"]), number(r["requests"]["in_file"]))});
  table.add({"prompt tokens", fmt::format("{}, {} of them shared", number(r["tokens"]["prompt"]),
                                          number(r["tokens"]["prompt_shared"]))});
  table.add({"generated tokens", fmt::format("{}", number(r["tokens"]["generated"]))});
  if (options.batching.speculate > 0) {
    table.add({"draft tokens", fmt::format("{}, {} of them accepted", number(r["speculation"]["proposed"]),
                                           number(r["speculation"]["accepted"]))});
  }
  table.add({"steps", fmt::format("{}", number(r["steps"]))});
  table.add({"pages of " + fmt::format("{}", number(r["pages"]["size"])),
             fmt::format("{} of {} at the peak, {} shared", number(r["pages"]["peak"]), number(r["pages"]["pool"]),
                         number(r["pages"]["shared"]))});
  if (!options.simulate) {
    const nlohmann::json& s = r["seconds"];
    const auto plans = [&](const char* kind) {
      const nlohmann::json& stats = r["plans"][kind];
      table.add({fmt::format("{} plans", kind),
                 fmt::format("{} made, {} found again, each for {} layers", number(stats["misses"]),
                             number(stats["hits"]), options.engine.layers)});
    };
    table.add(
        {"model", fmt::format("{} layers, heads {}/{}, head dim {}, {}, cache {} ({})", options.engine.layers,
                              options.heads.qo, options.heads.kv, options.head_dim, short_name(options.engine.dtype),
                              short_name(options.engine.kv_dtype), megabytes(r["cache_bytes"]))});
    plans("prefill");
    if (options.engine.graphs) {
      const nlohmann::json& graphs = r["graphs"];
      table.add(
          {"graphs", fmt::format("{} captures, {} replays of {} layers, {} plans, {} found again, {} guard trips",
                                 number(graphs["captures"]), number(graphs["replays"]), options.engine.layers,
                                 number(graphs["plans"]), number(graphs["plan_hits"]), number(graphs["guard_trips"]))});
    } else {
      plans(options.batching.speculate > 0 ? "verify" : "decode");
    }
    table.add({"decode host time",
               fmt::format("{:.1f} us a step (median): page table, plan and {}", r["decode_host_us"].get<double>(),
                           options.engine.graphs ? "replay" : "calls")});
    table.add({"planning", fmt::format("{:.3f} s, {:.1f} us a step", s["planning"].get<double>(),
                                       s["planning"].get<double>() * 1e6 / r["steps"].get<double>())});
    table.add({"append", fmt::format("{:.3f} s{}", s["append"].get<double>(),
                                     options.engine.graphs ? ", of prompts alone" : "")});
    table.add({"attention", fmt::format("{:.3f} s: {:.3f} prefill, {:.3f} decode{}", s["attention"].get<double>(),
                                        s["prefill_attention"].get<double>(), s["decode_attention"].get<double>(),
                                        options.engine.graphs ? " with its plans and appends" : "")});
    table.add(
        {"step time", fmt::format("p50 {:.2f} ms, p90 {:.2f} ms, p99 {:.2f} ms", r["step_ms"]["p50"].get<double>(),
                                  r["step_ms"]["p90"].get<double>(), r["step_ms"]["p99"].get<double>())});
    table.add({"throughput", fmt::format("{:.0f} tokens/s through all layers", r["tokens_per_second"].get<double>())});
    table.add({"scratch", fmt::format("{} at the peak, {} allowed for", megabytes(r["scratch_bytes"]["peak"]),
                                      megabytes(r["scratch_bytes"]["required"]))});
    table.add({"wall time", fmt::format("{:.1f} s, making up and checking data included", s["wall"].get<double>())});
    const nlohmann::json& v = r["verify"];
    if (options.verify > 0) {
      table.add({"verified rows",
                 fmt::format("{}, all heads of each: {}", number(v["rows"]), v["ok"].get<bool>() ? "ok" : "WRONG")});
      table.add({"largest error",
                 fmt::format("out {:.2e} (rounding allows {:.0e} + {:.4f} |out|), lse {:.2e} (allowed {:.0e})",
                             v["largest_error_out"].get<double>(), v["tolerance_out_absolute"].get<double>(),
                             v["tolerance_out_relative"].get<double>(), v["largest_error_lse"].get<double>(),
                             v["tolerance_lse"].get<double>())});
    }
  }
  table.print(std::cout);
}

int run_replay(ReplayOptions options) {
  check_memory_of(options);
  std::size_t in_file = 0;
  const Trace trace = load(options, in_file);
  options.batching.seed = options.engine.seed;
  AttentionParams& params = options.engine.params;
  params.num_qo_heads = options.heads.qo;
  params.num_kv_heads = options.heads.kv;
  params.head_dim_qk = params.head_dim_vo = options.head_dim;

  Scheduler scheduler(trace.requests, options.batching);
  report_rejected(scheduler, trace.requests.size());
  bool ok = true;
  nlohmann::json results;
  if (options.simulate) {
    ScheduledStep step;
    while (scheduler.next(step)) scheduler.finish(step);
    results = scheduling_results(options, trace, in_file, scheduler);
  } else {
    std::vector<std::int64_t> largest;
    for (const TraceRequest& request : trace.requests) {
      if (scheduler.worst_case_pages(request) > options.batching.num_pages) continue;
      largest.push_back(scheduler.worst_case_pages(request));
      options.engine.max_kv_len = std::max(options.engine.max_kv_len,
                                           request.prompt_tokens + request.output_tokens + options.batching.speculate);
    }
    options.engine.max_table_pages = sum_of_largest(std::move(largest), options.batching.max_batch);
    const SchedulerTotals expected = rehearse(trace, options.batching);
    Engine engine(options.engine, scheduler);
    RowCheck check(options.verify, expected, options.engine.layers, params,
                   output_tolerance(options.engine.dtype, options.engine.device), options.engine.seed);
    std::unique_ptr<ChromeTrace> chrome;
    if (!options.trace_out.empty()) chrome = std::make_unique<ChromeTrace>(options.trace_out);
    ReplayTimes times;
    run_steps(scheduler, engine, options.verify > 0 ? &check : nullptr, chrome.get(), expected, times);
    if (chrome) chrome->close();
    results = scheduling_results(options, trace, in_file, scheduler);
    add_engine_results(options, scheduler.totals(), engine, check, times, results);
    ok = check.ok();
    if (!ok) fmt::print(stderr, "verify: out of tolerance, first in {}\n", check.first_failure());
  }
  if (options.json) {
    print_json(results);
  } else {
    print_table(options, results);
  }
  return ok ? kExitOk : kExitFailure;
}

}  // namespace

void add_replay_command(CLI::App& app, int& exit_code) {
  CLI::App& replay = *app.add_subcommand("replay", "Replay a serving trace through paged attention");
  replay.footer(kReplayHelp);
  const auto options = std::make_shared<ReplayOptions>();
  replay.add_option("TRACE", options->trace, "Trace file")->required();
  add_number_flag(replay, "--requests", options->requests, "Replay only the first N requests; 0: all");

  replay.option_defaults()->group("Model");
  replay.add_option("--layers", options->engine.layers, "Layers, each with its own KV cache")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  add_heads_flag(replay, options->heads);
  add_head_dim_flag(replay, options->head_dim);
  add_dtype_flag(replay, "--dtype", options->engine.dtype, false, "Element type of q, new K and V, and the output");
  add_dtype_flag(replay, "--kv-dtype", options->engine.kv_dtype, true, "Element type of the KV cache");
  replay.option_defaults()->group("Batching");
  replay.add_option("--page-size", options->batching.page_size, "Tokens a page")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  replay.add_option("--pages", options->batching.num_pages, "Pages in the pool, shared by all requests")
      ->check(CLI::Range(1, 1 << 28))
      ->type_name("N");
  replay.add_option("--max-batch", options->batching.max_batch, "Requests in flight")
      ->check(CLI::Range(1, 1 << 16))
      ->type_name("N");
  replay.add_option("--token-budget", options->batching.token_budget, "Query tokens a step")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  replay.add_option("--speculate", options->batching.speculate, "Draft tokens: decode by windows of K+1; 0: off")
      ->check(CLI::Range(0, 63))
      ->type_name("K");
  replay.add_option("--acceptance", options->batching.acceptance, "Chance that the next draft token is accepted")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("P");
  replay.option_defaults()->group("Run");
  add_number_flag(replay, "--verify", options->verify,
                  "Recompute N random output rows; exit 1 if one is out of tolerance");
  add_number_flag(replay, "--seed", options->engine.seed, "Seed of all made-up data");
  add_device_flag(replay, options->engine.device);
  add_threads_flag(replay, options->engine.threads);
  replay.add_flag("--graphs", options->engine.graphs, "Capture decode steps once and replay them");
  replay.add_flag("--simulate", options->simulate, "Schedule only: no attention, no cache memory");
  replay.add_option("--trace-out", options->trace_out, "Write a Chrome/Perfetto trace of the steps")
      ->check(CLI::Validator([](const std::string& file) { return file.empty() ? "a file name" : ""; }, "FILE"));
  replay.add_flag("--json", options->json, "Results as JSON");
  replay.callback([options, &exit_code] {
    if (options->simulate && (options->verify > 0 || !options->trace_out.empty())) {
      throw UsageError("--simulate computes nothing, so it does not go with --verify or --trace-out");
    }
    if (options->simulate && options->engine.graphs) {
      throw UsageError("--simulate computes nothing, so it does not go with --graphs");
    }
    exit_code = run_replay(*options);
  });
}

}  // namespace fiw::cli
