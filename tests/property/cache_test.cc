// What the plan caches promise: each invalidation drops its own scope and nothing else, a hit needs equal contents, and
// no plan disturbs another.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "support/problem.h"

namespace fiw::test {
namespace {

class Caches : public testing::TestWithParam<int>, public Seeded {
 protected:
  static Case simple(Op op, std::vector<std::int32_t> kv_lens = {40, 19}) {
    const std::vector<std::int32_t> qo_lens(kv_lens.size(), op == Op::kDecode ? 1 : 3);
    return {.op = op, .qo_lens = qo_lens, .kv_lens = std::move(kv_lens)};
  }

  Problem make(const Case& c) { return Problem(GetParam(), c, rng_); }
};

TEST_P(Caches, EachInvalidationTouchesItsOwnScope) {
  struct Scope {
    const char* name;
    void (FlashInferWorkspace::*invalidate)();
    bool decode, prefill, verify;  ///< which scopes it drops
  };
  const Scope kScopes[] = {
      {"runtime", &FlashInferWorkspace::invalidate_runtime_cache, true, true, false},
      {"prefill", &FlashInferWorkspace::invalidate_prefill_runtime_cache, false, true, false},
      {"verify", &FlashInferWorkspace::invalidate_verify_runtime_cache, false, false, true},
  };
  for (const Scope& scope : kScopes) {
    SCOPED_TRACE(scope.name);
    const auto workspace = make_workspace(GetParam());
    Problem decode = make(simple(Op::kDecode));
    Problem prefill = make(simple(Op::kPrefill));
    Problem ragged = make(simple(Op::kRagged));
    Problem verify = make(simple(Op::kVerify));
    const auto solve = [&] {
      for (Problem* problem : {&decode, &prefill, &ragged, &verify}) {
        problem->call(*workspace);
        EXPECT_TRUE(problem->check());
      }
    };
    solve();
    const AttentionStep held[] = {decode.plan(*workspace), prefill.plan(*workspace), verify.plan(*workspace)};
    const WorkspaceStats before = workspace->stats();
    EXPECT_EQ(before.decode.entries, 1U);
    EXPECT_EQ(before.prefill.entries, 2U);
    EXPECT_EQ(before.verify.entries, 1U);

    (workspace.get()->*scope.invalidate)();
    const WorkspaceStats after = workspace->stats();
    const auto expect_scope = [](const CacheStats& was, const CacheStats& is, bool dropped) {
      EXPECT_EQ(is.entries, dropped ? 0U : was.entries);
      EXPECT_EQ(is.bytes, dropped ? 0U : was.bytes);
      EXPECT_EQ(is.invalidations, was.invalidations + (dropped ? was.entries : 0U));
      EXPECT_EQ(is.hits, was.hits);
      EXPECT_EQ(is.misses, was.misses);
      EXPECT_EQ(is.evictions, was.evictions);
    };
    expect_scope(before.decode, after.decode, scope.decode);
    expect_scope(before.prefill, after.prefill, scope.prefill);
    expect_scope(before.verify, after.verify, scope.verify);

    // Steps that are held outlive the invalidation.
    decode.run(held[0]);
    EXPECT_TRUE(decode.check());
    prefill.run(held[1]);
    EXPECT_TRUE(prefill.check());
    verify.run(held[2]);
    EXPECT_TRUE(verify.check());

    EXPECT_EQ(decode.plan(*workspace).info().cache_hit, !scope.decode);
    EXPECT_EQ(prefill.plan(*workspace).info().cache_hit, !scope.prefill);
    EXPECT_EQ(verify.plan(*workspace).info().cache_hit, !scope.verify);
    solve();
    // Once more on empty scopes: nothing to drop, nothing changes.
    (workspace.get()->*scope.invalidate)();
    (workspace.get()->*scope.invalidate)();
    solve();
  }
}

TEST_P(Caches, OnePlanServesEveryLayer) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    Problem problem = make(simple(op));
    const auto counters = [&] {
      const WorkspaceStats stats = workspace->stats();
      return op == Op::kDecode ? stats.decode : op == Op::kVerify ? stats.verify : stats.prefill;
    };
    const CacheStats before = counters();
    for (int layer = 0; layer < 10; ++layer) problem.call(*workspace);
    EXPECT_TRUE(problem.check());
    EXPECT_EQ(counters().misses, before.misses + 1) << op;
    EXPECT_EQ(counters().hits, before.hits + 9) << op;
  }
}

/// The same three arrays, at the same addresses, filled anew.
struct ReusedArrays {
  std::vector<std::int32_t> indptr;
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last_page_len;
};

TEST_P(Caches, RebuiltTableAtTheSameAddressIsAMiss) {
  const auto workspace = make_workspace(GetParam());
  // One cache whose 8 pages all hold tokens; tables over it differ in how they share the pages out.
  Case c = simple(Op::kDecode, {64, 64});
  c.spare_pages = 0;
  Problem all = make(c);
  const std::vector<std::int32_t> pages(all.table().indices().begin(), all.table().indices().end());
  ReusedArrays arrays{{0, 2, 4}, {pages.begin(), pages.begin() + 4}, {16, 16}};
  std::optional<PageTable> table;
  const StepSpec spec = all.spec();
  const std::vector<std::int32_t> qo_indptr{0, 3, 6};
  const auto hits = [&] {
    table.emplace(PageTable::from_csr(16, 8, arrays.indptr, arrays.indices, arrays.last_page_len));
    return std::vector<bool>{workspace->plan_decode(*table, spec).info().cache_hit,
                             workspace->plan_prefill(qo_indptr, *table, spec).info().cache_hit,
                             workspace->plan_verify(3, *table, spec).info().cache_hit};
  };
  const std::int32_t* address = arrays.indptr.data();
  EXPECT_EQ(hits(), (std::vector<bool>{false, false, false}));
  EXPECT_EQ(hits(), (std::vector<bool>{true, true, true})) << "equal contents in a new table are a hit";
  arrays.indptr[1] = 1;  // 1 + 3 pages
  EXPECT_EQ(hits(), (std::vector<bool>{false, false, false}));
  arrays.indptr[1] = 3;  // 3 + 1 pages: the same sum
  EXPECT_EQ(hits(), (std::vector<bool>{false, false, false}));
  std::swap(arrays.indices[0], arrays.indices[3]);  // as many pages, other ids: only a gather holds ids
  EXPECT_EQ(hits(), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(address, arrays.indptr.data());
}

TEST_P(Caches, RebuiltTablesGiveTheirOwnResults) {
  const auto workspace = make_workspace(GetParam());
  Case c = simple(Op::kDecode, {64, 64});
  c.spare_pages = 0;
  Problem all = make(c);
  const std::vector<std::int32_t> pages(all.table().indices().begin(), all.table().indices().end());
  for (const std::int32_t first : {2, 1, 3, 4, 0, 2}) {
    // The reference reads the problem's own table, so the problem takes the new one.
    const std::vector<std::int32_t> indptr{0, first, 4};
    const std::vector<std::int32_t> indices(pages.begin() + first, pages.begin() + first + 4);
    const std::vector<std::int32_t> last{first == 0 ? 0 : 16, first == 4 ? 0 : 9};
    all.set_table(PageTable::from_csr(16, 8, indptr, indices, last));
    for (int layer = 0; layer < 2; ++layer) {
      all.call(*workspace);
      EXPECT_TRUE(all.check()) << first << " pages for the first request";
    }
  }
}

TEST_P(Caches, GrowingWithinAPageIsADecodeHit) {
  const auto workspace = make_workspace(GetParam());
  for (const Op op : {Op::kDecode, Op::kVerify}) {
    Problem problem = make(simple(op, {33, 17}));
    EXPECT_FALSE(problem.plan(*workspace).info().cache_hit);
    for (int token = 0; token < 15; ++token) {
      ASSERT_TRUE(problem.grow_each(*workspace, 1));
      EXPECT_TRUE(problem.plan(*workspace).info().cache_hit) << op << " after " << token + 1 << " tokens";
      problem.call(*workspace);
      EXPECT_TRUE(problem.check()) << op << " after " << token + 1 << " tokens";
    }
    ASSERT_TRUE(problem.grow_each(*workspace, 1));  // both requests gain a page
    EXPECT_FALSE(problem.plan(*workspace).info().cache_hit) << op;
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
  }
  // A gather knows lengths, so a prefill plan never survives growth.
  Problem prefill = make(simple(Op::kPrefill, {33, 17}));
  prefill.call(*workspace);
  ASSERT_TRUE(prefill.grow_each(*workspace, 1));
  EXPECT_FALSE(prefill.plan(*workspace).info().cache_hit);
  prefill.call(*workspace);
  EXPECT_TRUE(prefill.check());
}

TEST_P(Caches, PlanningOneKindLeavesTheOthersRight) {
  const auto workspace = make_workspace(GetParam(), {.workspace_bytes = 64, .cache_entries = 2});
  const Op kOps[] = {Op::kDecode, Op::kPrefill, Op::kVerify};
  std::vector<Problem> held;
  std::vector<AttentionStep> steps;
  for (const Op op : kOps) {
    Case c = simple(op, {3000, 19, 0, 700});
    held.push_back(make(c));
    steps.push_back(held.back().plan(*workspace));
  }
  for (int round = 0; round < 6; ++round) {
    for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
      // Other shapes of every kind, enough of them to evict the first plans; the slices must not be handed out again.
      Problem other = make(simple(op, {rng_.uniform(0, 4000), rng_.uniform(0, 50), rng_.uniform(1, 500)}));
      other.call(*workspace);
      EXPECT_TRUE(other.check());
      for (std::size_t i = 0; i < held.size(); ++i) {
        held[i].run(steps[i]);
        ASSERT_TRUE(held[i].check()) << kOps[i] << " after planning " << op << ", round " << round;
      }
    }
  }
}

TEST_P(Caches, LeastRecentlyUsedPlanGoesFirst) {
  const auto workspace = make_workspace(GetParam(), {.cache_entries = 2});
  const Problem a = make(simple(Op::kDecode, {10}));
  const Problem b = make(simple(Op::kDecode, {20}));
  const Problem c = make(simple(Op::kDecode, {40}));
  const auto hit = [&](const Problem& problem) { return problem.plan(*workspace).info().cache_hit; };
  EXPECT_FALSE(hit(a));
  EXPECT_FALSE(hit(b));
  EXPECT_TRUE(hit(a));
  EXPECT_FALSE(hit(c));  // takes b's place
  EXPECT_TRUE(hit(a));
  EXPECT_FALSE(hit(b));
  const CacheStats stats = workspace->stats().decode;
  EXPECT_EQ(stats.evictions, 2U);
  EXPECT_EQ(stats.entries, 2U);
}

TEST_P(Caches, FailedPlanLeavesTheLastGoodOneInForce) {
  const auto workspace = make_workspace(GetParam());
  Problem problem = make(simple(Op::kDecode));
  problem.call(*workspace);
  StepSpec bad = problem.spec();
  bad.params.head_dim_qk = 100;
  EXPECT_THROW(workspace->plan_decode(problem.table(), bad), Error);
  bad = problem.spec();
  bad.q_dtype = DType::kFloat8E5M2;
  EXPECT_THROW(workspace->plan_decode(problem.table(), bad), Error);
  EXPECT_TRUE(problem.plan(*workspace).info().cache_hit);
  problem.call(*workspace);
  EXPECT_TRUE(problem.check());
}

TEST_P(Caches, WorkspacesShareNothing) {
  const auto first = make_workspace(GetParam());
  const auto second = make_workspace(GetParam());
  Problem problem = make(simple(Op::kDecode));
  problem.call(*first);
  EXPECT_EQ(second->stats().decode.misses, 0U);
  EXPECT_FALSE(problem.plan(*second).info().cache_hit);
  first->invalidate_runtime_cache();
  EXPECT_TRUE(problem.plan(*second).info().cache_hit);
  first->close();
  problem.call(*second);
  EXPECT_TRUE(problem.check());
}

INSTANTIATE_TEST_SUITE_P(Backends, Caches, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
