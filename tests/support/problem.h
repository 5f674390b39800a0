// One attention problem: random inputs of a described case, a call that solves it, and a check against the reference.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fiw/workspace.h"
#include "support/paged_cache.h"
#include "support/random.h"
#include "support/tensor.h"

namespace fiw::test {

enum class Op { kDecode, kPrefill, kVerify, kRagged };

struct Case {
  Op op = Op::kDecode;
  AttentionParams params{.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64};
  DType q_dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  std::int32_t page_size = 16;
  CacheLayout layout = CacheLayout::kNhd;
  Spacing spacing = Spacing::kContiguous;  ///< of q, out and ragged K/V
  std::vector<std::int32_t> qo_lens{};     ///< all 1 for decode, all equal for verify
  std::vector<std::int32_t> kv_lens{};
  bool lse = true;
  bool sinks = false;
  bool alibi = false;
  bool mask = false;
  float k_scale = 1.0F;
  float v_scale = 1.0F;
  bool head_scales = false;
  float q_deviation = 1.0F;       ///< larger: more peaked softmax
  std::int32_t shared_pages = 0;  ///< leading pages that all requests with that many full pages share
  std::int32_t spare_pages = 3;   ///< pages of the pool that no request uses
};

std::ostream& operator<<(std::ostream& out, Op op);
std::ostream& operator<<(std::ostream& out, const Case& c);

class Problem {
 public:
  Problem(int device, const Case& c, Rng& rng);

  /// Poisons the outputs and makes the case's call on the workspace.
  void call(FlashInferWorkspace& workspace);
  /// Plans the case as a step. Not for ragged cases.
  AttentionStep plan(FlashInferWorkspace& workspace) const;
  /// Poisons the outputs and runs a step that was planned for this or an equal case.
  void run(const AttentionStep& step);
  /// The steps of call(), for tests that make the call themselves.
  void poison_outputs();
  void fetch_outputs();
  /// Whether the fetched outputs are all poison.
  bool outputs_untouched() const;
  /// Compares the last call's results with the reference: every row, or a random choice of rows when they are many.
  testing::AssertionResult check();

  /// Each request gains 0 .. max_tokens tokens through append_kv; false, and nothing done, when the pool has too few
  /// spare pages. For paged cases whose requests share no unfilled page. cache().device_matches_host() then checks the
  /// append.
  bool grow(FlashInferWorkspace& workspace, std::int32_t max_tokens);

  /// As grow(), with the same number of tokens for every request.
  bool grow_each(FlashInferWorkspace& workspace, std::int32_t tokens);
  /// Stores `value`, which may be NaN or infinite, as one element of a token's key (`key`) or value, scales aside, or
  /// of a query. The outputs are then poisoned with a finite value, and check() wants NaN exactly where the reference
  /// has it.
  void spoil(bool key, std::int32_t request, std::int32_t token, std::int32_t kv_head, std::int32_t d, float value);
  void spoil_query(std::int64_t row, std::int32_t qo_head, std::int32_t d, float value);
  /// Replaces the page table by another over the same cache, for as many requests. A mask is made anew, at the same
  /// addresses if it needs no more bytes than the first one.
  void set_table(PageTable table);

  const Case& description() const { return case_; }
  const PageTable& table() const { return table_; }
  StepSpec spec() const;
  std::span<const std::int32_t> qo_indptr() const { return qo_indptr_; }
  std::span<const std::int32_t> kv_indptr() const { return kv_indptr_; }
  std::int32_t window() const { return case_.qo_lens.empty() ? 1 : case_.qo_lens.front(); }

  TestTensor& q() { return q_; }
  TestTensor& out() { return out_; }
  std::vector<float>& lse() { return lse_.host(); }
  float* device_lse() { return case_.lse ? lse_.device() : nullptr; }
  float* unasked_lse() { return lse_.device(); }
  PagedCache& cache() { return *cache_; }
  TestTensor& ragged_k() { return *ragged_k_; }
  TestTensor& ragged_v() { return *ragged_v_; }
  AttentionExtras device_extras() const;

 private:
  void make_table(Rng& rng);
  void make_mask();
  double typical_logit() const;
  bool grow_by(FlashInferWorkspace& workspace, const std::vector<std::int32_t>& tokens);
  std::string place(std::int64_t row, std::int32_t head) const;

  int device_;
  Case case_;
  bool spoiled_ = false;
  Rng rng_;
  std::vector<std::int32_t> qo_indptr_;
  std::vector<std::int32_t> kv_indptr_;
  TestTensor q_;
  TestTensor out_;
  Mirror<float> lse_;
  std::vector<std::int32_t> free_pages_;
  PageTable table_;
  std::optional<PagedCache> cache_;
  std::optional<TestTensor> ragged_k_;
  std::optional<TestTensor> ragged_v_;
  std::optional<Mirror<float>> sinks_;
  std::optional<Mirror<float>> slopes_;
  std::optional<Mirror<std::uint8_t>> mask_;
  std::optional<Mirror<std::int32_t>> mask_indptr_;
};

/// The CPU, and CUDA device 0 where this build has the backend and this machine the device.
std::vector<int> compiled_devices();
/// "cpu" or "cuda0", "cuda1", ...
std::string device_name(int device);
/// The same, as the name of a test's instance.
std::string device_test_name(const testing::TestParamInfo<int>& info);
/// A workspace on `device`; throws if this build has no backend for it.
std::unique_ptr<FlashInferWorkspace> make_workspace(int device, const WorkspaceOptions& options = {});

}  // namespace fiw::test
