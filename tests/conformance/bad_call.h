// Spoiling one argument of a good call at a time: what must be said, what must be left alone, and what must still work.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/problem.h"

namespace fiw::test {

inline constexpr std::int64_t kAnyIndex = -2;  ///< which request it is depends on the random table

/// What an error must say.
struct Expected {
  Reason reason;
  std::vector<std::string> words;  ///< argument, value, limit
  Status status = Status::kInvalidArgument;
  std::int64_t index = -1;
};

inline void expect_error(const std::string& name, const Expected& expected, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << name << ": accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), expected.status) << name << ": " << error.what();
    EXPECT_EQ(error.reason(), expected.reason) << name << ": " << error.what();
    if (expected.index != kAnyIndex) {
      EXPECT_EQ(error.index(), expected.index) << name << ": " << error.what();
    }
    for (const std::string& word : expected.words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << name << ": \"" << error.what() << "\" does not say \"" << word << '"';
    }
  }
}

/// Counters, sizes and times: everything that a refused call must leave alone.
inline testing::AssertionResult unchanged(const WorkspaceStats& before, const WorkspaceStats& after) {
  std::ostringstream changes;
  const auto compare = [&](const char* name, std::uint64_t was, std::uint64_t is) {
    if (was != is) changes << ' ' << name << ": " << was << " -> " << is << ';';
  };
  const auto compare_cache = [&](const std::string& name, const CacheStats& was, const CacheStats& is) {
    compare((name + " hits").c_str(), was.hits, is.hits);
    compare((name + " misses").c_str(), was.misses, is.misses);
    compare((name + " evictions").c_str(), was.evictions, is.evictions);
    compare((name + " invalidations").c_str(), was.invalidations, is.invalidations);
    compare((name + " entries").c_str(), was.entries, is.entries);
    compare((name + " bytes").c_str(), was.bytes, is.bytes);
  };
  compare_cache("decode", before.decode, after.decode);
  compare_cache("prefill", before.prefill, after.prefill);
  compare_cache("verify", before.verify, after.verify);
  compare("float scratch", before.float_scratch_bytes, after.float_scratch_bytes);
  compare("float scratch peak", before.float_scratch_peak, after.float_scratch_peak);
  compare("int scratch", before.int_scratch_bytes, after.int_scratch_bytes);
  compare("plan ns", before.plan_nanoseconds, after.plan_nanoseconds);
  compare("run ns", before.run_nanoseconds, after.run_nanoseconds);
  compare("tables known", before.tables_known, after.tables_known);
  compare("tables copied", before.tables_copied, after.tables_copied);
  if (changes.str().empty()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "changed:" << changes.str();
}

/// The arguments of one call, good until spoilt.
struct Arguments {
  ConstTensor q{};
  KvCache kv{};
  ConstTensor k{};
  ConstTensor v{};
  PageTable table{};
  AttentionParams params{};
  Tensor out{};
  float* lse = nullptr;
  AttentionExtras extras{};
  std::int32_t window = 1;
  std::vector<std::int32_t> qo_indptr{};
  std::vector<std::int32_t> kv_indptr{};
};

/// One way to spoil what a call is given.
template <class Given>
struct FaultOf {
  std::string name;
  std::function<void(Given&)> spoil;
  Expected expected;
};
using Fault = FaultOf<Arguments>;

class BadCall : public testing::TestWithParam<int>, public Seeded {
 protected:
  static Case good(Op op) {
    const std::int32_t qo_len = op == Op::kDecode ? 1 : 2;
    return {.op = op,
            .params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64},
            .qo_lens = {qo_len, qo_len},
            .kv_lens = {19, 16}};
  }

  static Arguments arguments(Problem& problem) {
    Arguments a{.q = problem.q().device(),
                .table = problem.table(),
                .params = problem.description().params,
                .out = problem.out().device(),
                .lse = problem.device_lse(),
                .extras = problem.device_extras(),
                .window = problem.window()};
    a.qo_indptr.assign(problem.qo_indptr().begin(), problem.qo_indptr().end());
    a.kv_indptr.assign(problem.kv_indptr().begin(), problem.kv_indptr().end());
    if (problem.description().op == Op::kRagged) {
      a.k = problem.ragged_k().device();
      a.v = problem.ragged_v().device();
    } else {
      a.kv = problem.cache().device();
    }
    return a;
  }

  void call(Op op, const Arguments& a) {
    switch (op) {
      case Op::kDecode:
        return workspace_->decode(a.q, a.kv, a.table, a.params, a.out, a.lse, a.extras);
      case Op::kPrefill:
        return workspace_->prefill(a.q, a.qo_indptr, a.kv, a.table, a.params, a.out, a.lse, a.extras);
      case Op::kVerify:
        return workspace_->verify(a.q, a.window, a.kv, a.table, a.params, a.out, a.lse, a.extras);
      case Op::kRagged:
        return workspace_->ragged_prefill(a.q, a.qo_indptr, a.k, a.v, a.kv_indptr, a.params, a.out, a.lse, a.extras);
    }
  }

  /// Each fault by itself is refused, leaves the output and the workspace alone, and does not spoil the good call that
  /// follows.
  void expect_refused(const Case& c, const std::vector<Fault>& faults) {
    Problem problem(GetParam(), c, rng_);
    for (const Fault& fault : faults) {
      problem.poison_outputs();
      Arguments spoilt = arguments(problem);
      fault.spoil(spoilt);
      std::ostringstream name;
      name << c.op << " with " << fault.name;
      const WorkspaceStats before = workspace_->stats();
      expect_error(name.str(), fault.expected, [&] { call(c.op, spoilt); });
      EXPECT_TRUE(unchanged(before, workspace_->stats())) << name.str();
      problem.fetch_outputs();
      EXPECT_TRUE(problem.outputs_untouched()) << name.str();
      ASSERT_NO_THROW(problem.call(*workspace_)) << "after " << name.str();
      EXPECT_TRUE(problem.check()) << "after " << name.str();
    }
  }

  std::unique_ptr<FlashInferWorkspace> workspace_ = make_workspace(GetParam());
};

}  // namespace fiw::test
