// The row check must see faults: right rows pass, and one wrong value, page or draft does not.
#include "row_check.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/numeric.h"
#include "cpu/reference.h"
#include "device.h"
#include "seed.h"

namespace fiw::cli {
namespace {

TEST(ErrorGauge, NeverPassesNanOrAWrongInfinity) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  ErrorGauge gauge({1e-3, 0.0});
  EXPECT_TRUE(gauge.add(1.0, 1.0005));
  EXPECT_TRUE(gauge.add(-kInf, -kInf));
  EXPECT_EQ(gauge.failures(), 0);
  EXPECT_NEAR(gauge.largest(), 5e-4, 1e-12);
  EXPECT_FALSE(gauge.add(1.0, 1.002));
  EXPECT_FALSE(gauge.add(kNan, 1.0));
  EXPECT_FALSE(gauge.add(1.0, -kInf));
  EXPECT_FALSE(gauge.add(kInf, -kInf));
  EXPECT_FALSE(gauge.add(-kInf, 0.0));
  EXPECT_EQ(gauge.failures(), 5);
  EXPECT_EQ(gauge.compared(), 7);
  ErrorGauge relative({1e-3, 0.1});
  EXPECT_TRUE(relative.add(-kInf, -kInf));
  EXPECT_FALSE(relative.add(0.0, -kInf));
  EXPECT_FALSE(relative.add(kNan, -kInf));
}

/// One request, its prompt in chunks and then decoded, with outputs made by the reference from the same tokens.
class RowChecks : public SeededTest {
 protected:
  static constexpr std::int32_t kLayers = 2;

  RowChecks() {
    params_.num_qo_heads = 4;
    params_.num_kv_heads = 2;
    params_.head_dim_qk = params_.head_dim_vo = 16;
    options_.num_pages = 64;
    options_.max_batch = 2;
    options_.token_budget = 24;
    options_.speculate = 2;
    options_.acceptance = 0.5;
    options_.seed = random_();
  }

  /// Replays with `spoil(work, step, layer, out, lse)` between computing and checking.
  template <class Spoil>
  RowCheck replay(std::int64_t rows, const Spoil& spoil) {
    SchedulerTotals totals;
    {
      Scheduler rehearsal(trace_, options_);
      ScheduledStep step;
      while (rehearsal.next(step)) rehearsal.finish(step);
      totals = rehearsal.totals();
    }
    RowCheck check(rows, totals, kLayers, params_, output_tolerance(DType::kFloat32), options_.seed);
    const TokenData data(options_.seed, params_);
    Scheduler scheduler(trace_, options_);
    ScheduledStep step;
    while (scheduler.next(step)) {
      std::vector<RowSpan> prefill;
      for (const PrefillChunk& chunk : step.prefill) prefill.push_back({chunk.request, chunk.start, chunk.count});
      std::vector<RowSpan> decode;
      for (const std::int32_t r : step.decode) {
        decode.push_back({r, scheduler.state(r).kv_len - step.window, step.window});
      }
      for (std::int32_t layer = 0; layer < kLayers; ++layer) {
        compute(Work::kPrefill, scheduler, data, check, step.index, layer, prefill, spoil);
        compute(Work::kDecode, scheduler, data, check, step.index, layer, decode, spoil);
      }
      scheduler.finish(step);
    }
    return check;
  }

  std::vector<TraceRequest> trace_{{0, 50, 9, {}}, {0, 70, 5, {}}, {0, 33, 1, {}}};
  SchedulerOptions options_;
  AttentionParams params_;

 private:
  template <class Spoil>
  void compute(Work work, const Scheduler& scheduler, const TokenData& data, RowCheck& check, std::int64_t step,
               std::int32_t layer, const std::vector<RowSpan>& spans, const Spoil& spoil) {
    std::vector<std::int32_t> qo_indptr{0};
    std::vector<std::int32_t> kv_indptr{0};
    for (const RowSpan& span : spans) {
      qo_indptr.push_back(qo_indptr.back() + span.count);
      kv_indptr.push_back(kv_indptr.back() + span.start + span.count);
    }
    const std::int32_t rows = qo_indptr.back();
    if (rows == 0) return;
    const OwnedTensor q(DType::kFloat32, rows, 4, 16);
    const OwnedTensor out(DType::kFloat32, rows, 4, 16);
    const OwnedTensor k(DType::kFloat32, kv_indptr.back(), 2, 16);
    const OwnedTensor v(DType::kFloat32, kv_indptr.back(), 2, 16);
    std::vector<float> lse(static_cast<std::size_t>(rows) * 4);
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const RowSpan& span = spans[i];
      data.write_q(scheduler, span.request, span.start, span.count, layer, q.view, qo_indptr[i]);
      data.write_kv(scheduler, span.request, 0, span.start + span.count, layer, k.view, v.view, kv_indptr[i]);
    }
    const RaggedKv ragged{k.view, v.view, kv_indptr};
    ReferenceCall call;
    call.q = q.view;
    call.qo_indptr = qo_indptr;
    call.ragged = &ragged;
    call.params = params_;
    std::vector<double> expected(16);
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int32_t head = 0; head < 4; ++head) {
        lse[row * 4 + head] = static_cast<float>(reference_row(call, row, head, expected));
        for (std::int32_t d = 0; d < 16; ++d) {
          out.memory.as<float>()[(row * 4 + head) * 16 + d] = static_cast<float>(expected[d]);
        }
      }
    }
    spoil(work, step, layer, out.view, lse.data());
    check.check(work, scheduler, data, step, layer, spans, q.view, out.view, lse.data());
  }
};

constexpr auto kUntouched = [](Work, std::int64_t, std::int32_t, const Tensor&, float*) {};

TEST_F(RowChecks, RightRowsPassAndTheNumberIsKept) {
  for (const std::int64_t rows : {1, 2, 7, 40}) {
    const RowCheck check = replay(rows, kUntouched);
    EXPECT_EQ(check.checked_rows(), rows);
    EXPECT_TRUE(check.ok()) << check.first_failure();
    EXPECT_GT(check.out_errors().compared(), 0);
  }
}

TEST_F(RowChecks, AskingForTooManyChecksAll) {
  const RowCheck check = replay(1'000'000, kUntouched);
  EXPECT_TRUE(check.ok()) << check.first_failure();
  // every prompt token and every decoded window, in each layer
  EXPECT_GE(check.checked_rows(), (50 + 70 + 33) * kLayers);
  EXPECT_EQ(check.out_errors().compared(), check.checked_rows() * 4 * 16);
  EXPECT_EQ(check.lse_errors().compared(), check.checked_rows() * 4);
}

TEST_F(RowChecks, OneWrongValueIsFoundAndPlaced) {
  const RowCheck check =
      replay(1'000'000, [](Work work, std::int64_t step, std::int32_t layer, const Tensor& out, float*) {
        if (work == Work::kPrefill && step == 1 && layer == 1) static_cast<float*>(out.data)[16] += 0.01F;
      });
  EXPECT_EQ(check.out_errors().failures(), 1);
  EXPECT_EQ(check.lse_errors().failures(), 0);
  EXPECT_NE(check.first_failure().find("prefill step 1, layer 1, request 0, position 24, head 1"), std::string::npos)
      << check.first_failure();
}

TEST_F(RowChecks, NanAndWrongLseAreFound) {
  const RowCheck check =
      replay(1'000'000, [](Work work, std::int64_t, std::int32_t layer, const Tensor& out, float* lse) {
        if (work != Work::kDecode) return;
        if (layer == 0) lse[0] *= 1.4427F;  // base 2
        if (layer == 1) static_cast<float*>(out.data)[0] = std::numeric_limits<float>::quiet_NaN();
      });
  EXPECT_GT(check.out_errors().failures(), 0);
  EXPECT_GT(check.lse_errors().failures(), 0);
  EXPECT_FALSE(check.ok());
}

TEST(TokenValues, AreExactInEveryElementType) {
  const std::vector<TraceRequest> trace = {{0, 40, 2, {}}};
  SchedulerOptions options;
  Scheduler scheduler(trace, options);
  ScheduledStep step;
  ASSERT_TRUE(scheduler.next(step));
  AttentionParams params;
  params.num_qo_heads = 4;
  params.num_kv_heads = 2;
  params.head_dim_qk = 72;
  const TokenData data(3, params);
  const OwnedTensor exact_q(DType::kFloat32, 40, 4, 72);
  const OwnedTensor exact_k(DType::kFloat32, 40, 2, 72);
  const OwnedTensor exact_v(DType::kFloat32, 40, 2, 72);
  data.write_q(scheduler, 0, 0, 40, 1, exact_q.view, 0);
  data.write_kv(scheduler, 0, 0, 40, 1, exact_k.view, exact_v.view, 0);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const OwnedTensor q(dtype, 40, 4, 72);
    const OwnedTensor k(dtype, 40, 2, 72);
    const OwnedTensor v(dtype, 40, 2, 72);
    data.write_q(scheduler, 0, 0, 40, 1, q.view, 0);
    data.write_kv(scheduler, 0, 0, 40, 1, k.view, v.view, 0);
    for (std::int64_t i = 0; i < 40 * 4 * 72; ++i) {
      ASSERT_EQ(load_float(q.view.data, dtype, i), exact_q.memory.as<float>()[i]);
    }
    for (std::int64_t i = 0; i < 40 * 2 * 72; ++i) {
      ASSERT_EQ(load_float(k.view.data, dtype, i), exact_k.memory.as<float>()[i]);
      ASSERT_EQ(load_float(v.view.data, dtype, i), exact_v.memory.as<float>()[i]);
    }
  }
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (std::int64_t i = 0; i < 40 * 2 * 72; ++i) {
      const float value = exact_v.memory.as<float>()[i];
      std::uint32_t code = 0;  // room for any element type
      store_float(&code, dtype, 0, value / kReplayFp8Scale);
      ASSERT_EQ(load_float(&code, dtype, 0) * kReplayFp8Scale, value);
    }
  }
}

}  // namespace
}  // namespace fiw::cli
