// Workspaces and threads: each workspace may have its own, and a second thread in one is told so and changes nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <memory>
#include <new>
#include <semaphore>
#include <thread>
#include <vector>

#include "property/random_case.h"

namespace fiw::test {
namespace {

class Threads : public testing::TestWithParam<int>, public Seeded {};

TEST_P(Threads, TwoWorkspacesOnTwoThreads) {
  const auto work = [device = GetParam()](std::uint64_t seed) {
    Rng rng(seed);
    const auto workspace = make_workspace(device, {.num_threads = 2, .cache_entries = 2});
    for (int i = 0; i < 60; ++i) {
      Problem problem(device, small_random_case(random_op(rng), rng), rng);
      problem.call(*workspace);
      ASSERT_TRUE(problem.check()) << "problem " << i;
      if (rng.chance(0.2)) workspace->invalidate_runtime_cache();
    }
  };
  std::thread other(work, rng_.next_seed());
  work(rng_.next_seed());
  other.join();
}

TEST_P(Threads, OneTableServesTwoWorkspaces) {
  Case c = small_random_case(Op::kDecode, rng_);
  c.kv_lens = {30, 40};
  c.qo_lens = {1, 1};
  Problem shared(GetParam(), c, rng_);
  const auto read = [&, device = GetParam()] {
    const auto workspace = make_workspace(device);
    for (int i = 0; i < 200; ++i) {
      const PageTable copy = shared.table();
      EXPECT_EQ(workspace->plan_decode(copy, shared.spec()).info().batch, 2);
      PageTable grown = copy;
      grown.advance(0);
      EXPECT_EQ(grown, copy);
    }
  };
  std::thread other(read);
  read();
  other.join();
}

/// Stops the first growth of scratch after arm(), which happens in the middle of a call, until resume().
class StoppingMemory {
 public:
  Allocator allocator() {
    return {.allocate = [](void* self, std::size_t bytes, std::size_t alignment,
                           Stream) { return static_cast<StoppingMemory*>(self)->allocate(bytes, alignment); },
            .free = [](void*, void* memory, std::size_t, Stream) { ::operator delete(memory, kAlignment); },
            .context = this};
  }
  void arm() { armed_ = true; }
  void wait_until_stopped() { stopped_.acquire(); }
  void resume() { resumed_.release(); }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void* allocate(std::size_t bytes, std::size_t alignment) {
    EXPECT_LE(alignment, static_cast<std::size_t>(kAlignment));
    if (armed_.exchange(false)) {
      stopped_.release();
      resumed_.acquire();
    }
    return ::operator new(bytes, kAlignment);
  }

  std::atomic<bool> armed_ = false;
  std::binary_semaphore stopped_{0};
  std::binary_semaphore resumed_{0};
};

/// On the CPU, where the test can lend memory.
class BusyWorkspace : public Threads {};

TEST_P(BusyWorkspace, SecondThreadIsRefusedAndChangesNothing) {
  StoppingMemory memory;
  const auto workspace =
      make_workspace(GetParam(), {.workspace_bytes = 64, .num_threads = 2, .allocator = memory.allocator()});
  Problem first(GetParam(), {.op = Op::kDecode, .qo_lens = {1, 1}, .kv_lens = {6000, 5}}, rng_);
  std::vector<Problem> others;
  for (const Op op : {Op::kDecode, Op::kPrefill, Op::kVerify, Op::kRagged}) {
    others.emplace_back(GetParam(), Case{.op = op, .qo_lens = {1}, .kv_lens = {9}}, rng_);
    others.back().poison_outputs();
  }
  const AttentionStep step = others.front().plan(*workspace);

  memory.arm();
  std::thread caller([&] { first.call(*workspace); });
  memory.wait_until_stopped();
  const auto expect_busy = [](const char* what, auto&& call) {
    try {
      call();
      ADD_FAILURE() << what << " was let in beside another thread's call";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kBusy) << what << ": " << error.what();
      EXPECT_EQ(error.reason(), Reason::kBusyWorkspace) << what;
    }
  };
  for (Problem& problem : others) {
    expect_busy("a call", [&] { problem.call(*workspace); });
    problem.fetch_outputs();
    EXPECT_TRUE(problem.outputs_untouched());
    if (problem.description().op != Op::kRagged) expect_busy("planning", [&] { problem.plan(*workspace); });
  }
  expect_busy("a step", [&] { others.front().run(step); });
  expect_busy("append_kv", [&] { others.front().grow_each(*workspace, 0); });
  expect_busy("read_table", [&] { workspace->read_table({}); });
  expect_busy("invalidate_runtime_cache", [&] { workspace->invalidate_runtime_cache(); });
  expect_busy("invalidate_prefill_runtime_cache", [&] { workspace->invalidate_prefill_runtime_cache(); });
  expect_busy("invalidate_verify_runtime_cache", [&] { workspace->invalidate_verify_runtime_cache(); });
  memory.resume();
  caller.join();

  EXPECT_TRUE(first.check());
  EXPECT_EQ(workspace->stats().decode.invalidations, 0U);
  EXPECT_EQ(workspace->stats().prefill.misses, 0U);
  for (Problem& problem : others) {
    problem.call(*workspace);
    EXPECT_TRUE(problem.check());
  }
}

TEST_P(Threads, FightingOverOneWorkspaceCorruptsNothing) {
  const auto workspace = make_workspace(GetParam(), {.workspace_bytes = 64, .cache_entries = 2});
  std::atomic<int> served = 0;
  std::barrier start(2);
  const auto fight = [&, device = GetParam()](std::uint64_t seed) {
    Rng rng(seed);
    start.arrive_and_wait();
    for (int i = 0; i < 150; ++i) {
      Problem problem(device, small_random_case(random_op(rng), rng), rng);
      try {
        problem.call(*workspace);
      } catch (const Error& error) {
        ASSERT_EQ(error.status(), Status::kBusy) << error.what();
        problem.fetch_outputs();
        ASSERT_TRUE(problem.outputs_untouched());
        continue;
      }
      ASSERT_TRUE(problem.check());
      ++served;
    }
  };
  std::thread other(fight, rng_.next_seed());
  fight(rng_.next_seed());
  other.join();
  EXPECT_GT(served, 0);
  const WorkspaceStats stats = workspace->stats();
  EXPECT_LE(stats.decode.entries, 2U);
  EXPECT_LE(stats.decode.misses + stats.prefill.misses + stats.verify.misses, static_cast<std::uint64_t>(served));
}

INSTANTIATE_TEST_SUITE_P(Backends, Threads, testing::ValuesIn(compiled_devices()), device_test_name);
INSTANTIATE_TEST_SUITE_P(Backends, BusyWorkspace, testing::Values(kCpuDevice), device_test_name);

}  // namespace
}  // namespace fiw::test
