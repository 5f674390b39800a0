// Times every CUDA route that can serve a shape, in turns within one run, and says how far the route that the table
// chooses is behind the best. The general kernel is left out: it serves what no other route can, and slowly. Beside
// decode and verify stands a kernel that reads as much K and V and does nothing else.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"
#include "core/support.h"
#include "cuda/routes.h"
#include "cuda_bench.h"
#include "fiw/workspace.h"
#include "read_kernel.h"

namespace fiw::bench {
namespace {

constexpr int kDevice = 0;
constexpr double kGoal = 1.03;

struct Route {
  const char* name;
  CudaRoute choice;
  KernelFamily family;
};

constexpr Route kRoutes[] = {{"stream", CudaRoute::kStream, KernelFamily::kCudaStream},
                             {"core", CudaRoute::kCore, KernelFamily::kCudaCore},
                             {"tile", CudaRoute::kTile, KernelFamily::kTensorTile},
                             {"hopper", CudaRoute::kHopper, KernelFamily::kHopper},
                             {"hopper_paged", CudaRoute::kHopperPaged, KernelFamily::kHopperPaged},
                             {"prefill", CudaRoute::kPrefill, KernelFamily::kPrefill}};
constexpr std::size_t kNumRoutes = std::size(kRoutes);

enum class Call { kDecode, kVerify, kPrefill, kRagged };

struct Shape {
  std::string name{};
  Call call = Call::kDecode;
  std::int32_t qo_heads = 32;
  std::int32_t kv_heads = 8;
  std::vector<std::int32_t> qo_lens{};
  std::vector<std::int32_t> kv_lens{};
  std::int32_t head_dim = 128;
  std::int32_t page_size = 16;
  DType kv_dtype = DType::kBFloat16;
  std::int32_t window_left = -1;
  float soft_cap = 0;

  std::int32_t batch() const { return static_cast<std::int32_t>(kv_lens.size()); }
  std::int64_t rows() const { return std::accumulate(qo_lens.begin(), qo_lens.end(), std::int64_t{0}); }
  std::int64_t tokens() const { return std::accumulate(kv_lens.begin(), kv_lens.end(), std::int64_t{0}); }
  std::int64_t pages() const {
    std::int64_t pages = 0;
    for (const std::int32_t kv_len : kv_lens) pages += (kv_len + page_size - 1) / page_size;
    return pages;
  }
  /// Of K, and as many of V.
  std::size_t cache_bytes() const {
    return static_cast<std::size_t>(pages() * page_size) * kv_heads * head_dim * size_of(kv_dtype);
  }
  std::size_t row_bytes() const { return static_cast<std::size_t>(qo_heads) * head_dim * size_of(DType::kBFloat16); }
  StepSpec spec() const {
    StepSpec spec{.params = {.num_qo_heads = qo_heads, .num_kv_heads = kv_heads, .head_dim_qk = head_dim},
                  .kv_dtype = kv_dtype};
    spec.params.window_left = window_left;
    spec.params.logits_soft_cap = soft_cap;
    return support::resolve(spec);
  }
  double operations() const {
    double seen = 0;
    for (std::size_t r = 0; r < kv_lens.size(); ++r) {
      for (std::int32_t p = kv_lens[r] - qo_lens[r]; p < kv_lens[r]; ++p) {
        seen += 1 + (window_left < 0 ? p : std::min(p, window_left));
      }
    }
    return 4.0 * seen * qo_heads * head_dim;
  }
};

class Shapes {
 public:
  Shapes() {
    decode();
    verify();
    prefill();
  }
  const std::vector<Shape>& list() const { return list_; }

 private:
  Shape& add(Call call, const std::string& name, std::int32_t qo_heads, std::int32_t kv_heads, std::int32_t batch,
             std::int32_t qo_len, std::int32_t kv_len) {
    Shape& shape = list_.emplace_back();
    shape.call = call;
    shape.qo_heads = qo_heads;
    shape.kv_heads = kv_heads;
    shape.qo_lens.assign(batch, qo_len);
    shape.kv_lens.assign(batch, kv_len);
    shape.name = fmt::format("{} {}/{} b{} {}{}", name, qo_heads, kv_heads, batch,
                             call == Call::kPrefill && qo_len < kv_len ? fmt::format("{} on ", qo_len) : "", kv_len);
    return shape;
  }
  static void say(Shape& shape, const std::string& what) { shape.name += " " + what; }

  void decode() {
    constexpr std::pair<std::int32_t, std::int32_t> kHeads[] = {{32, 8}, {64, 8}, {8, 1}, {28, 4}, {32, 32}};
    for (const auto& [qo, kv] : kHeads) {
      for (const auto& [batch, kv_len] : {std::pair(1, 4096), {1, 32768}, {8, 4096}, {64, 4096}, {256, 512}}) {
        add(Call::kDecode, "decode", qo, kv, batch, 1, kv_len);
      }
      // Lengths spread over two orders of magnitude, as in a trace of conversations.
      Shape& mixed = add(Call::kDecode, "decode", qo, kv, 64, 1, 0);
      for (std::size_t r = 0; r < mixed.kv_lens.size(); ++r) {
        mixed.kv_lens[r] = static_cast<std::int32_t>(100 * std::exp2(static_cast<double>(r) / 9));
      }
      mixed.name = fmt::format("decode {}/{} b64 mixed", qo, kv);
    }
    for (const auto& [batch, kv_len] : {std::pair(1, 512),
                                        {1, 8192},
                                        {1, 16384},
                                        {1, 131072},
                                        {8, 512},
                                        {8, 1024},
                                        {8, 32768},
                                        {64, 64},
                                        {64, 256}}) {
      add(Call::kDecode, "decode", 32, 8, batch, 1, kv_len);
    }
    for (const std::int32_t page_size : {1, 64}) {
      Shape& shape = add(Call::kDecode, "decode", 32, 8, 64, 1, 4096);
      shape.page_size = page_size;
      say(shape, fmt::format("page {}", page_size));
    }
    for (const auto& [qo, kv] : {std::pair(32, 8), {8, 1}, {32, 32}}) {
      Shape& shape = add(Call::kDecode, "decode", qo, kv, 64, 1, 4096);
      shape.kv_dtype = DType::kFloat8E4M3;
      say(shape, "fp8");
    }
    for (const std::int32_t head_dim : {64, 256}) {
      for (const std::int32_t kv : {8, 32}) {
        Shape& shape = add(Call::kDecode, "decode", 32, kv, 64, 1, 4096);
        shape.head_dim = head_dim;
        say(shape, fmt::format("dim {}", head_dim));
      }
    }
  }

  void verify() {
    for (const auto& [qo, kv] : {std::pair(32, 8), {64, 8}}) {
      for (const std::int32_t batch : {8, 64}) {
        for (const std::int32_t window : {2, 4, 8}) {
          add(Call::kVerify, fmt::format("verify {}", window), qo, kv, batch, window, 4096);
        }
      }
    }
  }

  void prefill() {
    struct Size {
      std::int32_t batch, qo_len, kv_len;
    };
    for (const Size& s :
         {Size{1, 512, 512}, Size{1, 2048, 2048}, Size{1, 8192, 8192}, Size{1, 32768, 32768}, Size{4, 2048, 2048},
          Size{16, 512, 512}, Size{16, 128, 128}, Size{1, 128, 8192}, Size{1, 256, 32768}, Size{1, 512, 32768},
          Size{1, 512, 131072}, Size{1, 2048, 32768}, Size{8, 192, 8192}, Size{8, 256, 16384}, Size{8, 64, 8192}}) {
      add(Call::kPrefill, "prefill", 32, 8, s.batch, s.qo_len, s.kv_len);
    }
    for (const auto& [qo, kv] : {std::pair(8, 1), {28, 4}, {32, 32}}) {
      for (const Size& s : {Size{1, 2048, 2048}, Size{1, 8192, 8192}, Size{1, 512, 32768}, Size{1, 1024, 32768},
                            Size{1, 2048, 34304}}) {
        add(Call::kPrefill, "prefill", qo, kv, s.batch, s.qo_len, s.kv_len);
      }
    }
    for (const std::int32_t page_size : {1, 64}) {
      Shape& shape = add(Call::kPrefill, "prefill", 32, 8, 1, 8192, 8192);
      shape.page_size = page_size;
      say(shape, fmt::format("page {}", page_size));
    }
    for (const std::int32_t head_dim : {64, 256}) {
      Shape& shape = add(Call::kPrefill, "prefill", 32, 8, 1, 8192, 8192);
      shape.head_dim = head_dim;
      say(shape, fmt::format("dim {}", head_dim));
    }
    Shape& fp8 = add(Call::kPrefill, "prefill", 32, 8, 1, 8192, 8192);
    fp8.kv_dtype = DType::kFloat8E4M3;
    say(fp8, "fp8");
    for (const Size& s : {Size{1, 16384, 16384}, Size{1, 1024, 65536}}) {
      Shape& window = add(Call::kPrefill, "prefill", 32, 8, s.batch, s.qo_len, s.kv_len);
      window.window_left = 4095;
      say(window, "window 4096");
      Shape& cap = add(Call::kPrefill, "prefill", 32, 16, s.batch, s.qo_len, s.kv_len);
      cap.soft_cap = 50;
      say(cap, "cap 50");
    }
    for (const std::int32_t tokens : {2048, 8192}) add(Call::kRagged, "ragged", 32, 8, 1, tokens, tokens);
  }

  std::vector<Shape> list_;
};

struct Result {
  std::optional<double> milliseconds[kNumRoutes];
  std::optional<double> reading;  ///< milliseconds of reading K and V alone
  std::size_t chosen = 0;
  double worst_difference = 0;  ///< between the outputs of two routes

  double best() const {
    double best = std::numeric_limits<double>::infinity();
    for (const auto& time : milliseconds) best = std::min(best, time.value_or(best));
    return best;
  }
  double ratio() const { return milliseconds[chosen].value() / best(); }
};

class Bench {
 public:
  Bench(const std::vector<const Shape*>& shapes, int samples)
      : samples_(samples),
        k_(most(shapes, &Bench::cache_pool)),
        v_(most(shapes, &Bench::cache_pool)),
        q_(most(shapes, &Bench::row_pool)),
        out_(most(shapes, &Bench::row_pool)) {
    fill(q_.data(), most(shapes, &Bench::row_pool), DType::kBFloat16, 1);
    cache_bytes_ = most(shapes, &Bench::cache_pool);
    for (const Route& route : kRoutes) {
      setenv("FIW_CUDA_ROUTE", route.name, 1);
      workspaces_.push_back(FlashInferWorkspace::create(kDevice));
      if (workspaces_.back() == nullptr) throw std::runtime_error("this build has no CUDA backend");
    }
  }

  /// Bytes a second that a device copy reads and writes.
  double copy_bandwidth() {
    constexpr std::size_t kMost = std::size_t{1} << 30;
    const std::size_t bytes = std::min(kMost, cache_bytes_);
    std::vector<double> times;
    for (int i = 0; i < samples_; ++i) {
      times.push_back(clock_.time(stream_.get(), [&] {
        check(cudaMemcpyAsync(v_.data(), k_.data(), bytes, cudaMemcpyDeviceToDevice, stream_.get()), "cudaMemcpyAsync");
      }));
    }
    filled_.reset();
    return 2.0 * static_cast<double>(bytes) / median(times) * 1e3;
  }

  Result run(const Shape& shape) {
    if (filled_ != shape.kv_dtype) {
      fill(k_.data(), cache_bytes_, shape.kv_dtype, 2);
      fill(v_.data(), cache_bytes_, shape.kv_dtype, 3);
      filled_ = shape.kv_dtype;
    }
    prepare(shape);
    Result result;
    const KernelFamily chosen = family(shape, CudaRoute::kTable);
    std::vector<float> first;
    std::vector<double> times[kNumRoutes];
    int calls[kNumRoutes] = {};
    for (std::size_t i = 0; i < kNumRoutes; ++i) {
      if (kRoutes[i].family == chosen) result.chosen = i;
      if (family(shape, kRoutes[i].choice) != kRoutes[i].family) continue;
      check(cudaMemsetAsync(out_.data(), 0xFF, shape.rows() * shape.row_bytes(), stream_.get()), "cudaMemsetAsync");
      call(shape, *workspaces_[i], 0);
      const std::vector<float> rows = sampled_rows(shape);
      if (first.empty()) first = rows;
      result.worst_difference = std::max(result.worst_difference, difference(first, rows));
      // Enough calls for half a millisecond, so that the gap before the first one does not show.
      const double once = clock_.time(stream_.get(), [&] { call(shape, *workspaces_[i], 0); });
      calls[i] = std::clamp(static_cast<int>(0.5 / once), 1, 16);
    }
    std::vector<double> readings;
    const bool reads = reads_once(shape);
    const int reading_calls = std::max(calls[result.chosen], 1);
    if (reads) read(shape, 0);
    for (int sample = 0; sample < samples_; ++sample) {
      for (std::size_t i = 0; i < kNumRoutes; ++i) {
        if (calls[i] == 0) continue;
        const double time = clock_.time(stream_.get(), [&] {
          for (int c = 0; c < calls[i]; ++c) call(shape, *workspaces_[i], next_copy_++);
        });
        times[i].push_back(time / calls[i]);
      }
      if (!reads) continue;
      const double time = clock_.time(stream_.get(), [&] {
        for (int c = 0; c < reading_calls; ++c) read(shape, next_copy_++);
      });
      readings.push_back(time / reading_calls);
    }
    if (reads) result.reading = median(readings);
    for (std::size_t i = 0; i < kNumRoutes; ++i) {
      if (calls[i] > 0) result.milliseconds[i] = median(times[i]);
    }
    return result;
  }

 private:
  /// K and V rotate over more memory than the L2 cache holds.
  static std::size_t copies(const Shape& shape) {
    constexpr std::size_t kRotated = std::size_t{96} << 20;
    return std::clamp<std::size_t>(kRotated / shape.cache_bytes() + 1, 1, 16);
  }
  static std::size_t cache_pool(const Shape& shape) { return copies(shape) * shape.cache_bytes(); }
  static std::size_t row_pool(const Shape& shape) { return shape.rows() * shape.row_bytes(); }
  static std::size_t most(const std::vector<const Shape*>& shapes, std::size_t (*bytes)(const Shape&)) {
    std::size_t most = 0;
    for (const Shape* shape : shapes) most = std::max(most, bytes(*shape));
    return most;
  }

  KernelFamily family(const Shape& shape, CudaRoute choice) const {
    return cuda::choose_family(
        {.spec = shape.spec(),
         .page_size = shape.page_size,
         .max_qo_len = *std::ranges::max_element(shape.qo_lens),
         .total_rows = shape.rows(),
         .total_kv = shape.call == Call::kPrefill || shape.call == Call::kRagged ? shape.tokens() : 0,
         .decode_pages = shape.call == Call::kDecode ? shape.pages() : 0,
         .batch = shape.batch(),
         .paged = shape.call != Call::kRagged},
        workspaces_.front()->device_props(), choice);
  }

  /// Whether the call is bound by reading, and the device has the instructions of the kernel that only reads.
  bool reads_once(const Shape& shape) const {
    return (shape.call == Call::kDecode || shape.call == Call::kVerify) && shape.window_left < 0 &&
           workspaces_.front()->device_props().compute_capability >= 90;
  }

  void read(const Shape& shape, std::size_t copy) {
    const std::size_t offset = copy % copies(shape) * shape.cache_bytes();
    check(launch_read_kernel(k_.data() + offset, v_.data() + offset, shape.cache_bytes(), stream_.get()),
          "launching the reading kernel");
  }

  void prepare(const Shape& shape) {
    qo_indptr_.assign(1, 0);
    kv_indptr_.assign(1, 0);
    for (const std::int32_t qo_len : shape.qo_lens) qo_indptr_.push_back(qo_indptr_.back() + qo_len);
    for (const std::int32_t kv_len : shape.kv_lens) kv_indptr_.push_back(kv_indptr_.back() + kv_len);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.pages()));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(4));
    std::vector<std::vector<std::int32_t>> lists;
    auto next = ids.begin();
    for (const std::int32_t kv_len : shape.kv_lens) {
      const auto end = next + (kv_len + shape.page_size - 1) / shape.page_size;
      lists.emplace_back(next, end);
      next = end;
    }
    table_ = PageTable::from_pages(shape.page_size, shape.pages(), lists, shape.kv_lens);
  }

  void call(const Shape& shape, FlashInferWorkspace& workspace, std::size_t copy) {
    const std::size_t offset = copy % copies(shape) * shape.cache_bytes();
    const AttentionParams params = shape.spec().params;
    const ConstTensor q(q_.data(), DType::kBFloat16, shape.rows(), shape.qo_heads, shape.head_dim, kDevice);
    const Tensor out(out_.data(), DType::kBFloat16, shape.rows(), shape.qo_heads, shape.head_dim, kDevice);
    if (shape.call == Call::kRagged) {
      const auto tensor = [&](const DeviceMemory& memory) {
        return ConstTensor(memory.data() + offset, shape.kv_dtype, shape.tokens(), shape.kv_heads, shape.head_dim,
                           kDevice);
      };
      workspace.ragged_prefill(q, qo_indptr_, tensor(k_), tensor(v_), kv_indptr_, params, out, nullptr, {},
                               stream_.get());
      return;
    }
    const KvCache kv = KvCache::contiguous(k_.data() + offset, v_.data() + offset, shape.kv_dtype, KvLayout::kNHD,
                                           shape.pages(), shape.page_size, shape.kv_heads, shape.head_dim, 0, kDevice);
    if (shape.call == Call::kDecode) {
      workspace.decode(q, kv, table_, params, out, nullptr, {}, stream_.get());
    } else if (shape.call == Call::kVerify) {
      workspace.verify(q, shape.qo_lens.front(), kv, table_, params, out, nullptr, {}, stream_.get());
    } else {
      workspace.prefill(q, qo_indptr_, kv, table_, params, out, nullptr, {}, stream_.get());
    }
  }

  /// Rows from the start and the end of the output.
  std::vector<float> sampled_rows(const Shape& shape) {
    constexpr std::int64_t kRows = 256;
    const auto rows = static_cast<std::size_t>(std::min(kRows, shape.rows()));
    std::vector<std::uint16_t> bits(2 * rows * shape.row_bytes() / sizeof(std::uint16_t));
    const std::size_t bytes = rows * shape.row_bytes();
    stream_.synchronize();
    check(cudaMemcpy(bits.data(), out_.data(), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(bits.data() + bits.size() / 2, out_.data() + shape.rows() * shape.row_bytes() - bytes, bytes,
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    std::vector<float> values(bits.size());
    for (std::size_t i = 0; i < bits.size(); ++i) {
      const std::uint32_t wide = std::uint32_t{bits[i]} << 16;
      std::memcpy(&values[i], &wide, sizeof(wide));
    }
    return values;
  }

  static double difference(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double apart = std::abs(double{a[i]} - double{b[i]});
      worst = std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(worst, apart);
    }
    return worst;
  }

  const int samples_;
  DeviceMemory k_;
  DeviceMemory v_;
  DeviceMemory q_;
  DeviceMemory out_;
  std::size_t cache_bytes_ = 0;
  std::optional<DType> filled_;
  std::vector<std::unique_ptr<FlashInferWorkspace>> workspaces_;
  OwnStream stream_;
  Clock clock_;
  PageTable table_;
  std::vector<std::int32_t> qo_indptr_;
  std::vector<std::int32_t> kv_indptr_;
  std::size_t next_copy_ = 0;
};

struct Options {
  std::string filter;
  std::string json;
  int samples = 9;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (value != nullptr && flag == "--filter") {
      options.filter = value;
    } else if (value != nullptr && flag == "--json") {
      options.json = value;
    } else if (value != nullptr && flag == "--samples" && std::atoi(value) > 0) {
      options.samples = std::atoi(value);
    } else {
      throw std::runtime_error("usage: cuda_routes [--filter PART_OF_A_NAME] [--samples COUNT] [--json FILE]");
    }
  }
  return options;
}

int run(const Options& options) {
  // bf16 sums of values up to 1, taken in another order.
  constexpr double kTolerance = 0.03;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print("skipped: no CUDA device\n");
    return 0;
  }
  const Shapes all;
  std::vector<const Shape*> shapes;
  for (const Shape& shape : all.list()) {
    if (shape.name.find(options.filter) != std::string::npos) shapes.push_back(&shape);
  }
  if (shapes.empty()) throw std::runtime_error(fmt::format("--filter '{}' matches no shape", options.filter));

  Bench bench(shapes, options.samples);
  const double copy = bench.copy_bandwidth();
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, kDevice), "cudaGetDeviceProperties");
  fmt::print("{}, a copy reads and writes {:.2f} TB/s; milliseconds, medians of {} samples\n\n{:<36}", device.name,
             copy * 1e-12, options.samples, "shape");
  for (const Route& route : kRoutes) fmt::print("{:>13}", route.name);
  fmt::print("{:>14}{:>8}{:>7}{:>9}{:>10}\n", "chosen", "/ best", "TB/s", "TFLOP/s", "reading");

  std::string records;
  int behind = 0;
  int wrong = 0;
  for (const Shape* shape : shapes) {
    const Result result = bench.run(*shape);
    fmt::print("{:<36}", shape->name);
    std::string times;
    for (std::size_t i = 0; i < kNumRoutes; ++i) {
      if (!result.milliseconds[i]) {
        fmt::print("{:>13}", "-");
        continue;
      }
      fmt::print("{:>13.4f}", *result.milliseconds[i]);
      times += fmt::format("{}\"{}\": {:.6f}", times.empty() ? "" : ", ", kRoutes[i].name, *result.milliseconds[i]);
    }
    const double time = result.milliseconds[result.chosen].value();
    fmt::print(
        "{:>14}{:>8.3f}{:>7.2f}{:>9.1f}{:>10}{}{}\n", kRoutes[result.chosen].name, result.ratio(),
        2e-9 * static_cast<double>(shape->cache_bytes()) / time, 1e-9 * shape->operations() / time,
        result.reading ? fmt::format("{:.4f}", *result.reading) : "-", result.ratio() > kGoal ? "  behind" : "",
        result.worst_difference > kTolerance ? fmt::format("  outputs differ by {:.3g}", result.worst_difference) : "");
    std::fflush(stdout);
    behind += result.ratio() > kGoal ? 1 : 0;
    wrong += result.worst_difference > kTolerance ? 1 : 0;
    records += fmt::format(
        "{}\n    {{\"name\": \"{}\", \"chosen\": \"{}\", \"ratio\": {:.4f}, \"milliseconds\": {{{}}}, "
        "\"reading_milliseconds\": {}, \"kv_bytes\": {}, \"operations\": {:.0f}}}",
        records.empty() ? "" : ",", shape->name, kRoutes[result.chosen].name, result.ratio(), times,
        result.reading ? fmt::format("{:.6f}", *result.reading) : "null", 2 * shape->cache_bytes(),
        shape->operations());
  }
  fmt::print("\n{} shapes: the chosen route is more than {:.0f} % behind the best on {}; outputs differ on {}\n",
             shapes.size(), 100 * (kGoal - 1), behind, wrong);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << fmt::format("{{\n  \"device\": \"{}\",\n  \"copy_bytes_per_second\": {:.0f},\n  \"shapes\": [{}\n  ]\n}}\n",
                        device.name, copy, records);
    file.close();
    if (!file) throw std::runtime_error(fmt::format("cannot write {}", options.json));
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fiw::bench

int main(int argc, char** argv) {
  try {
    return fiw::bench::run(fiw::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "cuda_routes: {}\n", error.what());
    return 2;
  }
}
