// `fiw bench`: how close decode and prefill come to what this machine can do, measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "commands.h"
#include "cpu/machine_limits.h"
#include "device.h"
#include "flags.h"
#include "mix.h"
#include "progress.h"
#include "random_fill.h"
#include "table.h"

namespace fiw::cli {
namespace {

constexpr const char* kBenchHelp =
    "Times decode and causal prefill over a list of shapes, alternating with passes that measure this machine's read\n"
    "bandwidth and float32 FMA peak. 'of limit' is the least time that these two allow (the larger of\n"
    "bytes / bandwidth and operations / peak) as a share of the time of a call, medians all three. K and V rotate\n"
    "over more memory than the caches hold. Planning is timed for a decode batch of 256.";

struct Shape {
  std::string name;
  bool prefill = false;
  HeadCounts heads;
  std::int32_t head_dim = 128;
  std::int32_t batch = 1;
  std::int32_t tokens = 0;  ///< keys a request, and queries too when prefilling
  DType kv_dtype = DType::kBFloat16;
};

constexpr std::int32_t kPageSize = 16;

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  const auto add = [&list](bool prefill, HeadCounts heads, std::int32_t batch, std::int32_t tokens,
                           DType kv_dtype = DType::kBFloat16) {
    Shape shape{"", prefill, heads, 128, batch, tokens, kv_dtype};
    shape.name = fmt::format("{} {}/{} D{} {} x {} {}", prefill ? "prefill" : "decode", heads.qo, heads.kv,
                             shape.head_dim, batch, tokens, short_name(kv_dtype));
    list.push_back(std::move(shape));
  };
  add(false, {32, 8}, 8, 4096);
  add(false, {32, 8}, 1, 32768);
  add(false, {64, 8}, 8, 4096);
  add(false, {8, 1}, 8, 4096);
  add(false, {32, 32}, 4, 2048);
  add(false, {32, 8}, 8, 4096, DType::kFloat8E4M3);
  add(false, {32, 8}, 8, 4096, DType::kFloat16);
  add(true, {32, 8}, 1, 2048);
  add(true, {32, 8}, 4, 512);
  add(true, {32, 8}, 1, 2048, DType::kFloat8E4M3);
  return list;
}

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Median seconds of a call, over at least `min_seconds` and five calls. Called first twice for warmth. `between` runs
/// between calls, untimed.
double time_calls(double min_seconds, const std::function<void(std::size_t)>& call,
                  const std::function<void()>& between = {}) {
  constexpr std::size_t kWarmCalls = 2;
  constexpr std::size_t kLeastSamples = 5;
  std::size_t index = 0;
  while (index < kWarmCalls) call(index++);
  std::vector<double> samples;
  const Clock::time_point begin = Clock::now();
  while (samples.size() < kLeastSamples || seconds(Clock::now() - begin) < min_seconds) {
    const Clock::time_point start = Clock::now();
    call(index++);
    samples.push_back(seconds(Clock::now() - start));
    if (between) between();
  }
  return median(std::move(samples));
}

/// Random values, made for the first megabyte and repeated.
void fill_cache(const Buffer& buffer, DType dtype, std::uint64_t seed) {
  const std::size_t block = std::min<std::size_t>(buffer.bytes(), 1U << 20);
  fill_random(buffer.data(), dtype, static_cast<std::int64_t>(block / size_of(dtype)), seed);
  for (std::size_t at = block; at < buffer.bytes(); at += block) {
    std::memcpy(buffer.as<std::byte>() + at, buffer.data(), std::min(block, buffer.bytes() - at));
  }
}

/// Passes of the meter, spread over the calls that they are compared to.
struct Limits {
  std::vector<double> bandwidth;  ///< bytes a second
  std::vector<double> peak;       ///< floating-point operations a second
  std::size_t calls = 0;

  void measure(LimitMeter& meter) {
    constexpr std::size_t kCallsBetween = 4;
    if (calls++ % kCallsBetween != 0) return;
    bandwidth.push_back(meter.read_bandwidth());
    peak.push_back(meter.fma_peak());
  }
};

nlohmann::json bench_shape(const Shape& shape, FlashInferWorkspace& workspace, LimitMeter& meter, double min_seconds) {
  constexpr std::size_t kRotatedBytes = std::size_t{192} << 20;
  const std::vector<std::int32_t> kv_lens(shape.batch, shape.tokens);
  const std::vector<std::int32_t> qo_lens(shape.batch, shape.prefill ? shape.tokens : 1);
  const std::int64_t num_pages = pages_needed(kPageSize, kv_lens);
  const PageTable table = scattered_table(kPageSize, num_pages, kv_lens, 1);
  const std::vector<std::int32_t> qo_indptr = indptr_of(qo_lens);
  const std::int64_t rows = qo_indptr.back();

  std::vector<OwnedKvCache> caches;
  for (std::size_t bytes = 0; caches.empty() || bytes < kRotatedBytes;) {
    OwnedKvCache& cache = caches.emplace_back(shape.kv_dtype, num_pages, kPageSize, shape.heads.kv, shape.head_dim);
    fill_cache(cache.k, shape.kv_dtype, mix(1, caches.size()));
    fill_cache(cache.v, shape.kv_dtype, mix(2, caches.size()));
    bytes += cache.k.bytes() + cache.v.bytes();
  }
  const OwnedTensor q(DType::kBFloat16, rows, shape.heads.qo, shape.head_dim);
  const OwnedTensor out(DType::kBFloat16, rows, shape.heads.qo, shape.head_dim);
  fill_random(q.view, 3);

  StepSpec spec;
  spec.params.num_qo_heads = shape.heads.qo;
  spec.params.num_kv_heads = shape.heads.kv;
  spec.params.head_dim_qk = shape.head_dim;
  spec.kv_dtype = shape.kv_dtype;
  AttentionStep step;
  if (shape.prefill) {
    step = workspace.plan_prefill(qo_indptr, table, spec);
  } else {
    step = workspace.plan_decode(table, spec);
  }
  Limits limits;
  const double time = time_calls(
      min_seconds, [&](std::size_t i) { step.run(q.view, caches[i % caches.size()].view, out.view); },
      [&] { limits.measure(meter); });

  const double visible =
      shape.prefill ? 0.5 * shape.tokens * (shape.tokens + 1.0) : shape.tokens;  // a request and head
  const double operations = 4.0 * visible * shape.batch * shape.heads.qo * shape.head_dim;
  const auto bytes =
      static_cast<double>(caches.front().k.bytes() + caches.front().v.bytes() + q.memory.bytes() + out.memory.bytes());
  const double bandwidth = median(limits.bandwidth);
  const double peak = median(limits.peak);
  const double floor = std::max(bytes / bandwidth, operations / peak);
  return {{"name", shape.name},
          {"seconds", time},
          {"gigabytes_per_second", bytes / time / 1e9},
          {"gigaflops", operations / time / 1e9},
          {"read_bandwidth", bandwidth},
          {"fma_peak", peak},
          {"limit", bytes / bandwidth > operations / peak ? "bandwidth" : "peak"},
          {"of_limit", floor / time}};
}

nlohmann::json bench_planning(int device, std::int32_t threads, double min_seconds) {
  constexpr std::int32_t kBatch = 256;
  std::vector<std::int32_t> kv_lens(kBatch);
  for (std::int32_t i = 0; i < kBatch; ++i) kv_lens[i] = 1 + static_cast<std::int32_t>(mix(7U, i) % 4096);
  const std::int64_t num_pages = pages_needed(kPageSize, kv_lens) + kBatch;
  std::vector<PageTable> tables = {scattered_table(kPageSize, num_pages, kv_lens, 1)};
  for (std::int32_t& len : kv_lens) len += kPageSize;  // every request has gained a page
  tables.push_back(scattered_table(kPageSize, num_pages, kv_lens, 2));
  const std::vector<PageTable> rebuilt = {scattered_table(kPageSize, num_pages, kv_lens, 2),
                                          scattered_table(kPageSize, num_pages, kv_lens, 2)};

  WorkspaceOptions options;
  options.cache_entries = 1;  // so that alternating tables always misses
  options.num_threads = threads;
  const auto workspace = open_workspace(device, options);
  StepSpec spec;
  spec.params.num_qo_heads = 32;
  spec.params.num_kv_heads = 8;
  spec.params.head_dim_qk = 128;
  const auto plan = [&](const PageTable& table, bool hit) {
    if (workspace->plan_decode(table, spec).info().cache_hit != hit) {
      throw Error(Status::kInternal, Reason::kBug,
                  fmt::format("planning was expected to be a cache {}", hit ? "hit" : "miss"));
    }
  };
  const double miss = time_calls(min_seconds, [&](std::size_t i) { plan(tables[i % 2], false); });
  workspace->invalidate_runtime_cache();
  workspace->plan_decode(tables[1], spec);
  const double same = time_calls(min_seconds, [&](std::size_t) { plan(tables[1], true); });
  const double equal = time_calls(min_seconds, [&](std::size_t i) { plan(rebuilt[i % 2], true); });
  return {{"batch", kBatch}, {"miss_seconds", miss}, {"hit_seconds", same}, {"hit_rebuilt_table_seconds", equal}};
}

struct BenchOptions {
  std::string filter;
  double min_time = 1.0;
  int device = kCpuDevice;
  std::int32_t threads = 0;
  bool json = false;
};

void print(const nlohmann::json& results) {
  const auto number = [](const nlohmann::json& value, double unit) { return value.get<double>() / unit; };
  std::cout << fmt::format("{} threads\n\n", results["threads"].get<int>());
  Table table({{"shape"},
               {"median", Table::Align::kRight},
               {"GB/s", Table::Align::kRight},
               {"GFLOP/s", Table::Align::kRight},
               {"of limit", Table::Align::kRight},
               {"limit"},
               {"reads GB/s", Table::Align::kRight},
               {"FMA GFLOP/s", Table::Align::kRight}});
  for (const nlohmann::json& shape : results["shapes"]) {
    table.add({shape["name"].get<std::string>(), fmt::format("{:.3f} ms", number(shape["seconds"], 1e-3)),
               fmt::format("{:.2f}", number(shape["gigabytes_per_second"], 1)),
               fmt::format("{:.1f}", number(shape["gigaflops"], 1)),
               fmt::format("{:.0f} %", number(shape["of_limit"], 0.01)), shape["limit"].get<std::string>(),
               fmt::format("{:.1f}", number(shape["read_bandwidth"], 1e9)),
               fmt::format("{:.0f}", number(shape["fma_peak"], 1e9))});
  }
  table.print(std::cout);
  const nlohmann::json& plan = results["planning"];
  std::cout << fmt::format(
      "\nplanning a decode batch of {}: {:.2f} us, a cache hit {:.2f} us ({:.2f} us with a rebuilt table)\n",
      plan["batch"].get<int>(), number(plan["miss_seconds"], 1e-6), number(plan["hit_seconds"], 1e-6),
      number(plan["hit_rebuilt_table_seconds"], 1e-6));
}

int run_bench(const BenchOptions& options) {
  std::vector<Shape> list = shapes();
  std::erase_if(list, [&](const Shape& shape) { return shape.name.find(options.filter) == std::string::npos; });
  if (list.empty()) throw UsageError(fmt::format("--filter '{}' matches no shape", options.filter));

  WorkspaceOptions workspace_options;
  workspace_options.num_threads = options.threads;
  const auto workspace = open_workspace(options.device, workspace_options);
  const std::int32_t threads = workspace->device_props().num_workers;
  LimitMeter meter(threads);
  nlohmann::json results = {{"threads", threads}, {"shapes", nlohmann::json::array()}};
  {
    Progress progress;
    for (const Shape& shape : list) {
      progress.update([&] { return shape.name; });
      results["shapes"].push_back(bench_shape(shape, *workspace, meter, options.min_time));
    }
  }
  results["planning"] = bench_planning(options.device, options.threads, options.min_time / 10.0);
  if (options.json) {
    print_json(results);
  } else {
    print(results);
  }
  return kExitOk;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  CLI::App& bench = *app.add_subcommand("bench", "Time attention beside this machine's own limits");
  bench.footer(kBenchHelp);
  const auto options = std::make_shared<BenchOptions>();
  bench.add_option("--filter", options->filter, "Only shapes whose name contains TEXT, such as 'decode' or 'fp8'")
      ->type_name("TEXT");
  bench.add_option("--min-time", options->min_time, "Seconds to spend on each shape, at least")
      ->check(CLI::Range(0.0, 3600.0))
      ->type_name("S");
  add_device_flag(bench, options->device);
  add_threads_flag(bench, options->threads);
  bench.add_flag("--json", options->json, "Results as JSON");
  bench.callback([options, &exit_code] { exit_code = run_bench(*options); });
}

}  // namespace fiw::cli
