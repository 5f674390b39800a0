// merge_states: attention over disjoint sets of keys becomes attention over their union.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <vector>

#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

class Merge : public testing::TestWithParam<int>, public Seeded {
 protected:
  struct State {
    State(int device, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, Spacing spacing)
        : out(device, dtype, rows, heads, dim, spacing), lse(device, static_cast<std::size_t>(rows * heads)) {}
    TestTensor out;
    Mirror<float> lse;
    PartialState device_view() const { return {.out = out.device(), .lse = lse.device()}; }
  };

  /// Unit-normal states; about one row in five is empty (0, -inf).
  State& add_part(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                  Spacing spacing = Spacing::kContiguous) {
    State& state = parts_.emplace_back(GetParam(), dtype, rows, heads, dim, spacing);
    state.out.fill_normal(rng_);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const bool empty = rng_.chance(0.2);
        state.lse.host()[static_cast<std::size_t>(row * heads + head)] = empty ? kMinusInfinity : 3.0F * rng_.normal();
        for (std::int64_t d = 0; empty && d < dim; ++d) state.out.set(row, head, d, 0.0F);
      }
    }
    state.out.upload();
    state.lse.upload();
    return state;
  }

  /// Merges parts_ into a new state and compares with the weighted sum in float64.
  void expect_right(Spacing spacing = Spacing::kContiguous, bool with_lse = true) {
    const TestTensor& shape = parts_.front().out;
    State merged(GetParam(), shape.dtype(), shape.rows(), shape.heads(), shape.dim(), spacing);
    std::vector<PartialState> views;
    for (const State& part : parts_) views.push_back(part.device_view());
    workspace_->merge_states(views, merged.out.device(), with_lse ? merged.lse.device() : nullptr);
    merged.out.download();
    merged.lse.download();
    compare(merged, with_lse);
    EXPECT_TRUE(merged.out.gaps_untouched());
    parts_.clear();
  }

  void compare(const State& merged, bool with_lse) const {
    const TestTensor& out = merged.out;
    for (std::int64_t row = 0; row < out.rows(); ++row) {
      for (std::int64_t head = 0; head < out.heads(); ++head) {
        const auto i = static_cast<std::size_t>(row * out.heads() + head);
        double largest = -std::numeric_limits<double>::infinity();
        for (const State& part : parts_) largest = std::max(largest, static_cast<double>(part.lse.host()[i]));
        double sum = 0.0;
        std::vector<double> weights;
        for (const State& part : parts_) {
          weights.push_back(std::isinf(largest) ? 0.0 : std::exp(static_cast<double>(part.lse.host()[i]) - largest));
          sum += weights.back();
        }
        for (std::int64_t d = 0; d < out.dim(); ++d) {
          double expected = 0.0;
          for (std::size_t p = 0; p < parts_.size() && sum > 0.0; ++p) {
            expected += weights[p] / sum * static_cast<double>(parts_[p].out.at(row, head, d));
          }
          ASSERT_TRUE(Tolerance::of(out.dtype()).admits(expected, static_cast<double>(out.at(row, head, d))))
              << "row " << row << ", head " << head << ", element " << d << ": expected " << expected << ", got "
              << out.at(row, head, d) << " from " << parts_.size() << " parts of " << to_string(out.dtype());
        }
        if (!with_lse) continue;
        ASSERT_TRUE(
            Tolerance::of_lse(out.dtype()).admits(largest + std::log(sum), static_cast<double>(merged.lse.host()[i])))
            << "row " << row << ", head " << head << ", lse: expected " << largest + std::log(sum) << ", got "
            << merged.lse.host()[i];
      }
    }
  }

  std::deque<State> parts_;
  std::unique_ptr<FlashInferWorkspace> workspace_ = make_workspace(GetParam());
};

TEST_P(Merge, AnyNumberOfPartsInAnyType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int parts : {1, 2, 3, 5, 33}) {
      for (const bool with_lse : {true, false}) {
        for (int i = 0; i < parts; ++i) add_part(dtype, 7, 3, 64);
        expect_right(Spacing::kContiguous, with_lse);
      }
    }
  }
}

TEST_P(Merge, AnyNumberOfHeads) {
  for (const std::int64_t heads : {1, 64, 65, 96, 97, 200}) {
    add_part(DType::kBFloat16, 3, heads, 128);
    add_part(DType::kBFloat16, 3, heads, 128);
    expect_right();
  }
}

TEST_P(Merge, AnyHeadDimAndStride) {
  for (const std::int64_t dim : {8, 24, 72, 80, 256, 576}) {
    add_part(DType::kFloat32, 5, 4, dim, Spacing::kStrided);
    add_part(DType::kFloat32, 5, 4, dim, Spacing::kContiguous);
    add_part(DType::kFloat32, 5, 4, dim, Spacing::kStrided);
    expect_right(Spacing::kStrided);
  }
}

TEST_P(Merge, EmptyStatesCarryNoWeight) {
  State& empty = add_part(DType::kFloat32, 2, 2, 16);
  for (float& lse : empty.lse.host()) lse = kMinusInfinity;
  empty.out.fill_normal(rng_);  // whatever it says
  empty.lse.upload();
  State& other = add_part(DType::kFloat32, 2, 2, 16);
  for (float& lse : other.lse.host()) lse = 1.5F;
  other.lse.upload();
  expect_right();
}

TEST_P(Merge, TwoEmptyStatesGiveAnEmptyState) {
  for (int i = 0; i < 2; ++i) {
    State& part = add_part(DType::kBFloat16, 1, 2, 64);
    for (std::int64_t head = 0; head < 2; ++head) {
      part.lse.host()[static_cast<std::size_t>(head)] = kMinusInfinity;
      for (std::int64_t d = 0; d < 64; ++d) part.out.set(0, head, d, 0.0F);
    }
    part.out.upload();
    part.lse.upload();
  }
  expect_right();
}

TEST_P(Merge, DistantWeights) {
  for (const float distance : {50.0F, 200.0F, 1e5F}) {
    add_part(DType::kFloat32, 2, 1, 8);
    State& heavy = add_part(DType::kFloat32, 2, 1, 8);
    for (float& lse : heavy.lse.host()) lse = distance;
    heavy.lse.upload();
    State& light = add_part(DType::kFloat32, 2, 1, 8);
    for (float& lse : light.lse.host()) lse = -distance;
    light.lse.upload();
    expect_right();
  }
}

TEST_P(Merge, OutMayBeOneOfTheParts) {
  for (const std::size_t target : {0U, 1U, 2U}) {
    for (int i = 0; i < 3; ++i) add_part(DType::kFloat32, 6, 5, 32);
    std::vector<PartialState> views;
    for (const State& part : parts_) views.push_back(part.device_view());
    workspace_->merge_states(views, parts_[target].out.device(), parts_[target].lse.device());
    // The device's copy of that part is the result now, while the host's is still the input.
    State merged(GetParam(), DType::kFloat32, 6, 5, 32, Spacing::kContiguous);
    parts_[target].out.read_device_into(merged.out);
    parts_[target].lse.read(merged.lse.host());
    compare(merged, true);
    parts_.clear();
  }
}

TEST_P(Merge, NoRows) {
  add_part(DType::kBFloat16, 0, 4, 64);
  add_part(DType::kBFloat16, 0, 4, 64);
  expect_right();
}

INSTANTIATE_TEST_SUITE_P(Backends, Merge, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
