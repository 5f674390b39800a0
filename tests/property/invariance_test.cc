// The batch-invariant option: a request's result is the same, bit for bit, alone or in any batch, on one thread or two.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "property/random_case.h"

namespace fiw::test {
namespace {

class BatchInvariance : public testing::TestWithParam<std::tuple<int, Op>>, public Seeded {
 protected:
  int device() const { return std::get<0>(GetParam()); }
  Op op() const { return std::get<1>(GetParam()); }

  /// Requests on both sides of the split, with few and many query rows; a handful of them, or so many that a device
  /// finds other ways.
  Case batch_case(bool many_requests) {
    Case c{.op = op(), .kv_lens = {700, 0, 64, 1300, 65, 3, 257}};
    c.params = {.num_qo_heads = 6, .num_kv_heads = 2, .head_dim_qk = 64};
    if (many_requests) {
      c.params.num_qo_heads = 32;
      for (int r = 0; r < 70; ++r) c.kv_lens.push_back(rng_.uniform(0, 200));
    }
    c.params.window_left = rng_.pick({-1, -1, 300});
    c.sinks = rng_.chance(0.5);
    c.q_dtype = rng_.pick({DType::kFloat32, DType::kBFloat16});
    c.kv_dtype = rng_.pick({DType::kFloat32, DType::kBFloat16});
    for (std::size_t r = 0; r < c.kv_lens.size(); ++r) {
      const bool many = op() == Op::kPrefill || op() == Op::kRagged;
      c.qo_lens.push_back(op() == Op::kDecode ? 1 : many ? rng_.pick({1, 2, 40, 130}) : 3);
    }
    return c;
  }

  std::unique_ptr<FlashInferWorkspace> workspace(std::int32_t threads) const {
    return make_workspace(device(),
                          {.num_threads = threads, .plan = {.batch_invariant = true, .fixed_split_tokens = 64}});
  }

  /// Rows first .. last - 1 of a contiguous tensor.
  template <class TensorType>
  static TensorType rows_of(TensorType tensor, std::int32_t first, std::int32_t last) {
    const std::size_t skipped = static_cast<std::size_t>(first * tensor.row_stride) * size_of(tensor.dtype);
    using Byte = std::conditional_t<std::is_same_v<TensorType, Tensor>, std::byte, const std::byte>;
    tensor.data = static_cast<Byte*>(tensor.data) + skipped;
    tensor.rows = last - first;
    return tensor;
  }

  /// Requests [first, last) of the problem as a batch of their own, into `out` and `lse` of the whole problem's size.
  static void solve_part(FlashInferWorkspace& workspace, Problem& problem, std::size_t first, std::size_t last,
                         TestTensor& out, Mirror<float>& lse) {
    const Case& c = problem.description();
    const auto part = [&](std::span<const std::int32_t> indptr) {
      std::vector<std::int32_t> own(indptr.begin() + static_cast<std::ptrdiff_t>(first),
                                    indptr.begin() + static_cast<std::ptrdiff_t>(last) + 1);
      for (std::int32_t& entry : own) entry -= indptr[first];
      return own;
    };
    const std::int32_t row = problem.qo_indptr()[first];
    const std::int32_t end = problem.qo_indptr()[last];
    const ConstTensor q = rows_of(problem.q().device(), row, end);
    const Tensor part_out = rows_of(out.device(), row, end);
    float* part_lse = lse.device() + std::int64_t{row} * c.params.num_qo_heads;
    const AttentionExtras extras = problem.device_extras();
    const std::vector<std::int32_t> qo_indptr = part(problem.qo_indptr());
    if (c.op == Op::kRagged) {
      const std::int32_t key = problem.kv_indptr()[first];
      const std::int32_t key_end = problem.kv_indptr()[last];
      workspace.ragged_prefill(q, qo_indptr, rows_of(problem.ragged_k().device(), key, key_end),
                               rows_of(problem.ragged_v().device(), key, key_end), part(problem.kv_indptr()), c.params,
                               part_out, part_lse, extras);
      return;
    }
    const PageTable& all = problem.table();
    const auto entry = static_cast<std::size_t>(all.indptr()[first]);
    const auto entries = static_cast<std::size_t>(all.indptr()[last]) - entry;
    const PageTable table =
        PageTable::from_csr(all.page_size(), all.num_pages(), part(all.indptr()), all.indices().subspan(entry, entries),
                            all.last_page_len().subspan(first, last - first));
    const KvCache kv = problem.cache().device();
    if (c.op == Op::kDecode) workspace.decode(q, kv, table, c.params, part_out, part_lse, extras);
    if (c.op == Op::kPrefill) workspace.prefill(q, qo_indptr, kv, table, c.params, part_out, part_lse, extras);
    if (c.op == Op::kVerify) workspace.verify(q, problem.window(), kv, table, c.params, part_out, part_lse, extras);
  }

  void expect_same_bits(Problem& problem, TestTensor& out, Mirror<float>& lse, const char* what) {
    out.download();
    lse.download();
    for (std::int64_t row = 0; row < out.rows(); ++row) {
      for (std::int64_t head = 0; head < out.heads(); ++head) {
        for (std::int64_t d = 0; d < out.dim(); ++d) {
          const float expected = problem.out().at(row, head, d);
          const float actual = out.at(row, head, d);
          ASSERT_EQ(std::memcmp(&expected, &actual, sizeof(float)), 0)
              << what << ", row " << row << ", head " << head << ", element " << d << ": " << actual << " against "
              << expected << " in " << problem.description();
        }
      }
    }
    ASSERT_EQ(std::memcmp(problem.lse().data(), lse.host().data(), lse.host().size() * sizeof(float)), 0)
        << what << ": lse differs in " << problem.description();
  }
};

TEST_P(BatchInvariance, AloneOrTogetherOnOneThreadOrTwo) {
  const auto one_thread = workspace(1);
  const auto two_threads = workspace(2);
  for (int round = 0; round < 6; ++round) {
    Problem problem(device(), batch_case(op() == Op::kDecode && round == 0), rng_);
    problem.call(*two_threads);
    ASSERT_TRUE(problem.check());
    const std::size_t batch = problem.description().kv_lens.size();
    const auto outputs = [&](FlashInferWorkspace& on, const std::vector<std::size_t>& cuts, const char* what) {
      TestTensor out(device(), problem.description().q_dtype, problem.out().rows(), problem.out().heads(),
                     problem.out().dim(), Spacing::kContiguous);
      Mirror<float> lse(device(), problem.lse().size());
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) solve_part(on, problem, cuts[i], cuts[i + 1], out, lse);
      expect_same_bits(problem, out, lse, what);
    };
    std::vector<std::size_t> each(batch + 1);
    std::iota(each.begin(), each.end(), std::size_t{0});
    outputs(*one_thread, {0, batch}, "together on one thread");
    outputs(*two_threads, each, "alone on two threads");
    outputs(*one_thread, each, "alone on one thread");
    outputs(*two_threads, {0, 2, 5, batch}, "in groups on two threads");
    if (HasFailure()) return;
  }
}

std::string invariance_name(const testing::TestParamInfo<std::tuple<int, Op>>& info) {
  std::ostringstream name;
  name << device_name(std::get<0>(info.param)) << '_' << std::get<1>(info.param);
  return name.str();
}

INSTANTIATE_TEST_SUITE_P(Backends, BatchInvariance,
                         testing::Combine(testing::ValuesIn(compiled_devices()),
                                          testing::Values(Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged)),
                         invariance_name);

}  // namespace
}  // namespace fiw::test
