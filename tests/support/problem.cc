#include "support/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>
#include <stdexcept>
#include <string>

#include "cpu/reference.h"

namespace fiw::test {
namespace {

/// Multiplications of the reference that one check may take; beyond them it looks at a random choice of rows.
constexpr std::int64_t kReferenceBudget = 4'000'000;

/// What outputs hold before a call whose results may be NaN; no result comes near it.
constexpr float kFinitePoison = 12345.0F;

/// How far fp32 puts a softmax weight off, relative to the size of the logits behind it.
constexpr double kLogitRounding = 2e-6;

std::vector<std::int32_t> to_indptr(const std::vector<std::int32_t>& lens) {
  std::vector<std::int32_t> indptr{0};
  for (const std::int32_t len : lens) indptr.push_back(indptr.back() + len);
  return indptr;
}

std::int32_t value_dim(const AttentionParams& params) {
  return params.head_dim_vo == 0 ? params.head_dim_qk : params.head_dim_vo;
}

std::int32_t pages_of(std::int32_t tokens, std::int32_t page_size) { return (tokens + page_size - 1) / page_size; }

template <class T>
std::ostream& print_list(std::ostream& out, const std::vector<T>& values) {
  out << '[';
  for (std::size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ", ") << values[i];
  return out << ']';
}

const char* name(CacheLayout layout) {
  switch (layout) {
    case CacheLayout::kNhd:
      return "NHD";
    case CacheLayout::kHnd:
      return "HND";
    case CacheLayout::kInterleavedNhd:
      return "interleaved NHD";
    case CacheLayout::kInterleavedHnd:
      return "interleaved HND";
    case CacheLayout::kPadded:
      return "padded NHD";
  }
  return "?";
}

}  // namespace

std::ostream& operator<<(std::ostream& out, Op op) {
  constexpr const char* kNames[] = {"decode", "prefill", "verify", "ragged_prefill"};
  return out << kNames[static_cast<int>(op)];
}

std::ostream& operator<<(std::ostream& out, const Case& c) {
  const AttentionParams& params = c.params;
  out << c.op << ": heads " << params.num_qo_heads << "/" << params.num_kv_heads << ", head dims " << params.head_dim_qk
      << "/" << value_dim(params) << ", q " << to_string(c.q_dtype) << ", kv " << to_string(c.kv_dtype)
      << ", page size " << c.page_size << ", " << name(c.layout) << (c.spacing == Spacing::kStrided ? ", strided" : "")
      << ", qo_lens ";
  print_list(out, c.qo_lens) << ", kv_lens ";
  print_list(out, c.kv_lens) << ", causal " << params.causal << ", window_left " << params.window_left << ", soft cap "
                             << params.logits_soft_cap << ", sm_scale " << params.sm_scale << ", lse " << c.lse
                             << ", sinks " << c.sinks << ", alibi " << c.alibi << ", mask " << c.mask << ", scales "
                             << c.k_scale << "/" << c.v_scale << (c.head_scales ? " and a head" : "")
                             << ", q deviation " << c.q_deviation << ", shared pages " << c.shared_pages;
  return out;
}

Problem::Problem(int device, const Case& c, Rng& rng)
    : device_(device),
      case_(c),
      rng_(rng.next_seed()),
      qo_indptr_(to_indptr(c.qo_lens)),
      kv_indptr_(to_indptr(c.kv_lens)),
      q_(device, c.q_dtype, qo_indptr_.back(), c.params.num_qo_heads, c.params.head_dim_qk, c.spacing),
      out_(device, c.q_dtype, qo_indptr_.back(), c.params.num_qo_heads, value_dim(c.params), c.spacing),
      lse_(device, static_cast<std::size_t>(qo_indptr_.back()) * static_cast<std::size_t>(c.params.num_qo_heads)) {
  if (c.qo_lens.size() != c.kv_lens.size()) throw std::invalid_argument("qo_lens and kv_lens differ in length");
  q_.fill_normal(rng_, c.q_deviation);
  if (c.op == Op::kRagged) {
    ragged_k_.emplace(device, c.kv_dtype, kv_indptr_.back(), c.params.num_kv_heads, c.params.head_dim_qk, c.spacing);
    ragged_v_.emplace(device, c.kv_dtype, kv_indptr_.back(), c.params.num_kv_heads, value_dim(c.params), c.spacing);
    ragged_k_->fill_normal(rng_);
    ragged_v_->fill_normal(rng_);
  } else {
    make_table(rng_);
  }
  const auto heads = static_cast<std::size_t>(c.params.num_qo_heads);
  if (c.sinks) {
    std::vector<float> sinks(heads);
    for (float& sink : sinks) sink = rng_.chance(0.1) ? -std::numeric_limits<float>::infinity() : 2.0F * rng_.normal();
    sinks_.emplace(device, std::move(sinks));
  }
  if (c.alibi) slopes_.emplace(device, default_alibi_slopes(c.params.num_qo_heads));
  if (c.mask) make_mask();
}

void Problem::make_table(Rng& rng) {
  const std::int32_t page_size = case_.page_size;
  const auto shared = static_cast<std::size_t>(case_.shared_pages);
  std::int32_t pool = case_.shared_pages + case_.spare_pages;
  for (const std::int32_t kv_len : case_.kv_lens) pool += pages_of(kv_len, page_size);
  free_pages_.resize(static_cast<std::size_t>(pool));
  std::iota(free_pages_.begin(), free_pages_.end(), 0);
  std::shuffle(free_pages_.begin(), free_pages_.end(), rng.engine());
  const auto take = [&](std::size_t count) {
    std::vector<std::int32_t> taken(free_pages_.end() - static_cast<std::ptrdiff_t>(count), free_pages_.end());
    free_pages_.resize(free_pages_.size() - count);
    return taken;
  };

  cache_.emplace(device_,
                 CacheShape{.dtype = case_.kv_dtype,
                            .layout = case_.layout,
                            .num_pages = pool,
                            .page_size = page_size,
                            .num_kv_heads = case_.params.num_kv_heads,
                            .head_dim_qk = case_.params.head_dim_qk,
                            .head_dim_vo = value_dim(case_.params),
                            .k_scale = case_.k_scale,
                            .v_scale = case_.v_scale,
                            .head_scales = case_.head_scales},
                 rng);
  const std::vector<std::int32_t> prefix = take(shared);
  cache_->fill(prefix, 0, case_.shared_pages * page_size, rng);
  std::vector<std::vector<std::int32_t>> pages;
  for (const std::int32_t kv_len : case_.kv_lens) {
    const bool shares = shared > 0 && kv_len >= case_.shared_pages * page_size;
    std::vector<std::int32_t> list = shares ? prefix : std::vector<std::int32_t>();
    const std::vector<std::int32_t> own = take(static_cast<std::size_t>(pages_of(kv_len, page_size)) - list.size());
    list.insert(list.end(), own.begin(), own.end());
    cache_->fill(list, shares ? case_.shared_pages * page_size : 0, kv_len, rng);
    pages.push_back(std::move(list));
  }
  cache_->upload();
  table_ = PageTable::from_pages(page_size, pool, pages, case_.kv_lens);
}

void Problem::make_mask() {
  std::vector<std::uint8_t> booleans;
  for (std::size_t r = 0; r < case_.kv_lens.size(); ++r) {
    for (std::int32_t p = 0; p < case_.qo_lens[r]; ++p) {
      // Some rows see everything, some nothing, the others a random half.
      const double density = rng_.pick({0.0, 0.5, 0.5, 0.5, 1.0});
      for (std::int32_t j = 0; j < case_.kv_lens[r]; ++j) booleans.push_back(rng_.chance(density) ? 1 : 0);
    }
  }
  std::vector<std::int32_t> indptr;
  std::vector<std::uint8_t> packed = pack_mask(booleans, case_.qo_lens, case_.kv_lens, indptr);
  if (packed.empty()) packed.push_back(0);  // so that its address is not null
  if (mask_ && packed.size() <= mask_->host().size() && indptr.size() == mask_indptr_->host().size()) {
    std::ranges::copy(packed, mask_->host().begin());
    mask_->upload();
    mask_indptr_->host() = std::move(indptr);
    mask_indptr_->upload();
    return;
  }
  mask_.emplace(device_, std::move(packed));
  mask_indptr_.emplace(device_, std::move(indptr));
}

AttentionExtras Problem::device_extras() const {
  return {.sinks = sinks_ ? sinks_->device() : nullptr,
          .alibi_slopes = slopes_ ? slopes_->device() : nullptr,
          .mask = mask_ ? mask_->device() : nullptr,
          .mask_indptr = mask_indptr_ ? mask_indptr_->device() : nullptr};
}

StepSpec Problem::spec() const {
  return {.params = case_.params,
          .q_dtype = case_.q_dtype,
          .kv_dtype = case_.kv_dtype,
          .lse = case_.lse,
          .sinks = case_.sinks,
          .alibi = case_.alibi,
          .custom_mask = case_.mask};
}

void Problem::poison_outputs() {
  if (spoiled_) {
    out_.fill(kFinitePoison);
  } else {
    out_.poison();
  }
  std::ranges::fill(lse_.host(), spoiled_ ? kFinitePoison : std::numeric_limits<float>::quiet_NaN());
  lse_.upload();
}

void Problem::fetch_outputs() {
  out_.download();
  lse_.download();
}

bool Problem::outputs_untouched() const {
  return out_.all_nan() && std::ranges::all_of(lse_.host(), [](float lse) { return std::isnan(lse); });
}

void Problem::call(FlashInferWorkspace& workspace) {
  poison_outputs();
  switch (case_.op) {
    case Op::kDecode:
      workspace.decode(q_.device(), cache_->device(), table_, case_.params, out_.device(), device_lse(),
                       device_extras());
      break;
    case Op::kPrefill:
      workspace.prefill(q_.device(), qo_indptr_, cache_->device(), table_, case_.params, out_.device(), device_lse(),
                        device_extras());
      break;
    case Op::kVerify:
      workspace.verify(q_.device(), window(), cache_->device(), table_, case_.params, out_.device(), device_lse(),
                       device_extras());
      break;
    case Op::kRagged:
      workspace.ragged_prefill(q_.device(), qo_indptr_, ragged_k_->device(), ragged_v_->device(), kv_indptr_,
                               case_.params, out_.device(), device_lse(), device_extras());
      break;
  }
  fetch_outputs();
}

AttentionStep Problem::plan(FlashInferWorkspace& workspace) const {
  switch (case_.op) {
    case Op::kDecode:
      return workspace.plan_decode(table_, spec());
    case Op::kPrefill:
      return workspace.plan_prefill(qo_indptr_, table_, spec());
    case Op::kVerify:
      return workspace.plan_verify(window(), table_, spec());
    case Op::kRagged:
      break;
  }
  throw std::logic_error("ragged calls are not planned as steps");
}

void Problem::run(const AttentionStep& step) {
  poison_outputs();
  step.run(q_.device(), cache_->device(), out_.device(), device_lse(), device_extras());
  fetch_outputs();
}

std::string Problem::place(std::int64_t row, std::int32_t head) const {
  const auto after = std::upper_bound(qo_indptr_.begin(), qo_indptr_.end(), row);
  const std::int64_t request = after - qo_indptr_.begin() - 1;
  return "row " + std::to_string(row) + " (request " + std::to_string(request) + ", its token " +
         std::to_string(row - qo_indptr_[static_cast<std::size_t>(request)]) + "), head " + std::to_string(head);
}

double Problem::typical_logit() const {
  const AttentionParams& params = case_.params;
  const double root = std::sqrt(static_cast<double>(params.head_dim_qk));
  const double scale = params.sm_scale > 0.0F ? static_cast<double>(params.sm_scale) : 1.0 / root;
  double logit = scale * static_cast<double>(case_.q_deviation) * root;
  // Keys after the query gain by ALiBi, up to a logit of their distance.
  if (case_.alibi && (case_.mask || !params.causal) && !case_.kv_lens.empty()) {
    logit += *std::ranges::max_element(case_.kv_lens);
  }
  return logit;
}

testing::AssertionResult Problem::check() {
  // Tensor cores round the softmax's weights to the queries' type before they sum and apply them, and split keys keep
  // partial results in it.
  const bool rounded_weights = device_ != kCpuDevice && case_.q_dtype != DType::kFloat32;
  const double widening = rounded_weights ? 3.0 : 1.0;
  const double logit_rounding = kLogitRounding * typical_logit();
  const Tolerance tolerance = Tolerance::of(case_.q_dtype).widened(widening, logit_rounding);
  const Tolerance lse_tolerance = Tolerance::of_lse(case_.q_dtype).widened(widening, logit_rounding);
  const auto failure = [&](const std::string& where, double expected, double actual) {
    return testing::AssertionFailure() << where << ": expected " << expected << ", got " << actual << "\n  in "
                                       << case_;
  };
  const auto matches = [&](const Tolerance& allowed, double wanted, double actual) {
    return spoiled_ && std::isnan(wanted) ? std::isnan(actual) : allowed.admits(wanted, actual);
  };
  const std::optional<KvCache> kv = cache_ ? std::optional(cache_->host()) : std::nullopt;
  const RaggedKv ragged = ragged_k_ ? RaggedKv{ragged_k_->host(), ragged_v_->host(), kv_indptr_} : RaggedKv{};
  const ReferenceCall reference{.q = q_.host(),
                                .qo_indptr = qo_indptr_,
                                .kv = kv ? &*kv : nullptr,
                                .table = kv ? &table_ : nullptr,
                                .ragged = ragged_k_ ? &ragged : nullptr,
                                .params = case_.params,
                                .extras = {.sinks = sinks_ ? sinks_->host().data() : nullptr,
                                           .alibi_slopes = slopes_ ? slopes_->host().data() : nullptr,
                                           .mask = mask_ ? mask_->host().data() : nullptr,
                                           .mask_indptr = mask_indptr_ ? mask_indptr_->host().data() : nullptr}};

  const std::int32_t heads = case_.params.num_qo_heads;
  std::int64_t cost = 0;
  for (std::size_t r = 0; r < case_.kv_lens.size(); ++r) {
    cost += std::int64_t{case_.qo_lens[r]} * case_.kv_lens[r] * heads *
            (case_.params.head_dim_qk + value_dim(case_.params));
  }
  const double share = static_cast<double>(kReferenceBudget) / static_cast<double>(std::max<std::int64_t>(cost, 1));

  std::vector<double> expected(static_cast<std::size_t>(value_dim(case_.params)));
  for (std::int64_t row = 0; row < q_.rows(); ++row) {
    for (std::int32_t head = 0; head < heads; ++head) {
      const auto lse = static_cast<double>(lse_.host()[static_cast<std::size_t>(row * heads + head)]);
      for (std::int64_t d = 0; d < out_.dim(); ++d) {
        if (!spoiled_ && std::isnan(out_.at(row, head, d))) {
          return failure(place(row, head) + ", element " + std::to_string(d), 0.0, std::nan(""));
        }
      }
      if (share < 1.0 && !rng_.chance(share)) continue;
      const double expected_lse = reference_row(reference, row, head, expected);
      for (std::int64_t d = 0; d < out_.dim(); ++d) {
        const auto actual = static_cast<double>(out_.at(row, head, d));
        if (!matches(tolerance, expected[static_cast<std::size_t>(d)], actual)) {
          return failure(place(row, head) + ", element " + std::to_string(d), expected[static_cast<std::size_t>(d)],
                         actual);
        }
      }
      if (case_.lse && !matches(lse_tolerance, expected_lse, lse)) {
        return failure(place(row, head) + ", lse", expected_lse, lse);
      }
      if (!case_.lse && !spoiled_ && !std::isnan(lse)) {
        return failure(place(row, head) + ", lse not asked for", std::nan(""), lse);
      }
    }
  }
  return out_.gaps_untouched();
}

bool Problem::grow(FlashInferWorkspace& workspace, std::int32_t max_tokens) {
  std::vector<std::int32_t> tokens(case_.kv_lens.size());
  for (std::int32_t& count : tokens) count = rng_.uniform(0, max_tokens);
  return grow_by(workspace, tokens);
}

bool Problem::grow_each(FlashInferWorkspace& workspace, std::int32_t tokens) {
  return grow_by(workspace, std::vector<std::int32_t>(case_.kv_lens.size(), tokens));
}

void Problem::spoil(bool key, std::int32_t request, std::int32_t token, std::int32_t kv_head, std::int32_t d,
                    float value) {
  spoiled_ = true;
  if (case_.op == Op::kRagged) {
    TestTensor& tensor = key ? *ragged_k_ : *ragged_v_;
    tensor.set(kv_indptr_[static_cast<std::size_t>(request)] + token, kv_head, d, value);
    tensor.upload();
    return;
  }
  const std::int32_t entry = table_.indptr()[static_cast<std::size_t>(request)] + token / case_.page_size;
  cache_->set(key, table_.indices()[static_cast<std::size_t>(entry)], token % case_.page_size, kv_head, d, value);
  cache_->upload();
}

void Problem::spoil_query(std::int64_t row, std::int32_t qo_head, std::int32_t d, float value) {
  spoiled_ = true;
  q_.set(row, qo_head, d, value);
  q_.upload();
}

void Problem::set_table(PageTable table) {
  if (table == table_) return;
  table_ = std::move(table);
  case_.kv_lens.assign(table_.kv_lens().begin(), table_.kv_lens().end());
  if (case_.mask) make_mask();
}

bool Problem::grow_by(FlashInferWorkspace& workspace, const std::vector<std::int32_t>& tokens) {
  const std::size_t batch = case_.kv_lens.size();
  std::size_t pages = 0;
  for (std::size_t r = 0; r < batch; ++r) {
    pages += static_cast<std::size_t>(pages_of(case_.kv_lens[r] + tokens[r], case_.page_size) -
                                      pages_of(case_.kv_lens[r], case_.page_size));
  }
  if (pages > free_pages_.size()) return false;

  const std::vector<std::int32_t> append_indptr = to_indptr(tokens);
  const AttentionParams& params = case_.params;
  TestTensor k(device_, case_.q_dtype, append_indptr.back(), params.num_kv_heads, params.head_dim_qk, case_.spacing);
  TestTensor v(device_, case_.q_dtype, append_indptr.back(), params.num_kv_heads, value_dim(params), case_.spacing);
  k.fill_normal(rng_);
  v.fill_normal(rng_);
  table_.advance(tokens, std::span(free_pages_).last(pages));
  free_pages_.resize(free_pages_.size() - pages);
  workspace.append_kv(k.device(), v.device(), append_indptr, cache_->device(), table_);

  for (std::size_t r = 0; r < batch; ++r) {
    for (std::int32_t i = 0; i < tokens[r]; ++i) {
      const std::int32_t position = case_.kv_lens[r] + i;
      const std::int32_t entry = table_.indptr()[r] + position / case_.page_size;
      cache_->store_token(table_.indices()[static_cast<std::size_t>(entry)], position % case_.page_size, k, v,
                          append_indptr[r] + i);
    }
    case_.kv_lens[r] += tokens[r];
  }
  kv_indptr_ = to_indptr(case_.kv_lens);
  if (case_.mask) make_mask();
  return true;
}

std::vector<int> compiled_devices() {
  std::vector<int> devices;
  if (FlashInferWorkspace::compiled_with(DeviceKind::kCpu)) devices.push_back(kCpuDevice);
  if (FlashInferWorkspace::compiled_with(DeviceKind::kCuda) && device_count() > 0) devices.push_back(0);
  return devices;
}

std::string device_name(int device) { return device == kCpuDevice ? "cpu" : "cuda" + std::to_string(device); }

std::string device_test_name(const testing::TestParamInfo<int>& info) { return device_name(info.param); }

std::unique_ptr<FlashInferWorkspace> make_workspace(int device, const WorkspaceOptions& options) {
  std::unique_ptr<FlashInferWorkspace> workspace = FlashInferWorkspace::create(device, options);
  if (workspace == nullptr) throw std::runtime_error("this build has no backend for device " + std::to_string(device));
  return workspace;
}

}  // namespace fiw::test
