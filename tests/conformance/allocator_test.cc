// Memory from the caller's allocator: all of it comes from there and goes back, and running out at any point is an
// error that leaks nothing and leaves the workspace usable.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <vector>

#include "conformance/bad_call.h"
#include "support/device_buffer.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

/// Counts, and refuses or misplaces one allocation.
class Pool {
 public:
  explicit Pool(int device) : device_(device) {}

  Allocator allocator() {
    return {.allocate = [](void* self, std::size_t bytes, std::size_t alignment,
                           Stream) { return static_cast<Pool*>(self)->allocate(bytes, alignment); },
            .free = [](void* self, void* memory, std::size_t bytes,
                       Stream) { static_cast<Pool*>(self)->release(memory, bytes); },
            .context = this};
  }
  /// The allocation with this number, counted from 0 from now on, fails or lies between two multiples of its alignment.
  void refuse(int number) { refused_ = allocations_ + number; }
  void misplace(int number) { misplaced_ = allocations_ + number; }
  int allocations() const { return allocations_; }
  std::size_t live() const { return blocks_.size(); }
  bool wrongly_freed() const { return wrongly_freed_; }

 private:
  struct Block {
    DeviceBuffer memory;
    std::size_t bytes;
  };

  void* allocate(std::size_t bytes, std::size_t alignment) {
    EXPECT_GT(bytes, 0U);
    const int number = allocations_++;
    if (number == refused_) return nullptr;
    DeviceBuffer memory(device_, bytes + 2 * alignment);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    const std::size_t offset = (address + alignment - 1) / alignment * alignment - address;
    std::byte* const place = memory.data() + offset + (number == misplaced_ ? alignment / 2 : 0);
    blocks_.emplace(place, Block{std::move(memory), bytes});
    return place;
  }

  void release(void* memory, std::size_t bytes) {
    synchronize(device_);
    const auto block = blocks_.find(memory);
    if (block == blocks_.end() || block->second.bytes != bytes) {
      wrongly_freed_ = true;
      return;
    }
    blocks_.erase(block);
  }

  int device_;
  std::map<void*, Block> blocks_;
  int allocations_ = 0;
  int refused_ = -1;
  int misplaced_ = -1;
  bool wrongly_freed_ = false;
};

class Allocators : public testing::TestWithParam<int>, public Seeded {
 protected:
  /// Small scratch to begin with, so that it grows.
  std::unique_ptr<FlashInferWorkspace> make(Pool& pool) {
    return make_workspace(GetParam(), {.workspace_bytes = 64, .num_threads = 2, .allocator = pool.allocator()});
  }
  std::vector<Problem> problems() {
    std::vector<Problem> problems;
    for (const Op op : {Op::kDecode, Op::kPrefill, Op::kRagged, Op::kVerify}) {
      const std::int32_t qo_len = op == Op::kDecode ? 1 : 3;
      problems.emplace_back(
          GetParam(),
          Case{.op = op,
               .params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128},
               .spacing = op == Op::kPrefill ? Spacing::kStrided : Spacing::kContiguous,  // CUDA then copies tensors
               .qo_lens = {qo_len, qo_len},
               .kv_lens = {6000, 5}},
          rng_);
    }
    return problems;
  }
};

TEST_P(Allocators, RunningOutAnywhereLeaksNothing) {
  std::vector<Problem> all = problems();
  int points = 0;
  for (bool ran_out = true; ran_out; ++points) {
    Pool pool(GetParam());
    pool.refuse(points);
    ran_out = false;
    {
      std::unique_ptr<FlashInferWorkspace> workspace;
      const auto attempt = [&](auto&& call) {
        try {
          call();
          return true;
        } catch (const Error& error) {
          EXPECT_EQ(error.status(), Status::kOutOfMemory) << error.what();
          EXPECT_EQ(error.reason(), Reason::kAllocation) << error.what();
          EXPECT_GT(error.bytes_required(), 0U) << error.what();
          ran_out = true;
          return false;
        }
      };
      if (!attempt([&] { workspace = make(pool); })) {
        EXPECT_EQ(pool.live(), 0U);
        workspace = make(pool);
      }
      for (Problem& problem : all) {
        if (!attempt([&] { problem.call(*workspace); })) problem.call(*workspace);
        ASSERT_TRUE(problem.check()) << "after allocation " << points << " was refused";
      }
      EXPECT_GT(pool.live(), 0U);
    }
    EXPECT_EQ(pool.live(), 0U) << "after allocation " << points << " was refused";
    EXPECT_FALSE(pool.wrongly_freed());
    EXPECT_EQ(ran_out, pool.allocations() > points);
  }
  EXPECT_GT(points, 2);
}

TEST_P(Allocators, MisplacedMemoryIsRefusedAndGoesBack) {
  Pool pool(GetParam());
  pool.misplace(0);
  expect_error("memory between two multiples of the alignment",
               {Reason::kOptions, {"allocator.allocate gave 0x", "for 64 bytes", "expected a multiple of"}},
               [&] { make(pool); });
  EXPECT_EQ(pool.live(), 0U);

  const auto workspace = make(pool);
  std::vector<Problem> all = problems();
  Problem& problem = all.front();
  pool.misplace(0);
  expect_error("the same later", {Reason::kOptions, {"allocator.allocate gave 0x"}}, [&] { problem.call(*workspace); });
  problem.call(*workspace);
  EXPECT_TRUE(problem.check());
}

TEST_P(Allocators, AStepKeepsItsMemoryBeyondTheWorkspace) {
  Pool pool(GetParam());
  auto workspace = make(pool);
  std::vector<Problem> all = problems();
  {
    const AttentionStep step = all.front().plan(*workspace);
    workspace.reset();
    EXPECT_GT(pool.live(), 0U);
  }
  EXPECT_EQ(pool.live(), 0U);
  EXPECT_FALSE(pool.wrongly_freed());
}

INSTANTIATE_TEST_SUITE_P(Backends, Allocators, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
