// See graph_trace.h. A token's K and V are rows of a fixed vocabulary, so that the reference finds a request's keys by
// the tokens alone: a wrong page, length, plan or append shows.
#include "graph_trace.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "cuda_bench.h"
#include "graph_shape.h"

namespace fiw::bench {
namespace {

constexpr std::int32_t kLayers = 2;
constexpr std::int32_t kWords = 4093;
constexpr std::int64_t kCheckEvery = 100;
constexpr int kCheckedRows = 4;

using Rows = std::vector<std::uint16_t>;

/// Word w has a key, a value and a query that leans towards both, so that losing the page of its token changes the
/// result by far more than rounding does. A request's tokens are words in a row: a prompt's keys need no copying. Words
/// start again after the last, up to `longest` of them.
class Vocabulary {
 public:
  explicit Vocabulary(std::int32_t longest)
      : rows_(kWords + longest), k_(elements(kKvRow)), v_(elements(kKvRow)), device_k_(bytes()), device_v_(bytes()) {
    std::mt19937 engine(11);
    const auto level = [&] { return 0.25F * static_cast<float>(static_cast<std::int32_t>(engine() >> 28) - 8); };
    for (std::size_t i = 0; i < k_.size(); ++i) {
      const bool again = i >= static_cast<std::size_t>(kWords * kKvRow);
      k_[i] = again ? k_[i - kWords * kKvRow] : float_to_bf16(level());
      v_[i] = again ? v_[i - kWords * kKvRow] : float_to_bf16(level());
    }
    q_.resize(static_cast<std::size_t>(kWords * kQoRow));
    for (std::int64_t w = 0; w < kWords; ++w) {
      for (std::int64_t i = 0; i < kQoRow; ++i) {
        const std::int64_t head = i / kHeadDim / (kQoHeads / kKvHeads);
        const std::int64_t of_key = w * kKvRow + head * kHeadDim + i % kHeadDim;
        const float leaning =
            load_float(k_.data(), DType::kBFloat16, of_key) + load_float(v_.data(), DType::kBFloat16, of_key);
        q_[static_cast<std::size_t>(w * kQoRow + i)] = float_to_bf16(0.5F * (level() + leaning));
      }
    }
    check(cudaMemcpy(device_k_.data(), k_.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemcpy(device_v_.data(), v_.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  const std::uint16_t* q(std::int64_t word) const { return q_.data() + word * kQoRow; }
  const std::uint16_t* k(std::int64_t word) const { return k_.data() + word * kKvRow; }
  const std::uint16_t* v(std::int64_t word) const { return v_.data() + word * kKvRow; }
  /// Keys and values of `count` words in a row, on the device.
  ConstTensor device_k(std::int64_t word, std::int64_t count) const { return tensor(device_k_, word, count); }
  ConstTensor device_v(std::int64_t word, std::int64_t count) const { return tensor(device_v_, word, count); }

 private:
  std::size_t elements(std::int64_t row) const { return static_cast<std::size_t>(rows_ * row); }
  std::size_t bytes() const { return elements(kKvRow) * kElement; }
  static ConstTensor tensor(const DeviceMemory& memory, std::int64_t word, std::int64_t count) {
    return {memory.data() + static_cast<std::size_t>(word * kKvRow) * kElement,
            DType::kBFloat16,
            count,
            kKvHeads,
            kHeadDim,
            kDevice};
  }

  std::int64_t rows_;
  Rows k_;
  Rows v_;
  Rows q_;
  DeviceMemory device_k_;
  DeviceMemory device_v_;
};

struct Request {
  std::int64_t first_word = 0;
  std::int32_t left = 0;      ///< tokens still to generate
  std::int32_t len = 0;       ///< tokens that stay
  std::int32_t accepted = 0;  ///< draft tokens of the step at hand that will stay
  std::vector<std::int32_t> pages{};

  /// The word at a position. Drafts that will be rolled back are others than what takes their place.
  std::int64_t word(std::int32_t position) const {
    const std::int64_t other = position > len + accepted ? kWords / 2 : 0;
    return (first_word + position + other) % kWords;
  }
};

std::int32_t pages_of(std::int32_t tokens) { return (tokens + kPageSize - 1) / kPageSize; }

std::int32_t longest_of(const cli::Trace& trace, std::int32_t window) {
  std::int32_t longest = 0;
  for (const cli::TraceRequest& request : trace.requests) {
    longest = std::max(longest, request.prompt_tokens + request.output_tokens + window);
  }
  return longest;
}

class Replay {
 public:
  Replay(const cli::Trace& trace, std::int32_t window, bool live)
      : trace_(trace),
        window_(window),
        live_(live),
        num_pages_(kBatch * pages_of(longest_of(trace, window))),
        vocabulary_(longest_of(trace, window)),
        arrays_(num_pages_),
        caches_(static_cast<std::size_t>(2 * kLayers) * cache_bytes()),
        staged_(step_bytes()),
        inputs_(step_bytes()),
        outs_(kLayers * q_bytes()),
        workspace_(FlashInferWorkspace::create(kDevice)),
        session_(make_session()),
        free_pages_(static_cast<std::size_t>(num_pages_)) {
    check(cudaMemset(caches_.data(), 0xFF, static_cast<std::size_t>(2 * kLayers) * cache_bytes()), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the vocabulary too is there
    std::iota(free_pages_.begin(), free_pages_.end(), 0);
    std::shuffle(free_pages_.begin(), free_pages_.end(), engine_);
    session_.capture(
        [this](std::int32_t) {
          for (std::int32_t layer = 0; layer < kLayers; ++layer) {
            const auto [k, v] = swapped(layer, ConstTensor(input_k()), ConstTensor(input_v()));
            session_.append_kv(k, v, cache(layer));
            session_.run(input_q(), cache(layer), out(layer));
          }
        },
        stream_.get());
  }

  TraceReplay run(std::int64_t steps) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t step = 1; step <= steps; ++step) run_step(step % kCheckEvery == 0);
    session_.check(stream_.get());
    result_.name = fmt::format("{}, {}", window_ == 1 ? "decode" : fmt::format("verify {}", window_),
                               live_ ? "table in device memory" : "host tables");
    result_.steps = steps;
    result_.stats = session_.stats();
    result_.recaptures = static_cast<std::int64_t>(result_.stats.captures) - std::ssize(session_.buckets());
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result_;
  }

 private:
  std::size_t cache_bytes() const { return static_cast<std::size_t>(num_pages_ * kPageSize * kKvRow) * kElement; }
  std::size_t q_bytes() const { return static_cast<std::size_t>(kBatch * window_ * kQoRow) * kElement; }
  std::size_t kv_bytes() const { return static_cast<std::size_t>(kBatch * window_ * kKvRow) * kElement; }
  /// Queries, keys and values of a step, one after the other.
  std::size_t step_bytes() const { return q_bytes() + 2 * kv_bytes(); }

  Tensor rows(std::byte* data, std::int32_t heads) const {
    return {data, DType::kBFloat16, std::int64_t{kBatch} * window_, heads, kHeadDim, kDevice};
  }
  Tensor input_q() const { return rows(inputs_.data(), kQoHeads); }
  Tensor input_k() const { return rows(inputs_.data() + q_bytes(), kKvHeads); }
  Tensor input_v() const { return rows(inputs_.data() + q_bytes() + kv_bytes(), kKvHeads); }
  Tensor out(std::int32_t layer) const {
    return rows(outs_.data() + static_cast<std::size_t>(layer) * q_bytes(), kQoHeads);
  }
  KvCache cache(std::int32_t layer) const {
    std::byte* const k = caches_.data() + static_cast<std::size_t>(2 * layer) * cache_bytes();
    return KvCache::contiguous(k, k + cache_bytes(), DType::kBFloat16, KvLayout::kNHD, num_pages_, kPageSize, kKvHeads,
                               kHeadDim, 0, kDevice);
  }
  /// The second layer's keys are the first one's values and the other way round: two layers from one vocabulary.
  template <class T>
  static std::pair<T, T> swapped(std::int32_t layer, T k, T v) {
    return layer % 2 == 0 ? std::pair(k, v) : std::pair(v, k);
  }

  GraphSession make_session() const {
    const StepSpec spec = layer_spec();
    GraphOptions options{.max_batch = kBatch, .max_pages = num_pages_, .page_size = kPageSize, .num_pages = num_pages_};
    if (live_) options.live_table = arrays_.view(num_pages_);
    return window_ == 1 ? GraphSession::decode(*workspace_, {&spec, 1}, options)
                        : GraphSession::verify(*workspace_, window_, {&spec, 1}, options);
  }

  void grow(Request& request, std::int32_t tokens) {
    while (std::ssize(request.pages) < pages_of(tokens)) {
      request.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
  }

  /// Computes the prompt of the trace's next request, outside the graphs.
  void admit() {
    const cli::TraceRequest& next = trace_.requests[static_cast<std::size_t>(admitted_++) % trace_.requests.size()];
    Request& request = requests_.emplace_back();
    request.first_word = static_cast<std::int64_t>(engine_() % kWords);
    request.left = next.output_tokens;
    request.len = next.prompt_tokens;
    grow(request, request.len);
    const PageTable table = PageTable::from_pages(kPageSize, num_pages_, {&request.pages, 1}, {&request.len, 1});
    const std::array<std::int32_t, 2> indptr{0, request.len};
    const ConstTensor k = vocabulary_.device_k(request.first_word, request.len);
    const ConstTensor v = vocabulary_.device_v(request.first_word, request.len);
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      const auto [layer_k, layer_v] = swapped(layer, k, v);
      workspace_->append_kv(layer_k, layer_v, indptr, cache(layer), table, stream_.get());
    }
  }

  void run_step(bool checked) {
    if (std::ssize(requests_) < kBatch) admit();
    for (Request& request : requests_) {
      request.accepted = static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(window_));
      grow(request, request.len + window_);
    }
    lay_out();
    const PageTable table = PageTable::from_pages(kPageSize, num_pages_, lists_, lens_);
    if (checked) check(cudaMemsetAsync(outs_.data(), 0xFF, kLayers * q_bytes(), stream_.get()), "cudaMemsetAsync");
    if (live_) {
      arrays_.put(table, stream_.get());
      session_.replay(table.batch(), stream_.get());
    } else {
      session_.step(table, stream_.get());
    }
    if (checked) {
      session_.check(stream_.get());
      for (int i = 0; i < kCheckedRows; ++i) check_row();
      check_empty_rows();
    }
    for (Request& request : requests_) {
      request.len += request.accepted + 1;
      request.left -= request.accepted + 1;
      if (request.left > 0) continue;
      free_pages_.insert(free_pages_.end(), request.pages.begin(), request.pages.end());
      ++result_.requests;
    }
    std::erase_if(requests_, [](const Request& request) { return request.left <= 0; });
  }

  /// The step's inputs and its page lists.
  void lay_out() {
    stream_.synchronize();  // the last step's inputs have been copied
    auto* q = reinterpret_cast<std::uint16_t*>(staged_.data());
    auto* k = reinterpret_cast<std::uint16_t*>(staged_.data() + q_bytes());
    auto* v = reinterpret_cast<std::uint16_t*>(staged_.data() + q_bytes() + kv_bytes());
    lists_.clear();
    lens_.clear();
    for (const Request& request : requests_) {
      for (std::int32_t position = request.len; position < request.len + window_; ++position) {
        const auto target = static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(position + 1));
        q = std::copy_n(vocabulary_.q(request.word(target)), kQoRow, q);
        k = std::copy_n(vocabulary_.k(request.word(position)), kKvRow, k);
        v = std::copy_n(vocabulary_.v(request.word(position)), kKvRow, v);
      }
      lists_.push_back(request.pages);
      lens_.push_back(request.len + window_);
    }
    check(cudaMemcpyAsync(inputs_.data(), staged_.data(), step_bytes(), cudaMemcpyHostToDevice, stream_.get()),
          "cudaMemcpyAsync");
  }

  Rows fetch(std::int32_t layer, std::int64_t first, std::int64_t count) const {
    Rows values(static_cast<std::size_t>(count * kQoRow));
    check(cudaMemcpy(values.data(), static_cast<const std::byte*>(out(layer).data) + first * kQoRow * kElement,
                     values.size() * kElement, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return values;
  }

  /// Recomputes a random row of the step.
  void check_row() {
    const auto r = static_cast<std::size_t>(engine_() % requests_.size());
    const auto at = static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(window_));
    const auto layer = static_cast<std::int32_t>(engine_() % kLayers);
    const Request& request = requests_[r];
    const std::int64_t row = static_cast<std::int64_t>(r) * window_ + at;
    const std::int32_t kv_len = request.len + at + 1;
    Rows k;
    Rows v;
    for (std::int32_t position = 0; position < kv_len; ++position) {
      const std::int64_t word = request.word(position);
      k.insert(k.end(), vocabulary_.k(word), vocabulary_.k(word) + kKvRow);
      v.insert(v.end(), vocabulary_.v(word), vocabulary_.v(word) + kKvRow);
    }
    const auto tensor = [](const void* data, std::int64_t count, std::int32_t heads) {
      return ConstTensor(data, DType::kBFloat16, count, heads, kHeadDim);
    };
    const auto [layer_k, layer_v] =
        swapped(layer, tensor(k.data(), kv_len, kKvHeads), tensor(v.data(), kv_len, kKvHeads));
    const std::array<std::int32_t, 2> qo_indptr{0, 1};
    const std::array<std::int32_t, 2> kv_indptr{0, kv_len};
    const RaggedKv ragged{layer_k, layer_v, kv_indptr};
    ReferenceCall call;
    call.q = tensor(staged_.data() + row * kQoRow * kElement, 1, kQoHeads);
    call.qo_indptr = qo_indptr;
    call.ragged = &ragged;
    call.params = layer_spec().params;
    std::vector<double> expected(static_cast<std::size_t>(kQoRow));
#pragma omp parallel for
    for (std::int32_t head = 0; head < kQoHeads; ++head) {
      reference_row(call, 0, head, std::span(expected).subspan(static_cast<std::size_t>(head * kHeadDim), kHeadDim));
    }
    compare(fetch(layer, row, 1), expected);
    ++result_.rows;
  }

  /// Rows of the bucket for requests that are not there hold zeros.
  void check_empty_rows() {
    const std::int64_t used = std::ssize(requests_) * window_;
    const std::int64_t bucket = *std::ranges::lower_bound(session_.buckets(), std::ssize(requests_));
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      const Rows values = fetch(layer, used, bucket * window_ - used);
      compare(values, std::vector<double>(values.size()));
    }
  }

  void compare(const Rows& values, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      result_.errors.add(load_float(values.data(), DType::kBFloat16, static_cast<std::int64_t>(i)), expected[i]);
    }
  }

  const cli::Trace& trace_;
  const std::int32_t window_;
  const bool live_;
  const std::int32_t num_pages_;
  Vocabulary vocabulary_;
  LiveArrays arrays_;
  DeviceMemory caches_;
  PinnedMemory staged_;
  DeviceMemory inputs_;
  DeviceMemory outs_;
  OwnStream stream_;
  std::unique_ptr<FlashInferWorkspace> workspace_;
  GraphSession session_;
  std::mt19937 engine_{7};
  std::vector<std::int32_t> free_pages_;
  std::int64_t admitted_ = 0;
  std::vector<Request> requests_;
  std::vector<std::vector<std::int32_t>> lists_;
  std::vector<std::int32_t> lens_;
  TraceReplay result_;
};

}  // namespace

TraceReplay replay_trace(const cli::Trace& trace, std::int64_t steps, std::int32_t window, bool live) {
  return Replay(trace, window, live).run(steps);
}

}  // namespace fiw::bench
