// A thousand random operations through one workspace: layers of several models, growing requests, invalidations.
// Whatever came before, each result is its own reference's.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "property/random_case.h"

namespace fiw::test {
namespace {

class Interleaved : public testing::TestWithParam<int>, public Seeded {
 protected:
  std::unique_ptr<Problem> random_problem() {
    Case c = small_random_case(random_op(rng_), rng_);
    c.spare_pages = 60;
    return std::make_unique<Problem>(GetParam(), c, rng_);
  }

  /// Look-ups so far in the scope of each call.
  std::uint64_t& lookups(Op op) {
    return op == Op::kDecode ? decode_lookups_ : op == Op::kVerify ? verify_lookups_ : prefill_lookups_;
  }

  static void expect_counts(const CacheStats& stats, std::uint64_t lookups, std::uint64_t capacity) {
    EXPECT_EQ(stats.hits + stats.misses, lookups);
    EXPECT_EQ(stats.misses, stats.entries + stats.evictions + stats.invalidations);
    EXPECT_LE(stats.entries, capacity);
    EXPECT_EQ(stats.bytes == 0, stats.entries == 0);
  }

  std::uint64_t decode_lookups_ = 0;
  std::uint64_t prefill_lookups_ = 0;
  std::uint64_t verify_lookups_ = 0;
};

TEST_P(Interleaved, AThousandOperations) {
  constexpr std::int32_t kEntries = 3;  // fewer than there are problems, so that plans are evicted too
  const auto workspace = make_workspace(GetParam(), {.workspace_bytes = 64, .cache_entries = kEntries});
  std::vector<std::unique_ptr<Problem>> problems;
  for (int i = 0; i < 12; ++i) problems.push_back(random_problem());

  for (int operation = 0; operation < 1000; ++operation) {
    std::unique_ptr<Problem>& problem = problems[static_cast<std::size_t>(rng_.uniform(0, 11))];
    const Op op = problem->description().op;
    const std::int32_t choice = rng_.uniform(0, 99);
    if (choice < 5) {
      workspace->invalidate_runtime_cache();
    } else if (choice < 8) {
      workspace->invalidate_prefill_runtime_cache();
    } else if (choice < 11) {
      workspace->invalidate_verify_runtime_cache();
    } else if (choice < 20) {
      problem = random_problem();
    } else if (choice < 40 && op != Op::kRagged) {
      if (problem->grow(*workspace, 3)) {
        ASSERT_TRUE(problem->cache().device_matches_host()) << "operation " << operation;
      } else {
        problem = random_problem();
      }
    } else if (choice < 60 && op != Op::kRagged) {
      const AttentionStep step = problem->plan(*workspace);
      ++lookups(op);
      for (int layer = 0; layer < 2; ++layer) {
        problem->run(step);
        ASSERT_TRUE(problem->check()) << "operation " << operation << ", layer " << layer;
      }
    } else {
      ASSERT_NO_THROW(problem->call(*workspace)) << problem->description();
      ++lookups(op);
      ASSERT_TRUE(problem->check()) << "operation " << operation;
    }
    const WorkspaceStats stats = workspace->stats();
    expect_counts(stats.decode, decode_lookups_, kEntries);
    expect_counts(stats.prefill, prefill_lookups_, kEntries);
    expect_counts(stats.verify, verify_lookups_, kEntries);
    ASSERT_FALSE(HasFailure()) << "operation " << operation;
  }
  EXPECT_GT(workspace->stats().decode.hits, 0U);
}

INSTANTIATE_TEST_SUITE_P(Backends, Interleaved, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
