// After warm-up, planning and running allocate nothing. This program counts every operator new, in every thread.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

#include "support/problem.h"

namespace {

std::atomic<std::size_t> allocations = 0;

void* count_and_allocate(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  // aligned_alloc wants a multiple of the alignment, and not zero.
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, rounded)) return memory;
  throw std::bad_alloc();
}

/// Not inlined: g++ would see that what `new` gave goes to free, and warn.
[[gnu::noinline]] void give_back(void* memory) { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) { return count_and_allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return count_and_allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { give_back(memory); }

namespace fiw::test {
namespace {

class AllocationFree : public testing::TestWithParam<int>, public Seeded {
 protected:
  static std::size_t allocations_of(const std::function<void()>& work) {
    const std::size_t before = allocations;
    work();
    return allocations - before;
  }

  static Case simple(Op op, std::int32_t first_len) {
    const std::int32_t qo_len = op == Op::kDecode ? 1 : 3;
    return {.op = op, .qo_lens = {qo_len, qo_len, qo_len}, .kv_lens = {first_len, 19, 700}};
  }

  /// The call alone, without the fixture's poisoning.
  static void call(FlashInferWorkspace& workspace, Problem& problem) {
    const Case& c = problem.description();
    const ConstTensor q = problem.q().device();
    const Tensor out = problem.out().device();
    const KvCache kv = problem.cache().device();
    switch (c.op) {
      case Op::kDecode:
        return workspace.decode(q, kv, problem.table(), c.params, out, problem.device_lse());
      case Op::kPrefill:
        return workspace.prefill(q, problem.qo_indptr(), kv, problem.table(), c.params, out, problem.device_lse());
      case Op::kVerify:
        return workspace.verify(q, problem.window(), kv, problem.table(), c.params, out, problem.device_lse());
      case Op::kRagged:
        FAIL() << "not a paged call";
    }
  }
};

TEST_P(AllocationFree, Counter) {
  const auto work = [] {
    int* volatile seen = new int(3);  // else the compiler may leave out the pair
    delete seen;
  };
  EXPECT_EQ(allocations_of(work), 1U) << "the counter must count";
}

TEST_P(AllocationFree, CallsThatHitAndCallsThatMiss) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    const auto workspace = make_workspace(GetParam(), {.cache_entries = 2});
    std::vector<Problem> problems;
    for (const std::int32_t len : {16, 40, 3000, 90, 200}) problems.emplace_back(GetParam(), simple(op, len), rng_);
    const auto miss_all = [&] {
      for (Problem& problem : problems) call(*workspace, problem);
    };
    for (int round = 0; round < 3; ++round) miss_all();
    EXPECT_EQ(allocations_of([&] { call(*workspace, problems.back()); }), 0U) << op << ", hit";
    const auto misses = [&] {
      const WorkspaceStats stats = workspace->stats();
      return stats.decode.misses + stats.prefill.misses + stats.verify.misses;
    };
    const std::uint64_t before = misses();
    EXPECT_EQ(allocations_of(miss_all), 0U) << op << ", planned anew";
    EXPECT_GE(misses(), before + 4) << "five tables in two entries must miss";
    for (Problem& problem : problems) {
      problem.call(*workspace);
      EXPECT_TRUE(problem.check());
    }
  }
}

TEST_P(AllocationFree, StepsAndLayers) {
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify}) {
    const auto workspace = make_workspace(GetParam());
    Problem problem(GetParam(), simple(op, 3000), rng_);
    call(*workspace, problem);
    const StepSpec spec = problem.spec();
    const KvCache kv = problem.cache().device();
    const std::size_t count = allocations_of([&] {
      for (int step = 0; step < 3; ++step) {
        const AttentionStep planned =
            op == Op::kDecode   ? AttentionStep(workspace->plan_decode(problem.table(), spec))
            : op == Op::kVerify ? AttentionStep(workspace->plan_verify(problem.window(), problem.table(), spec))
                                : workspace->plan_prefill(problem.qo_indptr(), problem.table(), spec);
        for (int layer = 0; layer < 4; ++layer) {
          planned.run(problem.q().device(), kv, problem.out().device(), problem.device_lse());
        }
      }
    });
    EXPECT_EQ(count, 0U) << op;
  }
}

TEST_P(AllocationFree, AppendAndMerge) {
  const auto workspace = make_workspace(GetParam());
  Problem problem(GetParam(), simple(Op::kDecode, 40), rng_);
  TestTensor rows(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  rows.fill_normal(rng_);
  const std::vector<std::int32_t> indptr{0, 1, 2, 3};
  const KvCache kv = problem.cache().device();
  const Mirror<float> lse(GetParam(), std::vector<float>(6, 0.5F));
  const std::vector<PartialState> parts(3, {.out = rows.device(), .lse = lse.device()});
  TestTensor merged(GetParam(), DType::kBFloat16, 3, 2, 64, Spacing::kContiguous);
  const auto work = [&] {
    workspace->append_kv(rows.device(), rows.device(), indptr, kv, problem.table());
    workspace->merge_states(parts, merged.device());
  };
  work();
  EXPECT_EQ(allocations_of(work), 0U);
}

INSTANTIATE_TEST_SUITE_P(Backends, AllocationFree, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
