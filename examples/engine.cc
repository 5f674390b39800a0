// A serving engine in one file: continuous batching of a tiny transformer over a paged KV cache.
//
// Requests arrive over time, share pages of equal prompts, are computed in chunks beside those that already generate,
// and free their pages when they finish; drafts are verified many tokens at once. At the end, every request's tokens
// must equal those of the same model run for that request alone, in double precision, without any of that.
// docs/writing-an-engine.md walks through it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiw/workspace.h"

namespace {

// ---- The model: plain loops, and nothing of attention ---------------------------------------------------------------

constexpr int kVocabulary = 96;
constexpr int kLayers = 3;
constexpr int kHidden = 64;
constexpr int kMlp = 128;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kDim = 16;
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kDim;  // a fused projection: a row holds q, then k, then v
constexpr int kKOffset = kHeads * kDim;
constexpr int kVOffset = kKOffset + kKvHeads * kDim;

/// A matrix [outputs, inputs] of random weights.
struct Matrix {
  Matrix(int outputs_, int inputs_, double scale, std::mt19937_64& random) : outputs(outputs_), inputs(inputs_) {
    std::normal_distribution<double> normal(0.0, scale / std::sqrt(inputs_));
    weights.resize(static_cast<std::size_t>(outputs) * inputs);
    for (float& weight : weights) weight = static_cast<float>(normal(random));
  }
  const float* row(int i) const { return &weights[static_cast<std::size_t>(i) * inputs]; }

  int outputs;
  int inputs;
  std::vector<float> weights;
};

/// y = matrix * x. Like all of the model, in float for the engine and in double for the check.
template <class Real>
std::vector<Real> product(const Matrix& matrix, const Real* x) {
  std::vector<Real> y(matrix.outputs);
  for (int i = 0; i < matrix.outputs; ++i) {
    const float* weights = matrix.row(i);
    for (int j = 0; j < matrix.inputs; ++j) y[i] += static_cast<Real>(weights[j]) * x[j];
  }
  return y;
}

template <class Real>
std::vector<Real> rms_norm(const Real* x) {
  Real squares = 0;
  for (int i = 0; i < kHidden; ++i) squares += x[i] * x[i];
  std::vector<Real> y(x, x + kHidden);
  for (Real& value : y) value /= std::sqrt(squares / kHidden + static_cast<Real>(1e-6));
  return y;
}

/// Rotates each head of q and k by angles that grow with the token's position (RoPE).
template <class Real>
void rotate(Real* qkv, int position) {
  for (int head = 0; head < kHeads + kKvHeads; ++head) {
    for (int i = 0; i < kDim / 2; ++i) {
      const auto angle = static_cast<Real>(position * std::pow(10000.0, -2.0 * i / kDim));
      Real& a = qkv[head * kDim + i];
      Real& b = qkv[head * kDim + i + kDim / 2];
      const Real turned = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = turned;
    }
  }
}

struct Layer {
  explicit Layer(std::mt19937_64& random)
      : qkv(kQkv, kHidden, 1.5, random),
        output(kHidden, kHeads * kDim, 1.5, random),
        gate(kMlp, kHidden, 1.0, random),
        up(kMlp, kHidden, 1.0, random),
        down(kHidden, kMlp, 1.0, random) {}

  Matrix qkv, output, gate, up, down;
};

struct Model {
  explicit Model(std::mt19937_64& random) : embedding(kVocabulary, kHidden, 1.0, random) {
    for (int i = 0; i < kLayers; ++i) layers.emplace_back(random);
  }

  Matrix embedding;  // the output head as well
  std::vector<Layer> layers;
};

/// One token's row up to attention: its q, k and v.
template <class Real>
void before_attention(const Layer& layer, int position, const Real* hidden, Real* qkv) {
  const std::vector<Real> projected = product(layer.qkv, rms_norm(hidden).data());
  std::copy(projected.begin(), projected.end(), qkv);
  rotate(qkv, position);
}

/// The rest of the layer: the output projection and the gated MLP, each added to the row.
template <class Real>
void after_attention(const Layer& layer, const Real* attended, Real* hidden) {
  const std::vector<Real> output = product(layer.output, attended);
  for (int i = 0; i < kHidden; ++i) hidden[i] += output[i];
  const std::vector<Real> normed = rms_norm(hidden);
  std::vector<Real> gate = product(layer.gate, normed.data());
  const std::vector<Real> up = product(layer.up, normed.data());
  for (int i = 0; i < kMlp; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  const std::vector<Real> down = product(layer.down, gate.data());
  for (int i = 0; i < kHidden; ++i) hidden[i] += down[i];
}

struct Choice {
  int token = 0;
  double lead = 0.0;  // of its logit over the next best
};

/// Greedy sampling from a row of the last layer.
template <class Real>
Choice choose(const Model& model, const Real* hidden) {
  const std::vector<Real> logits = product(model.embedding, rms_norm(hidden).data());
  const auto best = std::max_element(logits.begin(), logits.end());
  if (std::isnan(*best)) throw std::runtime_error("the model computed NaN");
  double lead = std::numeric_limits<double>::infinity();
  for (auto it = logits.begin(); it != logits.end(); ++it) {
    if (it != best) lead = std::min(lead, static_cast<double>(*best - *it));
  }
  return {static_cast<int>(best - logits.begin()), lead};
}

// ---- The engine -----------------------------------------------------------------------------------------------------

constexpr int kPageSize = 8;      // tokens
constexpr int kPages = 40;        // in the pool that all requests share
constexpr int kMaxBatch = 6;      // requests in flight
constexpr int kTokenBudget = 24;  // query rows a step
constexpr int kMaxTokens = 120;   // of one request: its prompt and its answer
constexpr int kMaxDrafts = 3;     // tokens guessed ahead of a verify call
constexpr int kWindow = 1 + kMaxDrafts;
static_assert(kMaxBatch * kWindow <= kTokenBudget, "every generating request computes something in every step");

constexpr int pages_of(int tokens) { return (tokens + kPageSize - 1) / kPageSize; }

/// Which pages are free, and which full pages of prompts may be shared. Knows nothing of what is in them.
class PagePool {
 public:
  PagePool() {
    for (int page = kPages - 1; page >= 0; --page) free_.push_back(page);
  }

  int available() const { return static_cast<int>(free_.size()); }
  int take() {
    const int page = free_.back();
    free_.pop_back();
    users_[page] = 1;
    return page;
  }
  /// The page in use whose last token ends this prefix, with one more user; or nothing.
  std::optional<int> share(std::span<const int> prefix) {
    const auto found = published_.find({prefix.begin(), prefix.end()});
    if (found == published_.end()) return std::nullopt;
    ++users_[found->second];
    return found->second;
  }
  /// Lets others share a page that is full and computed. K and V of a token depend on all tokens before it, so the
  /// name of a page is the whole prefix up to its end. The first page of a name stays.
  void publish(std::span<const int> prefix, int page) { published_.try_emplace({prefix.begin(), prefix.end()}, page); }
  void release(int page) {
    if (--users_[page] > 0) return;
    std::erase_if(published_, [page](const auto& entry) { return entry.second == page; });
    free_.push_back(page);
  }

 private:
  std::vector<int> free_;
  std::array<int, kPages> users_{};
  std::map<std::vector<int>, int> published_;
};

struct Request {
  int id = 0;
  int arrival = 0;            // step
  int prompt = 0;             // tokens of the prompt
  int answer = 0;             // tokens to generate
  std::vector<int> tokens{};  // the prompt, then what was generated, then `drafts` guesses

  int drafts = 0;
  int cached = 0;            // tokens whose K and V are in the cache, or will be after the step at hand
  std::vector<int> pages{};  // in the order of tokens

  bool generating() const { return cached >= prompt; }
  int wanted() const { return prompt + answer - static_cast<int>(tokens.size()); }
  std::span<const int> prefix(int count) const { return {tokens.data(), static_cast<std::size_t>(count)}; }
};

/// Guesses that the text goes on as it did after the last token's latest occurrence. Any guess is legal: a wrong one
/// costs time, never a token.
std::vector<int> guess(const Request& request) {
  const std::vector<int>& tokens = request.tokens;
  const int last = static_cast<int>(tokens.size()) - 1;
  for (int i = last - kMaxDrafts; i >= 0; --i) {
    if (tokens[i] == tokens[last]) return {&tokens[i + 1], &tokens[i + 1] + kMaxDrafts};
  }
  return {};
}

struct EngineCounts {
  int steps = 0;
  int pages_taken = 0;
  int pages_shared = 0;
  int tables_built = 0;
  int tables_advanced = 0;
  int drafts = 0;
  int drafts_accepted = 0;
};

/// Everything of one device: the weights it was given, the KV cache, the workspace. One thread drives it.
class Engine {
 public:
  Engine(const Model& model, bool speculate) : model_(model), speculate_(speculate) {
    params_.num_qo_heads = kHeads;
    params_.num_kv_heads = kKvHeads;
    params_.head_dim_qk = kDim;

    // The largest step that the constants above allow. Scratch is sized for it once, and never grows.
    fiw::WorkspaceOptions options;
    options.limits = fiw::WorkspaceLimits{.params = params_,
                                          .max_batch = kMaxBatch,
                                          .max_total_qo = kTokenBudget,
                                          .max_verify_window = kWindow,
                                          .max_kv_len = kMaxTokens,
                                          .page_size = kPageSize,
                                          .kv_dtype = fiw::DType::kFloat32};
    options.fixed_size = true;
    options.num_threads = 1;  // calls as small as these are over before a second thread is there
    workspace_ = fiw::FlashInferWorkspace::create(fiw::kCpuDevice, options);
    if (!workspace_) throw std::runtime_error("this build of fiw has no backend for the device");
    required_bytes_ = fiw::FlashInferWorkspace::required_workspace(workspace_->device_props(), *options.limits);

    // The KV cache is the engine's own memory: K and V of every layer, in pages that all layers number alike. Slots
    // start as NaN, so that reading one that was never written could not pass unseen.
    constexpr std::size_t kElements = std::size_t{kPages} * kPageSize * kKvHeads * kDim;
    kv_memory_.assign(2 * kLayers * kElements, std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < kLayers; ++layer) {
      float* k = &kv_memory_[2 * layer * kElements];
      caches_.push_back(fiw::KvCache::contiguous(k, k + kElements, fiw::DType::kFloat32, fiw::KvLayout::kNHD, kPages,
                                                 kPageSize, kKvHeads, kDim));
    }
  }

  /// Queues a request. One that could never fit is refused here, not when it would block all others.
  void submit(Request request) {
    const int total = request.prompt + request.answer;
    if (request.prompt < 1 || request.answer < 1 || total > kMaxTokens || pages_of(total) > kPages) {
      throw std::invalid_argument("request " + std::to_string(request.id) + " has a prompt of " +
                                  std::to_string(request.prompt) + " tokens and wants " +
                                  std::to_string(request.answer) + ", expected at least 1 of each and at most " +
                                  std::to_string(std::min(kMaxTokens, kPages * kPageSize)) + " together");
    }
    waiting_.push_back(std::move(request));
  }

  bool idle() const { return waiting_.empty() && running_.empty(); }

  /// Computes one batch: at most kTokenBudget rows, of as many requests as fit.
  void step() {
    admit();
    schedule();
    if (rows_.empty()) return;
    plan();
    forward();
    commit();
    ++counts_.steps;
  }

  const std::list<Request>& finished() const { return finished_; }
  const EngineCounts& counts() const { return counts_; }
  fiw::WorkspaceStats workspace_stats() const { return workspace_->stats(); }
  std::size_t required_bytes() const { return required_bytes_; }
  int pages_available() const { return pool_.available(); }

 private:
  /// One token to compute.
  struct Row {
    int token = 0;
    int position = 0;
  };

  /// The rows of a step that go into one kind of attention call.
  struct Group {
    int first_row = 0;
    std::vector<Request*> members;
    std::vector<std::int32_t> indptr;  // member i has the rows first_row + indptr[i] .. first_row + indptr[i + 1]
    fiw::PageTable table;
    fiw::AttentionStep attention;
  };

  /// Takes waiting requests in, in order, while there is room. A request gets all the pages it can ever need, so it
  /// always finishes: there is no deadlock and no preemption.
  void admit() {
    while (!waiting_.empty() && running_.size() < kMaxBatch) {
      Request& request = waiting_.front();
      const int pages = pages_of(request.prompt + request.answer);
      if (pool_.available() < pages) return;
      // Pages of the same prefix are taken over; the prompt's last token is computed in any case, for its logits.
      for (int end = kPageSize; end < request.prompt; end += kPageSize) {
        const std::optional<int> page = pool_.share(request.prefix(end));
        if (!page) break;
        request.pages.push_back(*page);
        request.cached = end;
        ++counts_.pages_shared;
      }
      while (static_cast<int>(request.pages.size()) < pages) {
        request.pages.push_back(pool_.take());
        ++counts_.pages_taken;
      }
      running_.splice(running_.end(), waiting_, waiting_.begin());
    }
  }

  /// Lays out the step's rows: generating requests first, since someone waits for each of their tokens, then chunks of
  /// prompts, as the budget allows.
  void schedule() {
    rows_.clear();
    for (Request& request : running_) {
      // A window yields up to kWindow tokens: the request must still want that many.
      if (!speculate_ || !request.generating() || request.wanted() < kWindow) continue;
      const std::vector<int> drafts = guess(request);
      request.tokens.insert(request.tokens.end(), drafts.begin(), drafts.end());
      request.drafts = static_cast<int>(drafts.size());
    }
    begin(decode_);
    for (Request& request : running_) {
      if (request.generating() && request.drafts == 0) add(decode_, request, 1);
    }
    begin(verify_);
    for (Request& request : running_) {
      if (request.drafts > 0) add(verify_, request, kWindow);
    }
    begin(prefill_);
    for (Request& request : running_) {
      const int room = kTokenBudget - static_cast<int>(rows_.size());
      if (!request.generating() && room > 0) add(prefill_, request, std::min(request.prompt - request.cached, room));
    }
  }

  void begin(Group& group) const {
    group.first_row = static_cast<int>(rows_.size());
    group.members.clear();
    group.indptr.assign(1, 0);
  }

  void add(Group& group, Request& request, int count) {
    for (int i = request.cached; i < request.cached + count; ++i) rows_.push_back({request.tokens[i], i});
    request.cached += count;
    group.members.push_back(&request);
    group.indptr.push_back(group.indptr.back() + count);
  }

  /// Page tables and plans, once a step; every layer uses them.
  void plan() {
    const fiw::StepSpec spec{.params = params_, .q_dtype = fiw::DType::kFloat32, .kv_dtype = fiw::DType::kFloat32};
    if (!decode_.members.empty()) {
      advance_or_build(decode_);
      decode_.attention = workspace_->plan_decode(decode_.table, spec);
    }
    if (!verify_.members.empty()) {
      build_table(verify_);
      verify_.attention = workspace_->plan_verify(kWindow, verify_.table, spec);
    }
    if (!prefill_.members.empty()) {
      build_table(prefill_);
      prefill_.attention = workspace_->plan_prefill(prefill_.indptr, prefill_.table, spec);
    }
  }

  void build_table(Group& group) {
    std::vector<std::vector<int>> pages;
    std::vector<int> lengths;
    for (const Request* request : group.members) {
      pages.push_back(request->pages);
      lengths.push_back(request->cached);
    }
    group.table = fiw::PageTable::from_pages(kPageSize, kPages, pages, lengths);
    ++counts_.tables_built;
  }

  /// A decode batch mostly differs from the last one by a token a request, and its table advances. Requests are told
  /// apart by id: the address of one that has finished may serve another.
  void advance_or_build(Group& group) {
    std::vector<int> ids;
    std::vector<int> new_pages;
    bool advances = group.members.size() == decode_ids_.size();
    for (std::size_t i = 0; i < group.members.size(); ++i) {
      const Request& request = *group.members[i];
      ids.push_back(request.id);
      advances = advances && request.id == decode_ids_[i] && request.cached == group.table.kv_lens()[i] + 1;
      const int position = request.cached - 1;  // of the new token
      if (position % kPageSize == 0) new_pages.push_back(request.pages[position / kPageSize]);
    }
    decode_ids_ = ids;
    if (!advances) return build_table(group);
    group.table.advance(1, new_pages);
    ++counts_.tables_advanced;
  }

  /// All rows go through the model together; attention alone sees which request a row belongs to.
  void forward() {
    hidden_.resize(rows_.size() * kHidden);
    qkv_.resize(rows_.size() * kQkv);
    attended_.resize(rows_.size() * kHeads * kDim);
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      std::copy_n(model_.embedding.row(rows_[r].token), kHidden, &hidden_[r * kHidden]);
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        before_attention(model_.layers[layer], rows_[r].position, &hidden_[r * kHidden], &qkv_[r * kQkv]);
      }
      for (const Group* group : {&decode_, &verify_, &prefill_}) {
        if (!group->members.empty()) attend(*group, caches_[layer]);
      }
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        after_attention(model_.layers[layer], &attended_[r * kHeads * kDim], &hidden_[r * kHidden]);
      }
    }
  }

  /// One group in one layer: its new K and V go into the cache, then its queries attend to all that is there.
  void attend(const Group& group, const fiw::KvCache& cache) {
    const std::int64_t rows = group.indptr.back();
    const auto part_of_qkv = [&](int offset, int heads) {  // a strided view: nothing is copied
      return fiw::ConstTensor(&qkv_[static_cast<std::size_t>(group.first_row) * kQkv + offset], fiw::DType::kFloat32,
                              rows, heads, kDim, kQkv, kDim);
    };
    const fiw::Tensor out(&attended_[static_cast<std::size_t>(group.first_row) * kHeads * kDim], fiw::DType::kFloat32,
                          rows, kHeads, kDim);
    workspace_->append_kv(part_of_qkv(kKOffset, kKvHeads), part_of_qkv(kVOffset, kKvHeads), group.indptr, cache,
                          group.table);
    group.attention.run(part_of_qkv(0, kHeads), cache, out);
  }

  /// Takes the step's results over: new tokens, pages that others may share, requests that are done.
  void commit() {
    for (std::size_t i = 0; i < decode_.members.size(); ++i) {
      decode_.members[i]->tokens.push_back(next_token(decode_.first_row + decode_.indptr[i]));
    }
    for (std::size_t i = 0; i < verify_.members.size(); ++i) {
      accept(*verify_.members[i], verify_.first_row + verify_.indptr[i]);
    }
    for (std::size_t i = 0; i < prefill_.members.size(); ++i) {
      Request& request = *prefill_.members[i];
      for (int end = kPageSize; end <= request.cached; end += kPageSize) {
        pool_.publish(request.prefix(end), request.pages[end / kPageSize - 1]);
      }
      if (request.generating()) {  // that was the prompt's last chunk, and its last row says how to go on
        request.tokens.push_back(next_token(prefill_.first_row + prefill_.indptr[i + 1] - 1));
      }
    }
    for (auto it = running_.begin(); it != running_.end();) {
      const auto request = it++;
      if (request->wanted() > 0) continue;
      for (const int page : request->pages) pool_.release(page);
      finished_.splice(finished_.end(), running_, request);
    }
  }

  int next_token(int row) const { return choose(model_, &hidden_[static_cast<std::size_t>(row) * kHidden]).token; }

  /// Row j of a window was computed on the assumption that the drafts before it are right. The first that is not ends
  /// the window: the model's own token replaces it, and what was appended beyond it is forgotten by counting less.
  void accept(Request& request, int first_row) {
    const std::size_t known = request.tokens.size() - kMaxDrafts;
    int accepted = 0;
    int token = next_token(first_row);
    while (accepted < kMaxDrafts && token == request.tokens[known + accepted]) {
      token = next_token(first_row + ++accepted);
    }
    request.tokens.resize(known + accepted);
    request.tokens.push_back(token);
    request.cached -= kMaxDrafts - accepted;
    request.drafts = 0;
    counts_.drafts += kMaxDrafts;
    counts_.drafts_accepted += accepted;
  }

  const Model& model_;
  const bool speculate_;
  fiw::AttentionParams params_;
  std::vector<float> kv_memory_;
  std::vector<fiw::KvCache> caches_;  // a view a layer
  std::unique_ptr<fiw::FlashInferWorkspace> workspace_;
  std::size_t required_bytes_ = 0;

  PagePool pool_;
  std::list<Request> waiting_;
  std::list<Request> running_;
  std::list<Request> finished_;

  std::vector<Row> rows_;
  Group decode_;
  Group verify_;
  Group prefill_;
  std::vector<int> decode_ids_;  // the requests in decode_.table
  std::vector<float> hidden_;
  std::vector<float> qkv_;
  std::vector<float> attended_;
  EngineCounts counts_;
};

// ---- The check: one request alone -----------------------------------------------------------------------------------

struct Answer {
  std::vector<int> tokens;  // prompt and answer
  double smallest_lead = std::numeric_limits<double>::infinity();
};

/// The same model in double precision, one token after the other, with K and V in a row each.
Answer answer_alone(const Model& model, const Request& request) {
  Answer answer{.tokens = request.tokens};
  std::array<std::vector<double>, kLayers> keys;
  std::array<std::vector<double>, kLayers> values;
  for (int position = 0; static_cast<int>(answer.tokens.size()) < request.prompt + request.answer; ++position) {
    const float* embedding = model.embedding.row(answer.tokens[position]);
    std::vector<double> hidden(embedding, embedding + kHidden);
    for (int layer = 0; layer < kLayers; ++layer) {
      std::array<double, kQkv> qkv{};
      before_attention(model.layers[layer], position, hidden.data(), qkv.data());
      keys[layer].insert(keys[layer].end(), qkv.begin() + kKOffset, qkv.begin() + kVOffset);
      values[layer].insert(values[layer].end(), qkv.begin() + kVOffset, qkv.end());
      std::array<double, kHeads * kDim> attended{};
      for (int head = 0; head < kHeads; ++head) {
        const int kv_head = head / (kHeads / kKvHeads);
        double sum = 0.0;
        for (int key = 0; key <= position; ++key) {
          const int at = (key * kKvHeads + kv_head) * kDim;
          double logit = 0.0;
          for (int i = 0; i < kDim; ++i) logit += qkv[head * kDim + i] * keys[layer][at + i];
          const double weight = std::exp(logit / std::sqrt(kDim));
          sum += weight;
          for (int i = 0; i < kDim; ++i) attended[head * kDim + i] += weight * values[layer][at + i];
        }
        for (int i = 0; i < kDim; ++i) attended[head * kDim + i] /= sum;
      }
      after_attention(model.layers[layer], attended.data(), hidden.data());
    }
    if (position + 1 < request.prompt) continue;
    const Choice choice = choose(model, hidden.data());
    answer.tokens.push_back(choice.token);
    answer.smallest_lead = std::min(answer.smallest_lead, choice.lead);
  }
  return answer;
}

// ---- The program ----------------------------------------------------------------------------------------------------

/// Requests of random lengths at random times. Every second one starts with the same text, as a system prompt does.
std::vector<Request> make_requests(std::mt19937_64& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const auto append_text = [&](std::vector<int>& tokens, int count) {
    for (int i = 0; i < count; ++i) tokens.push_back(pick(0, kVocabulary - 1));
  };
  std::vector<int> system_prompt;
  append_text(system_prompt, 3 * kPageSize + 3);
  std::vector<Request> requests(16);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    request.id = static_cast<int>(i);
    request.arrival = i == 0 ? 0 : requests[i - 1].arrival + pick(0, 9);
    if (i % 2 == 1) request.tokens = system_prompt;
    append_text(request.tokens, pick(1, 40));
    request.prompt = static_cast<int>(request.tokens.size());
    request.answer = pick(5, 45);
  }
  return requests;
}

void print(const Engine& engine) {
  const EngineCounts& counts = engine.counts();
  std::printf("  %d steps; %d pages taken from a pool of %d, %d shared\n", counts.steps, counts.pages_taken, kPages,
              counts.pages_shared);
  std::printf("  page tables: %d built, %d advanced; drafts: %d, %d accepted\n", counts.tables_built,
              counts.tables_advanced, counts.drafts, counts.drafts_accepted);
  const fiw::WorkspaceStats stats = engine.workspace_stats();
  const auto print_plans = [](const char* kind, const fiw::CacheStats& cache) {
    std::printf("  %s plans: %d made, %d found, each for %d layers\n", kind, static_cast<int>(cache.misses),
                static_cast<int>(cache.hits), kLayers);
  };
  print_plans("decode", stats.decode);
  print_plans("verify", stats.verify);
  print_plans("prefill", stats.prefill);
  std::printf("  scratch: %zu bytes at the peak, %zu allowed for\n", stats.float_scratch_peak, engine.required_bytes());
}

/// A request that asks for too much is an error of the client's; the engine serves on.
bool refuses(Engine& engine, const Request& request) {
  try {
    engine.submit(request);
  } catch (const std::invalid_argument& error) {
    std::printf("  refused: %s\n", error.what());
    return true;
  }
  std::printf("  WRONG: request %d should have been refused\n", request.id);
  return false;
}

/// Serves the requests as they arrive. True when all came back with the expected tokens.
bool serve(const char* title, const Model& model, bool speculate, const std::vector<Request>& requests,
           const std::vector<Answer>& expected) {
  std::printf("%s\n", title);
  Engine engine(model, speculate);
  bool ok = refuses(engine, Request{.id = 99, .prompt = 1, .answer = kMaxTokens, .tokens = {0}});
  std::size_t arrived = 0;
  for (int now = 0; arrived < requests.size() || !engine.idle(); ++now) {
    while (arrived < requests.size() && requests[arrived].arrival <= now) engine.submit(requests[arrived++]);
    engine.step();
  }
  print(engine);

  if (engine.finished().size() != requests.size() || engine.pages_available() != kPages) {
    std::printf("  WRONG: requests or pages were lost\n");
    ok = false;
  }
  for (const Request& request : engine.finished()) {
    if (request.tokens == expected[request.id].tokens) continue;
    std::printf("  WRONG: request %d differs from its answer alone\n", request.id);
    ok = false;
  }
  return ok;
}

int run(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const Model model(random);
  const std::vector<Request> requests = make_requests(random);
  std::vector<Answer> expected;
  double smallest_lead = std::numeric_limits<double>::infinity();
  for (const Request& request : requests) {
    expected.push_back(answer_alone(model, request));
    smallest_lead = std::min(smallest_lead, expected.back().smallest_lead);
  }
  const bool plain = serve("one token at a time", model, false, requests, expected);
  const bool drafted = serve("with drafts", model, true, requests, expected);
  const bool ok = plain && drafted;
  // Float and double may rank two logits differently when they lie closer than float can tell.
  std::printf("seed %llu: %zu requests; closest choice between two tokens: %.1e apart; %s\n",
              static_cast<unsigned long long>(seed), requests.size(), smallest_lead,
              ok ? "every token is right" : "WRONG");
  return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::stoull(argv[1]) : 1);
  } catch (const fiw::Error& error) {
    std::fprintf(stderr, "%s: %s\n", std::string(fiw::to_string(error.status())).c_str(), error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return EXIT_FAILURE;
}
