// Hundreds of random problems a call, each against the reference.
#include <gtest/gtest.h>

#include "property/random_case.h"

namespace fiw::test {
namespace {

class RandomAttention : public testing::TestWithParam<int>, public Seeded {
 protected:
  void solve(Op op, int problems) {
    const auto workspace = make_workspace(GetParam());
    for (int i = 0; i < rounds(problems); ++i) {
      Problem problem(GetParam(), random_case(op, rng_), rng_);
      ASSERT_NO_THROW(problem.call(*workspace)) << problem.description();
      ASSERT_TRUE(problem.check()) << "problem " << i;
    }
  }
};

TEST_P(RandomAttention, Decode) { solve(Op::kDecode, 300); }
TEST_P(RandomAttention, Prefill) { solve(Op::kPrefill, 200); }
TEST_P(RandomAttention, Verify) { solve(Op::kVerify, 200); }
TEST_P(RandomAttention, RaggedPrefill) { solve(Op::kRagged, 200); }

INSTANTIATE_TEST_SUITE_P(Backends, RandomAttention, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
