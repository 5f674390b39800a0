// What captured steps cost: the host's and the device's time of a decode step with graphs and without, and that of the
// node that plans on the device. With --trace, long replays of a trace as well, checked against the reference.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cuda_bench.h"
#include "empty_kernel.h"
#include "fiw/graph.h"
#include "graph_shape.h"
#include "graph_trace.h"
#include "table.h"
#include "trace.h"

namespace fiw::bench {
namespace {

constexpr std::int32_t kLayers = 32;
constexpr int kWarmUp = 10;

struct Options {
  int samples = 200;
  std::string json{};
  std::string trace{};
  std::int64_t steps = 10000;
};

/// Lengths spread over two orders of magnitude, as in a trace of conversations; all requests grow by a token at a time.
class Growing {
 public:
  explicit Growing(std::int32_t most_steps) {
    std::int32_t pages = 0;
    for (std::int32_t r = 0; r < kBatch; ++r) {
      lens_.push_back(static_cast<std::int32_t>(100 * std::exp2(r / 9.0)));
      pages += (lens_.back() + most_steps + kPageSize - 1) / kPageSize;
    }
    ids_.resize(static_cast<std::size_t>(pages));
    std::iota(ids_.begin(), ids_.end(), 0);
    std::shuffle(ids_.begin(), ids_.end(), std::mt19937(4));
    restart();
  }

  std::int32_t pages() const { return static_cast<std::int32_t>(ids_.size()); }
  const PageTable& table() const { return table_; }
  void restart() {
    next_ = ids_.begin();
    std::vector<std::vector<std::int32_t>> lists;
    for (const std::int32_t len : lens_) lists.push_back(take((len + kPageSize - 1) / kPageSize));
    table_ = PageTable::from_pages(kPageSize, pages(), lists, lens_);
  }
  void grow() { table_.advance(1, take(table_.pages_needed(1))); }

 private:
  std::vector<std::int32_t> take(std::int64_t count) {
    const auto begin = next_;
    next_ += count;
    return {begin, next_};
  }

  std::vector<std::int32_t> lens_;
  std::vector<std::int32_t> ids_;
  std::vector<std::int32_t>::const_iterator next_;
  PageTable table_;
};

/// Medians, in microseconds.
struct StepTime {
  std::string name{};
  double host_idle = 0;  ///< of the host, with nothing on the device
  double host_busy = 0;  ///< of the host, behind a step that runs: an engine is ahead of its device
  double device = 0;
  std::int64_t recaptures = 0;
  std::vector<float> out{};  ///< of the last step
};

/// Decode steps of 32 layers, each with its own cache.
class Steps {
 public:
  explicit Steps(int samples)
      : samples_(samples),
        growing_(2 * (samples + kWarmUp)),
        arrays_(growing_.pages()),
        caches_(2 * kLayers * cache_bytes()),
        q_(row_bytes()),
        out_(row_bytes()),
        workspace_(FlashInferWorkspace::create(kDevice)) {
    fill(caches_.data(), 2 * kLayers * cache_bytes(), DType::kBFloat16, 1);
    fill(q_.data(), row_bytes(), DType::kBFloat16, 2);
  }

  StepTime host_tables() {
    GraphSession session = make_session({});
    capture(session);
    return measure(
        "session.step, host tables", [] {},
        [&] {
          growing_.grow();
          session.step(growing_.table(), stream_.get());
        },
        &session);
  }
  StepTime live_table() {
    GraphSession session = make_session(arrays_.view(growing_.pages()));
    capture(session);
    return measure(
        "session.replay, planned on the device",
        [&] {
          growing_.grow();
          arrays_.put(growing_.table(), stream_.get());
        },
        [&] { session.replay(kBatch, stream_.get()); }, &session);
  }
  StepTime eager() {
    return measure(
        "32 calls of decode", [] {},
        [&] {
          growing_.grow();
          for (std::int32_t layer = 0; layer < kLayers; ++layer) {
            workspace_->decode(q(), cache(layer), growing_.table(), layer_spec().params, out(), nullptr, {},
                               stream_.get());
          }
        },
        nullptr);
  }

 private:
  std::size_t cache_bytes() const { return static_cast<std::size_t>(growing_.pages() * kPageSize * kKvRow) * kElement; }
  static std::size_t row_bytes() { return static_cast<std::size_t>(kBatch * kQoRow) * kElement; }
  ConstTensor q() const { return {q_.data(), DType::kBFloat16, kBatch, kQoHeads, kHeadDim, kDevice}; }
  Tensor out() const { return {out_.data(), DType::kBFloat16, kBatch, kQoHeads, kHeadDim, kDevice}; }
  KvCache cache(std::int32_t layer) const {
    std::byte* const k = caches_.data() + static_cast<std::size_t>(2 * layer) * cache_bytes();
    return KvCache::contiguous(k, k + cache_bytes(), DType::kBFloat16, KvLayout::kNHD, growing_.pages(), kPageSize,
                               kKvHeads, kHeadDim, 0, kDevice);
  }

  GraphSession make_session(const std::optional<DevicePageTable>& live_table) {
    const StepSpec spec = layer_spec();
    return GraphSession::decode(*workspace_, {&spec, 1},
                                {.max_batch = kBatch,
                                 .max_pages = growing_.pages(),
                                 .page_size = kPageSize,
                                 .num_pages = growing_.pages(),
                                 .live_table = live_table});
  }
  void capture(GraphSession& session) {
    session.capture(
        [&](std::int32_t) {
          for (std::int32_t layer = 0; layer < kLayers; ++layer) session.run(q(), cache(layer), out());
        },
        stream_.get());
  }

  /// Steps in pairs: the first finds the device idle, the second behind it is timed there as well. `before` is not
  /// timed and must not wait for the device.
  StepTime measure(const std::string& name, const std::function<void()>& before, const std::function<void()>& step,
                   GraphSession* session) {
    std::vector<double> idle;
    std::vector<double> busy;
    std::vector<double> device;
    const auto host_time = [&] {
      const auto begin = std::chrono::steady_clock::now();
      step();
      return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
    };
    growing_.restart();
    check(cudaMemsetAsync(out_.data(), 0xFF, row_bytes(), stream_.get()), "cudaMemsetAsync");
    for (int i = -kWarmUp; i < samples_; ++i) {
      before();
      stream_.synchronize();
      const double first = host_time();
      before();
      clock_.begin(stream_.get());
      const double second = host_time();
      clock_.end(stream_.get());
      const double elapsed = clock_.elapsed() * 1e3;
      if (i < 0) continue;
      idle.push_back(first);
      busy.push_back(second);
      device.push_back(elapsed);
    }
    StepTime time{.name = name, .host_idle = median(idle), .host_busy = median(busy), .device = median(device)};
    if (session != nullptr) {
      session->check(stream_.get());
      time.recaptures = static_cast<std::int64_t>(session->stats().captures) - std::ssize(session->buckets());
    }
    std::vector<std::uint16_t> bits(row_bytes() / kElement);
    check(cudaMemcpy(bits.data(), out_.data(), row_bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (std::size_t i = 0; i < bits.size(); ++i) {
      time.out.push_back(load_float(bits.data(), DType::kBFloat16, static_cast<std::int64_t>(i)));
    }
    return time;
  }

  const int samples_;
  Growing growing_;
  LiveArrays arrays_;
  DeviceMemory caches_;
  DeviceMemory q_;
  DeviceMemory out_;
  OwnStream stream_;
  std::unique_ptr<FlashInferWorkspace> workspace_;
  Clock clock_;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double apart = std::abs(double{a[i]} - double{b[i]});
    largest = std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(largest, apart);
  }
  return largest;
}

class RecordedGraph {
 public:
  RecordedGraph(cudaStream_t stream, const std::function<void()>& enqueue) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    enqueue();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
  }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;
  ~RecordedGraph() { cudaGraphExecDestroy(graph_); }
  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(graph_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// Medians, in microseconds.
struct NodeTime {
  std::string name{};
  double alone = 0;  ///< of a graph with this node alone, its launch on the device included
  double more = 0;   ///< what one more of them adds to a graph
};

NodeTime node_time(const std::string& name, int samples, cudaStream_t stream, const std::function<void()>& enqueue) {
  constexpr int kMore = 64;
  constexpr int kLaunches = 20;
  const RecordedGraph one(stream, enqueue);
  const RecordedGraph many(stream, [&] {
    for (int i = 0; i < 1 + kMore; ++i) enqueue();
  });
  one.launch(stream);
  many.launch(stream);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // kernels are loaded before a stream is held back
  Clock clock;
  const auto launch_time = [&](const RecordedGraph& graph) {
    const double milliseconds = clock.time(stream, [&] {
      for (int i = 0; i < kLaunches; ++i) graph.launch(stream);
    });
    return milliseconds * 1e3 / kLaunches;
  };
  std::vector<double> alone;
  std::vector<double> more;
  for (int i = -kWarmUp; i < samples; ++i) {
    const double of_one = launch_time(one);
    const double of_many = launch_time(many);
    if (i < 0) continue;
    alone.push_back(of_one);
    more.push_back((of_many - of_one) / kMore);
  }
  return {name, median(alone), median(more)};
}

/// The head of a captured step of 64 requests, without the step.
std::vector<NodeTime> node_times(int samples) {
  Growing growing(0);
  LiveArrays arrays(growing.pages());
  const OwnStream stream;
  const std::unique_ptr<FlashInferWorkspace> workspace = FlashInferWorkspace::create(kDevice);
  arrays.put(growing.table(), stream.get());
  std::vector<NodeTime> times;
  times.push_back(node_time("an empty kernel", samples, stream.get(),
                            [&] { check(launch_empty_kernel(stream.get()), "launching a kernel"); }));
  for (const bool plan : {true, false}) {
    const StepSpec spec = layer_spec();
    GraphSession session = GraphSession::decode(*workspace, {&spec, 1},
                                                {.max_batch = kBatch,
                                                 .max_pages = growing.pages(),
                                                 .page_size = kPageSize,
                                                 .num_pages = growing.pages(),
                                                 .live_table = arrays.view(growing.pages()),
                                                 .plan_on_device = plan});
    if (!plan) session.prepare(growing.table(), stream.get());
    times.push_back(node_time(plan ? "planning" : "the comparison alone", samples, stream.get(),
                              [&] { session.begin(kBatch, stream.get()); }));
    session.check(stream.get());
  }
  return times;
}

nlohmann::json report(const std::vector<StepTime>& times) {
  using cli::Table;
  Table table({{fmt::format("decode step, batch {}, {} layers; us", kBatch, kLayers), Table::Align::kLeft},
               {"host, device idle", Table::Align::kRight},
               {"host, device busy", Table::Align::kRight},
               {"device", Table::Align::kRight},
               {"recaptures", Table::Align::kRight},
               {"differs by", Table::Align::kRight}});
  nlohmann::json records = nlohmann::json::array();
  for (const StepTime& time : times) {
    const double difference = largest_difference(time.out, times.back().out);
    table.add({time.name, fmt::format("{:.1f}", time.host_idle), fmt::format("{:.1f}", time.host_busy),
               fmt::format("{:.1f}", time.device), fmt::format("{}", time.recaptures),
               fmt::format("{:.1e}", difference)});
    records.push_back({{"name", time.name},
                       {"host_idle_us", time.host_idle},
                       {"host_busy_us", time.host_busy},
                       {"device_us", time.device},
                       {"recaptures", time.recaptures},
                       {"difference", difference}});
  }
  table.print(std::cout);
  return records;
}

nlohmann::json report(const std::vector<NodeTime>& times) {
  using cli::Table;
  Table table({{fmt::format("node, {} requests; us on the device", kBatch), Table::Align::kLeft},
               {"a graph of it", Table::Align::kRight},
               {"one more in a graph", Table::Align::kRight}});
  nlohmann::json records = nlohmann::json::array();
  for (const NodeTime& time : times) {
    table.add({time.name, fmt::format("{:.2f}", time.alone), fmt::format("{:.2f}", time.more)});
    records.push_back({{"name", time.name}, {"alone_us", time.alone}, {"more_us", time.more}});
  }
  std::cout << '\n';
  table.print(std::cout);
  return records;
}

nlohmann::json report(const std::vector<TraceReplay>& replays) {
  using cli::Table;
  Table table({{"replay of the trace", Table::Align::kLeft},
               {"steps", Table::Align::kRight},
               {"requests", Table::Align::kRight},
               {"recaptures", Table::Align::kRight},
               {"trips", Table::Align::kRight},
               {"plans", Table::Align::kRight},
               {"hits", Table::Align::kRight},
               {"rows checked", Table::Align::kRight},
               {"largest error", Table::Align::kRight},
               {"wrong", Table::Align::kRight},
               {"s", Table::Align::kRight}});
  nlohmann::json records = nlohmann::json::array();
  for (const TraceReplay& replay : replays) {
    table.add({replay.name, fmt::format("{}", replay.steps), fmt::format("{}", replay.requests),
               fmt::format("{}", replay.recaptures), fmt::format("{}", replay.stats.trips),
               fmt::format("{}", replay.stats.plans), fmt::format("{}", replay.stats.plan_hits),
               fmt::format("{}", replay.rows), fmt::format("{:.2e}", replay.errors.largest()),
               fmt::format("{} of {}", replay.errors.failures(), replay.errors.compared()),
               fmt::format("{:.1f}", replay.seconds)});
    records.push_back({{"name", replay.name},
                       {"steps", replay.steps},
                       {"requests", replay.requests},
                       {"captures", replay.stats.captures},
                       {"recaptures", replay.recaptures},
                       {"replays", replay.stats.replays},
                       {"trips", replay.stats.trips},
                       {"plans", replay.stats.plans},
                       {"plan_hits", replay.stats.plan_hits},
                       {"rows", replay.rows},
                       {"values", replay.errors.compared()},
                       {"wrong", replay.errors.failures()},
                       {"largest_error", replay.errors.largest()},
                       {"seconds", replay.seconds}});
  }
  std::cout << '\n';
  table.print(std::cout);
  return records;
}

int run(const Options& options) {
  // bf16 sums of values up to 1, taken in another order.
  constexpr double kTolerance = 0.03;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print("skipped: no CUDA device\n");
    return 0;
  }
  cli::Trace trace;
  if (!options.trace.empty()) trace = cli::read_trace_file(options.trace);
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, kDevice), "cudaGetDeviceProperties");
  std::cout << fmt::format("{}, medians of {} samples\n\n", device.name, options.samples);

  nlohmann::json results{{"device", device.name}, {"samples", options.samples}};
  bool ok = true;
  {
    Steps steps(options.samples);
    results["steps"] = report(std::vector{steps.host_tables(), steps.live_table(), steps.eager()});
  }
  for (const nlohmann::json& record : results["steps"]) {
    ok = ok && record["recaptures"] == 0 && record["difference"].get<double>() <= kTolerance;
  }
  results["nodes"] = report(node_times(options.samples));
  if (!options.trace.empty()) {
    std::vector<TraceReplay> replays;
    for (const std::int32_t window : {1, 5}) {
      for (const bool live : {false, true}) replays.push_back(replay_trace(trace, options.steps, window, live));
    }
    results["replays"] = report(replays);
    ok = ok && std::ranges::all_of(replays, &TraceReplay::ok);
  }
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << results.dump(2) << '\n';
    file.close();
    if (!file) throw std::runtime_error(fmt::format("cannot write {}", options.json));
  }
  std::cout << (ok ? "\nok\n" : "\nWRONG\n");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace fiw::bench

int main(int argc, char** argv) {
  fiw::bench::Options options;
  CLI::App app("Measures captured steps");
  app.add_option("--samples", options.samples, "Pairs of steps, and launches of a node, for each median")
      ->check(CLI::Range(1, 10000));
  app.add_option("--json", options.json, "File for the results");
  CLI::Option* const trace = app.add_option("--trace", options.trace, "Trace file: replay it as well");
  app.add_option("--steps", options.steps, "Steps of each replay")->check(CLI::Range(1, 1 << 30))->needs(trace);
  CLI11_PARSE(app, argc, argv);
  try {
    return fiw::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "graph_steps: {}\n", error.what());
    return 2;
  }
}
