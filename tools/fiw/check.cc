// `fiw check`: a battery of shapes and options through the workspace, every row compared with the float64 reference.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "commands.h"
#include "compare.h"
#include "core/numeric.h"
#include "cpu/reference.h"
#include "device.h"
#include "flags.h"
#include "mix.h"
#include "progress.h"
#include "random_fill.h"
#include "table.h"

namespace fiw::cli {
namespace {

constexpr const char* kCheckHelp =
    "Runs a battery of shapes (head counts, head dims, page sizes, element types, options) through every kind of call\n"
    "and compares every output row with a plain float64 reference. Caches start out full of NaN, pages are scattered.\n"
    "Exits with 1 if anything is out of tolerance.";

enum class Call : std::uint8_t { kDecode, kPrefill, kVerify, kRagged, kAppend, kMerge };

std::string_view to_string(Call call) noexcept {
  switch (call) {
    case Call::kDecode:
      return "decode";
    case Call::kPrefill:
      return "prefill";
    case Call::kVerify:
      return "verify";
    case Call::kRagged:
      return "ragged";
    case Call::kAppend:
      return "append";
    case Call::kMerge:
      return "merge";
  }
  return "?";
}

struct Case {
  Call call = Call::kDecode;
  HeadCounts heads{8, 2};
  std::int32_t head_dim = 64;
  std::int32_t page_size = 16;
  DType dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  KvLayout layout = KvLayout::kNHD;
  std::vector<std::int32_t> qo_lens{1, 1, 1, 1};
  std::vector<std::int32_t> kv_lens{1, 16, 133, 700};
  bool causal = true;
  std::int32_t window_left = -1;
  float soft_cap = 0.0F;
  bool sinks = false;
  bool alibi = false;
  bool mask = false;

  std::string options() const {
    std::string text = causal ? "" : " full";
    if (window_left >= 0) text += fmt::format(" window {}", window_left);
    if (soft_cap > 0.0F) text += fmt::format(" cap {:.0f}", soft_cap);
    if (sinks) text += " sinks";
    if (alibi) text += " alibi";
    if (mask) text += " mask";
    if (layout == KvLayout::kHND) text += " HND";
    return text.empty() ? "-" : text.substr(1);
  }
  std::string types() const { return fmt::format("{}/{}", short_name(dtype), short_name(kv_dtype)); }
  std::string name() const {
    return fmt::format("{} {}/{} D{} P{} {} {}", to_string(call), heads.qo, heads.kv, head_dim, page_size, types(),
                       options());
  }
};

struct Outcome {
  ErrorGauge out;
  std::optional<ErrorGauge> lse;  ///< none for append

  bool ok() const noexcept { return out.failures() == 0 && (!lse || lse->failures() == 0); }
};

std::vector<Case> battery() {
  std::vector<Case> cases;
  const auto add = [&cases](Case base, const auto& change) {
    change(base);
    cases.push_back(std::move(base));
  };
  const Case decode;
  Case prefill;
  prefill.call = Call::kPrefill;
  prefill.qo_lens = {1, 40, 0, 5, 130};
  prefill.kv_lens = {1, 40, 9, 3, 300};
  Case verify;
  verify.call = Call::kVerify;
  verify.qo_lens = {4, 4, 4};
  verify.kv_lens = {2, 64, 301};
  Case ragged = prefill;
  ragged.call = Call::kRagged;
  Case append;
  append.call = Call::kAppend;
  append.qo_lens = {1, 16, 0, 50};
  append.kv_lens = {1, 40, 7, 133};
  Case merge;
  merge.call = Call::kMerge;
  merge.causal = false;
  merge.qo_lens = {1, 3};
  merge.kv_lens = {200, 90};

  for (const HeadCounts heads : {HeadCounts{1, 1}, {4, 2}, {3, 1}, {10, 2}, {12, 2}, {14, 2}, {16, 2}, {32, 2}}) {
    for (const Case& base : {decode, prefill}) add(base, [&](Case& c) { c.heads = heads; });
  }
  for (const std::int32_t head_dim : {8, 80, 96, 128, 192, 256, 576}) {
    for (const Case& base : {decode, prefill}) add(base, [&](Case& c) { c.head_dim = head_dim; });
  }
  for (const std::int32_t page_size : {1, 3, 128, 256}) {
    for (const Case& base : {decode, prefill}) add(base, [&](Case& c) { c.page_size = page_size; });
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType kv_dtype : {dtype, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      for (const Case& base : {decode, prefill, append}) {
        add(base, [&](Case& c) {
          c.dtype = dtype;
          c.kv_dtype = kv_dtype;
        });
      }
    }
  }
  for (const Case& base : {decode, prefill, verify, append}) add(base, [](Case& c) { c.layout = KvLayout::kHND; });
  for (const Case& base : {decode, prefill, verify, ragged}) {
    add(base, [](Case& c) { c.causal = false; });
    add(base, [](Case& c) { c.window_left = 7; });
    add(base, [](Case& c) { c.soft_cap = 5.0F; });
    add(base, [](Case& c) { c.sinks = true; });
    add(base, [](Case& c) { c.alibi = true; });
    add(base, [](Case& c) { c.mask = true; });
    add(base, [](Case& c) {
      c.window_left = 33;
      c.soft_cap = 30.0F;
      c.sinks = c.alibi = c.mask = true;
    });
  }
  for (const Case& base : {verify, ragged}) {
    add(base, [](Case&) {});
    add(base, [](Case& c) { c.heads = {32, 8}; });
  }
  for (const std::int32_t heads : {1, 64, 97}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      add(merge, [&](Case& c) {
        c.heads = {heads, heads};
        c.dtype = c.kv_dtype = dtype;
      });
    }
  }
  return cases;
}

/// Everything one case needs, made from its seed.
class Trial {
 public:
  Trial(const Case& c, std::uint64_t seed, FlashInferWorkspace& workspace)
      : case_(c),
        seed_(seed),
        workspace_(workspace),
        qo_indptr_(indptr_of(c.qo_lens)),
        kv_indptr_(indptr_of(c.kv_lens)) {
    params_.num_qo_heads = c.heads.qo;
    params_.num_kv_heads = c.heads.kv;
    params_.head_dim_qk = params_.head_dim_vo = c.head_dim;
    params_.causal = c.causal;
    params_.window_left = c.window_left;
    params_.logits_soft_cap = c.soft_cap;
    q_ = random_tensor(qo_indptr_.back(), c.heads.qo, 1);
    out_ = OwnedTensor(c.dtype, qo_indptr_.back(), c.heads.qo, c.head_dim);
    out_.memory.poison();
    k_ = random_tensor(kv_indptr_.back(), c.heads.kv, 2);
    v_ = random_tensor(kv_indptr_.back(), c.heads.kv, 3);
    lse_.assign(static_cast<std::size_t>(qo_indptr_.back()) * c.heads.qo, std::numeric_limits<float>::quiet_NaN());
    make_extras();
  }

  Outcome run() {
    switch (case_.call) {
      case Call::kAppend:
        return run_append();
      case Call::kMerge:
        return run_merge();
      case Call::kRagged:
        return run_ragged();
      default:
        return run_paged();
    }
  }

 private:
  OwnedTensor random_tensor(std::int64_t rows, std::int64_t heads, std::uint64_t salt) const {
    OwnedTensor tensor(case_.dtype, rows, heads, case_.head_dim);
    fill_random(tensor.view, mix(seed_, salt));
    return tensor;
  }

  void make_extras() {
    if (case_.sinks) {
      for (std::int32_t head = 0; head < case_.heads.qo; ++head) {
        sinks_.push_back(static_cast<float>(4.0 * unit_interval(mix(seed_, 10U, head)) - 1.0));
      }
      extras_.sinks = sinks_.data();
    }
    if (case_.alibi) {
      slopes_ = default_alibi_slopes(case_.heads.qo);
      extras_.alibi_slopes = slopes_.data();
    }
    if (case_.mask) {
      std::size_t size = 0;
      for (std::size_t r = 0; r < case_.qo_lens.size(); ++r) {
        size += static_cast<std::size_t>(case_.qo_lens[r]) * case_.kv_lens[r];
      }
      std::vector<std::uint8_t> visible(size);
      for (std::size_t i = 0; i < size; ++i) visible[i] = mix(seed_, 11U, i) % 3 != 0 ? 1 : 0;
      mask_ = pack_mask(visible, case_.qo_lens, case_.kv_lens, mask_indptr_);
      extras_.mask = mask_.data();
      extras_.mask_indptr = mask_indptr_.data();
    }
  }

  /// A cache of NaN and a table of scattered pages, about a third of the pool unused.
  PageTable make_cache(std::unique_ptr<OwnedKvCache>& cache) {
    const std::int64_t needed = pages_needed(case_.page_size, case_.kv_lens);
    const std::int64_t num_pages = needed + needed / 2 + 1;
    cache = std::make_unique<OwnedKvCache>(case_.kv_dtype, num_pages, case_.page_size, case_.heads.kv, case_.head_dim,
                                           case_.layout);
    if (is_fp8(case_.kv_dtype)) {
      for (std::int32_t head = 0; head < case_.heads.kv; ++head) {
        head_scales_.push_back(0.5F + 0.25F * static_cast<float>(head % 4));
      }
      cache->view.k_scale = 0.25F;
      cache->view.v_scale = 0.5F;
      cache->view.k_head_scale = cache->view.v_head_scale = head_scales_.data();
    }
    return scattered_table(case_.page_size, num_pages, case_.kv_lens, mix(seed_, 12U));
  }

  Outcome run_paged() {
    std::unique_ptr<OwnedKvCache> cache;
    const PageTable table = make_cache(cache);
    const KvCache& kv = cache->view;
    workspace_.append_kv(k_.view, v_.view, kv_indptr_, kv, table);
    if (case_.call == Call::kDecode) {
      workspace_.decode(q_.view, kv, table, params_, out_.view, lse_.data(), extras_);
    } else if (case_.call == Call::kVerify) {
      workspace_.verify(q_.view, case_.qo_lens.front(), kv, table, params_, out_.view, lse_.data(), extras_);
    } else {
      workspace_.prefill(q_.view, qo_indptr_, kv, table, params_, out_.view, lse_.data(), extras_);
    }
    ReferenceCall reference;
    reference.kv = &kv;
    reference.table = &table;
    return compare(reference);
  }

  Outcome run_ragged() {
    workspace_.ragged_prefill(q_.view, qo_indptr_, k_.view, v_.view, kv_indptr_, params_, out_.view, lse_.data(),
                              extras_);
    return compare_ragged();
  }

  /// Attention over each third of every request's keys, merged, against attention over all of them.
  Outcome run_merge() {
    constexpr std::int32_t kParts = 3;
    const std::int64_t width =
        std::int64_t{case_.heads.kv} * case_.head_dim * static_cast<std::int64_t>(size_of(case_.dtype));
    std::vector<OwnedTensor> outs;
    std::vector<std::vector<float>> lses;
    for (std::int32_t part = 0; part < kParts; ++part) {
      std::vector<std::int32_t> lens;
      for (const std::int32_t len : case_.kv_lens) lens.push_back(len * (part + 1) / kParts - len * part / kParts);
      const std::vector<std::int32_t> indptr = indptr_of(lens);
      OwnedTensor k(case_.dtype, indptr.back(), case_.heads.kv, case_.head_dim);
      OwnedTensor v(case_.dtype, indptr.back(), case_.heads.kv, case_.head_dim);
      for (std::size_t r = 0; r < lens.size(); ++r) {
        const std::int64_t from = (kv_indptr_[r] + case_.kv_lens[r] * part / kParts) * width;
        const auto bytes = static_cast<std::size_t>(lens[r] * width);
        std::memcpy(k.memory.as<std::byte>() + indptr[r] * width, k_.memory.as<std::byte>() + from, bytes);
        std::memcpy(v.memory.as<std::byte>() + indptr[r] * width, v_.memory.as<std::byte>() + from, bytes);
      }
      OwnedTensor& out = outs.emplace_back(case_.dtype, qo_indptr_.back(), case_.heads.qo, case_.head_dim);
      std::vector<float>& lse = lses.emplace_back(lse_.size());
      workspace_.ragged_prefill(q_.view, qo_indptr_, k.view, v.view, indptr, params_, out.view, lse.data());
    }
    std::vector<PartialState> parts;
    for (std::size_t i = 0; i < outs.size(); ++i) parts.push_back({outs[i].view, lses[i].data()});
    workspace_.merge_states(parts, out_.view, lse_.data());
    return compare_ragged();
  }

  /// Every request's last tokens against the rounded inputs; all other slots must stay NaN.
  Outcome run_append() {
    std::unique_ptr<OwnedKvCache> cache;
    const PageTable table = make_cache(cache);
    const KvCache& kv = cache->view;
    const OwnedTensor k = random_tensor(qo_indptr_.back(), case_.heads.kv, 4);
    const OwnedTensor v = random_tensor(qo_indptr_.back(), case_.heads.kv, 5);
    workspace_.append_kv(k.view, v.view, qo_indptr_, kv, table);

    std::vector<std::int64_t> source(static_cast<std::size_t>(kv.num_pages) * kv.page_size, -1);
    for (std::int32_t r = 0; r < table.batch(); ++r) {
      for (std::int32_t i = 0; i < case_.qo_lens[r]; ++i) {
        const std::int32_t token = case_.kv_lens[r] - case_.qo_lens[r] + i;
        const std::int64_t page = table.indices()[table.indptr()[r] + token / kv.page_size];
        source[page * kv.page_size + token % kv.page_size] = qo_indptr_[r] + i;
      }
    }
    ErrorGauge errors({0.0, 0.0});
    const auto compare_slots = [&](const void* cached, const KvCache::Strides& stride, const ConstTensor& tokens,
                                   float tensor_scale) {
      for (std::size_t slot = 0; slot < source.size(); ++slot) {
        const auto page = static_cast<std::int64_t>(slot) / kv.page_size;
        const auto offset = static_cast<std::int64_t>(slot) % kv.page_size;
        for (std::int32_t head = 0; head < kv.num_kv_heads; ++head) {
          const float scale = tensor_scale * (kv.k_head_scale != nullptr ? head_scales_[head] : 1.0F);
          for (std::int32_t d = 0; d < kv.head_dim_qk; ++d) {
            const float result =
                load_float(cached, kv.dtype, page * stride.page + offset * stride.token + head * stride.head + d);
            if (source[slot] < 0) {
              errors.add(std::isnan(result) ? 0.0 : result, 0.0);
              continue;
            }
            float rounded = 0.0F;
            const float value =
                load_float(tokens.data, tokens.dtype, source[slot] * tokens.row_stride + head * tokens.head_stride + d);
            store_saturated(&rounded, kv.dtype, 0, value / scale);
            errors.add(result, load_float(&rounded, kv.dtype, 0));
          }
        }
      }
    };
    compare_slots(kv.k, kv.k_stride, k.view, kv.k_scale);
    compare_slots(kv.v, kv.v_stride, v.view, kv.v_scale);
    return {errors, std::nullopt};
  }

  Outcome compare_ragged() {
    const RaggedKv ragged{k_.view, v_.view, kv_indptr_};
    ReferenceCall reference;
    reference.ragged = &ragged;
    return compare(reference);
  }

  Outcome compare(ReferenceCall& reference) {
    reference.q = q_.view;
    reference.qo_indptr = qo_indptr_;
    reference.params = params_;
    reference.extras = extras_;
    Tolerance tolerance = output_tolerance(case_.dtype);
    if (case_.call == Call::kMerge) tolerance.absolute += 4.0 * tolerance.relative;  // the parts were rounded, too
    ErrorGauge out_errors(tolerance);
    ErrorGauge lse_errors(kLseTolerance);
    std::vector<double> expected(case_.head_dim);
    const Tensor& out = out_.view;
    for (std::int64_t row = 0; row < out.rows; ++row) {
      for (std::int32_t head = 0; head < case_.heads.qo; ++head) {
        lse_errors.add(lse_[row * case_.heads.qo + head], reference_row(reference, row, head, expected));
        for (std::int32_t d = 0; d < case_.head_dim; ++d) {
          out_errors.add(load_float(out.data, out.dtype, row * out.row_stride + head * out.head_stride + d),
                         expected[d]);
        }
      }
    }
    return {out_errors, lse_errors};
  }

  const Case& case_;
  std::uint64_t seed_;
  FlashInferWorkspace& workspace_;
  std::vector<std::int32_t> qo_indptr_;
  std::vector<std::int32_t> kv_indptr_;
  AttentionParams params_;
  OwnedTensor q_;
  OwnedTensor out_;
  OwnedTensor k_;
  OwnedTensor v_;
  std::vector<float> lse_;
  std::vector<float> sinks_;
  std::vector<float> slopes_;
  std::vector<float> head_scales_;
  std::vector<std::uint8_t> mask_;
  std::vector<std::int32_t> mask_indptr_;
  AttentionExtras extras_;
};

struct CheckOptions {
  std::uint64_t seed = 1;
  std::string filter;
  int device = kCpuDevice;
  std::int32_t threads = 0;
  bool json = false;
};

std::string scientific(double error) { return fmt::format("{:.1e}", error); }

int run_check(const CheckOptions& options) {
  WorkspaceOptions workspace_options;
  workspace_options.num_threads = options.threads;
  const auto workspace = open_workspace(options.device, workspace_options);
  Table table({{"call"},
               {"heads"},
               {"D", Table::Align::kRight},
               {"page", Table::Align::kRight},
               {"q/kv types"},
               {"options"},
               {"error out", Table::Align::kRight},
               {"error lse", Table::Align::kRight},
               {"tolerance out", Table::Align::kRight},
               {"ok"}});
  nlohmann::json results = nlohmann::json::array();
  int failures = 0;
  const std::vector<Case> cases = battery();
  std::optional<Progress> progress(std::in_place);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    if (c.name().find(options.filter) == std::string::npos) continue;
    progress->update([&] { return fmt::format("case {} of {}: {}", i + 1, cases.size(), c.name()); });
    const Outcome outcome = Trial(c, mix(options.seed, i), *workspace).run();
    failures += outcome.ok() ? 0 : 1;
    const Tolerance& tolerance = outcome.out.tolerance();
    table.add({std::string(to_string(c.call)), fmt::format("{}/{}", c.heads.qo, c.heads.kv), std::to_string(c.head_dim),
               std::to_string(c.page_size), c.types(), c.options(), scientific(outcome.out.largest()),
               outcome.lse ? scientific(outcome.lse->largest()) : "-",
               tolerance.absolute == 0.0 ? "exact"
                                         : fmt::format("{:.0e} + {:.0e}|x|", tolerance.absolute, tolerance.relative),
               outcome.ok() ? "ok" : "WRONG"});
    nlohmann::json result = {{"name", c.name()},
                             {"error_out", outcome.out.largest()},
                             {"values", outcome.out.compared()},
                             {"tolerance_out_absolute", tolerance.absolute},
                             {"tolerance_out_relative", tolerance.relative},
                             {"ok", outcome.ok()}};
    if (outcome.lse) {
      result["error_lse"] = outcome.lse->largest();
      result["tolerance_lse"] = outcome.lse->tolerance().absolute;
    }
    results.push_back(std::move(result));
  }
  progress.reset();  // clears its line before the results come
  if (results.empty()) throw UsageError(fmt::format("--filter '{}' matches no case", options.filter));
  if (options.json) {
    print_json({{"seed", options.seed}, {"failures", failures}, {"cases", results}});
  } else {
    table.print(std::cout);
    std::cout << fmt::format("{} cases, {} wrong (seed {})\n", results.size(), failures, options.seed);
  }
  return failures == 0 ? kExitOk : kExitFailure;
}

}  // namespace

void add_check_command(CLI::App& app, int& exit_code) {
  CLI::App& check = *app.add_subcommand("check", "Compare a battery of shapes with the reference on this machine");
  check.footer(kCheckHelp);
  const auto options = std::make_shared<CheckOptions>();
  add_number_flag(check, "--seed", options->seed, "Seed of the random inputs");
  check.add_option("--filter", options->filter, "Only cases whose name contains TEXT, such as 'prefill' or 'D128'")
      ->type_name("TEXT");
  add_device_flag(check, options->device);
  add_threads_flag(check, options->threads);
  check.add_flag("--json", options->json, "Results as JSON");
  check.callback([options, &exit_code] { exit_code = run_check(*options); });
}

}  // namespace fiw::cli
