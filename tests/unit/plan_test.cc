// Schedules for inputs with known answers: grids, scratch sizes, tiles, errors, and that planning allocates nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "fiw/error.h"
#include "plan/planner.h"
#include "support/schedule_view.h"

namespace {

std::atomic<std::int64_t> allocations{0};

void* counted(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace fiw {
namespace {

using test::Planned;

WorkLoad heads(std::int32_t qo, std::int32_t kv, std::int32_t dim = 128) {
  return {.num_qo_heads = qo, .num_kv_heads = kv, .head_dim_qk = dim, .head_dim_vo = dim, .page_size = 16};
}

std::vector<int> to_vector(std::span<const std::int32_t> array) { return {array.begin(), array.end()}; }

template <class Call>
Error error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(Status::kOk, Reason::kNone, "");
}

TEST(Plan, BatchZeroHasNoItems) {
  for (const KernelFamily family : {KernelFamily::kCpuStream, KernelFamily::kCpuTile, KernelFamily::kCudaCore,
                                    KernelFamily::kTensorTile, KernelFamily::kCudaStream}) {
    for (const std::int32_t fixed : {0, 2048}) {
      const Planned plan(family, DeviceProps::h200(), heads(8, 2), {.fixed_chunk_tokens = fixed});
      EXPECT_EQ(plan.shape.items, 0);
      EXPECT_FALSE(plan.shape.split_kv);
      EXPECT_EQ(to_vector(plan.o_indptr()), std::vector<int>{0});
    }
  }
}

TEST(Plan, RequestWithoutPagesIsOneItem) {
  const std::vector<std::int32_t> pages = {0, 7, 0};
  WorkLoad work = heads(8, 2);
  work.kv_pages = pages;
  for (const KernelFamily family :
       {KernelFamily::kCpuStream, KernelFamily::kCudaCore, KernelFamily::kTensorTile, KernelFamily::kCudaStream}) {
    const Planned plan(family, DeviceProps::h200(), work, {});
    EXPECT_EQ(to_vector(plan.requests()), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(to_vector(plan.o_indptr()), (std::vector<int>{0, 1, 2, 3}));
  }
  const std::vector<std::int32_t> nothing(700, 0);
  work.kv_pages = nothing;
  EXPECT_EQ(Planned(KernelFamily::kCudaCore, DeviceProps::h200(), work, {.graph = true}).shape.items, 700);
}

TEST(Plan, RequestWithoutQueriesHasNoItem) {
  const std::vector<std::int32_t> pages = {3, 3, 0};
  const std::vector<std::int32_t> qo_indptr = {0, 0, 5, 9};
  WorkLoad work = heads(8, 8);
  work.kv_pages = pages;
  work.qo_indptr = qo_indptr;
  for (const KernelFamily family :
       {KernelFamily::kCpuStream, KernelFamily::kCpuTile, KernelFamily::kTensorTile, KernelFamily::kCudaStream}) {
    const Planned plan(family, DeviceProps::h200(), work, {});
    EXPECT_EQ(to_vector(plan.requests()), (std::vector<int>{1, 2}));
    EXPECT_EQ(to_vector(plan.o_indptr()), (std::vector<int>{0, 0, 5, 9})) << "rows start where the queries do";
  }
}

TEST(Plan, OneLongRequestAmongShortOnesFillsEveryWorker) {
  std::vector<std::int32_t> pages(61, 4);
  pages[30] = 6250;  // 100,000 tokens
  struct Target {
    KernelFamily family;
    DeviceProps device;
    std::int64_t blocks;
  };
  const DeviceProps h200 = DeviceProps::h200();
  std::vector<Target> targets = {{KernelFamily::kTensorTile, h200, std::int64_t{132} * h200.tile_blocks_per_sm},
                                 {KernelFamily::kCudaCore, h200, std::int64_t{132} * h200.decode_blocks_per_sm}};
  for (const std::int32_t threads : {2, 8, 64}) {
    targets.push_back({KernelFamily::kCpuStream, DeviceProps::cpu(threads), threads});
  }
  for (const Target& target : targets) {
    for (const auto& [qo, kv] : {std::pair{32, 8}, std::pair{8, 1}, std::pair{32, 32}, std::pair{14, 2}}) {
      WorkLoad work = heads(qo, kv);
      work.kv_pages = pages;
      const Planned plan(target.family, target.device, work, {});
      const std::vector<std::int64_t> costs = test::item_costs(plan, work);
      const std::int64_t depth = target.family == KernelFamily::kCpuStream ? 1 : kv;
      EXPECT_EQ(std::accumulate(costs.begin(), costs.end(), std::int64_t{0}), 100'000 + 60 * 64);
      const double ideal = static_cast<double>((100'000 + 60 * 64) * depth) / static_cast<double>(target.blocks);
      EXPECT_LE(static_cast<double>(test::greedy_finish(costs, depth, target.blocks)), 1.5 * ideal)
          << qo << "/" << kv << " heads, " << target.blocks << " blocks";
      // Chunks are whole pages, so a few blocks may be left over.
      EXPECT_GE(static_cast<double>(plan.shape.items * depth), 0.9 * static_cast<double>(target.blocks));
    }
  }
}

TEST(Plan, EvenBatchesStayWhole) {
  WorkLoad work = heads(32, 8);
  const std::vector<std::int32_t> pages(64, 256);
  work.kv_pages = pages;
  for (const KernelFamily family :
       {KernelFamily::kCpuStream, KernelFamily::kCudaCore, KernelFamily::kTensorTile, KernelFamily::kCudaStream}) {
    const DeviceProps device = family == KernelFamily::kCpuStream ? DeviceProps::cpu(2) : DeviceProps::h200();
    const Planned plan(family, device, work, {});
    EXPECT_EQ(plan.shape.items, 64);
    EXPECT_FALSE(plan.shape.split_kv);
    EXPECT_EQ(plan.shape.kv_chunk_tokens, 4096);
    EXPECT_EQ(partial_bytes(plan.shape, 32, 128), 0U);
  }
}

TEST(Plan, ChunksOfTheStreamKernelGrowWithTheRequest) {
  const auto chunk_of = [](std::size_t batch, std::int32_t tokens, std::int32_t qo_heads, std::int32_t kv_heads,
                           std::int32_t element_bytes) {
    const std::vector<std::int32_t> pages(batch, tokens / 16);
    WorkLoad work = heads(qo_heads, kv_heads);
    work.kv_element_bytes = element_bytes;
    work.kv_pages = pages;
    return shape_schedule(KernelFamily::kCudaStream, DeviceProps::h200(), work, {}).kv_chunk_tokens;
  };
  EXPECT_EQ(chunk_of(1, 512, 32, 8, 2), 64);
  EXPECT_EQ(chunk_of(1, 4096, 32, 8, 2), 256) << "one block for each multiprocessor";
  EXPECT_EQ(chunk_of(1, 32768, 32, 8, 2), 1024) << "two blocks for each multiprocessor";
  EXPECT_EQ(chunk_of(1, 32768, 28, 4, 2), 1024) << "one: twice the chunks would take longer to merge than they spare";
  EXPECT_EQ(chunk_of(1, 32768, 8, 1, 2), 512) << "more would take longer to merge than they spare";
  EXPECT_EQ(chunk_of(1, 2048, 8, 1, 1), 128) << "whole steps of the kernel";
  EXPECT_EQ(chunk_of(8, 512, 32, 8, 2), 512) << "too short to be cut";
  EXPECT_EQ(chunk_of(8, 4096, 32, 8, 2), 1024);
}

TEST(Plan, GraphScratchHasNoGroupSizeFactor) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  for (const std::int32_t sms : {132, 144, 108}) {
    DeviceProps device = DeviceProps::h200();
    device.num_workers = sms;
    const std::vector<std::int32_t> one_page(512, 1);
    WorkLoad decode = heads(32, 2, 256);
    decode.kv_pages = one_page;
    const ScheduleShape wide = shape_schedule(KernelFamily::kTensorTile, device, decode, {.graph = true});
    EXPECT_EQ(wide.tile_rows, 16);
    EXPECT_EQ(wide.partial_rows, wide.padded_items) << "one row a tile at group size 16";
    EXPECT_GE(partial_bytes(wide, 32, 256), 16 * kMiB);
    EXPECT_LE(partial_bytes(wide, 32, 256), 36 * kMiB);

    const std::vector<std::int32_t> eight(8, 200);
    WorkLoad verify = heads(64, 8);
    verify.kv_pages = eight;
    verify.uniform_qo_len = 3;
    const ScheduleShape window = shape_schedule(KernelFamily::kTensorTile, device, verify, {.graph = true});
    EXPECT_TRUE(window.split_kv);
    EXPECT_LT(partial_bytes(window, 64, 128), 128 * kMiB);

    for (const auto& [shape, work] : {std::pair{wide, decode}, std::pair{window, verify}}) {
      const ScheduleShape worst =
          worst_shape(KernelFamily::kTensorTile, device, work, work.batch(), 1000, work.total_rows(), {.graph = true});
      EXPECT_EQ(partial_bytes(worst, work.num_qo_heads, work.head_dim_vo),
                partial_bytes(shape, work.num_qo_heads, work.head_dim_vo));
    }
  }
}

TEST(Plan, GraphWithoutSplitStillMasksItsPadding) {
  const std::vector<std::int32_t> pages = {3, 1};
  WorkLoad work = heads(16, 2);
  work.kv_pages = pages;
  const Planned plan(KernelFamily::kTensorTile, DeviceProps::h200(), work,
                     {.allow_split = false, .graph = true, .max_batch = 16});
  EXPECT_FALSE(plan.shape.split_kv);
  EXPECT_EQ(plan.shape.padded_items, 16);
  ASSERT_EQ(plan.mask().size(), 16U);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(plan.mask()[i], std::byte{i < 2}) << i;
  EXPECT_EQ(plan.o_indptr().size(), 17U);
}

TEST(Plan, FixedSplitUnderAGraphMustFitTheGrid) {
  const std::vector<std::int32_t> pages(4, 5000);
  WorkLoad work = heads(8, 8);
  work.kv_pages = pages;
  const Error error = error_of([&] {
    shape_schedule(KernelFamily::kTensorTile, DeviceProps::h200(), work, {.fixed_chunk_tokens = 128, .graph = true});
  });
  EXPECT_EQ(error.reason(), Reason::kOptions);
  EXPECT_NE(std::string(error.what()).find("2500 work items"), std::string::npos) << error.what();
}

TEST(Plan, WindowWithoutCausalIsNotSplitForTheTileKernel) {
  const std::vector<std::int32_t> pages = {256};
  const std::vector<std::int32_t> qo_indptr = {0, 300};
  WorkLoad work = heads(8, 2);
  work.kv_pages = pages;
  work.qo_indptr = qo_indptr;
  work.window_left = 333;
  work.causal = false;
  EXPECT_FALSE(shape_schedule(KernelFamily::kTensorTile, DeviceProps::h200(), work, {}).split_kv);
  EXPECT_TRUE(shape_schedule(KernelFamily::kCpuTile, DeviceProps::cpu(64), work, {}).split_kv);
}

TEST(Plan, WindowReachesFromATilesFirstTokenToItsLast) {
  const std::vector<std::int32_t> lengths = {5000};
  const std::vector<std::int32_t> qo_indptr = {0, 400};
  WorkLoad work = heads(7, 1);
  work.page_size = 1;
  work.window_left = 100;
  work.kv_pages = lengths;
  work.qo_indptr = qo_indptr;
  const auto chunks = [&] {
    return Planned(KernelFamily::kCpuTile, DeviceProps::cpu(2), work, {.fixed_chunk_tokens = 1}).o_indptr()[1] / 400;
  };
  EXPECT_EQ(chunks(), 100 + 42) << "288 rows of 7 heads touch 42 tokens";
  work.num_qo_heads = 5;
  EXPECT_EQ(chunks(), 100 + 59) << "288 rows of 5 heads touch 59 tokens";
  work.causal = false;
  EXPECT_EQ(chunks(), 100 + 400) << "every row reads on to the end";
}

TEST(Plan, TileRowsFollowTheKernels) {
  const std::vector<std::int32_t> pages = {64};
  const auto rows = [&](std::int32_t group, std::int32_t qo_len, std::int32_t qk, std::int32_t vo, DeviceProps device,
                        std::int32_t kv_bytes = 2) {
    WorkLoad work = heads(group, 1);
    work.head_dim_qk = qk;
    work.head_dim_vo = vo;
    work.kv_element_bytes = kv_bytes;
    work.kv_pages = pages;
    work.uniform_qo_len = qo_len;
    return shape_schedule(KernelFamily::kTensorTile, device, work, {}).tile_rows;
  };
  const DeviceProps h200 = DeviceProps::h200();
  EXPECT_EQ(rows(16, 1, 128, 128, h200), 16);
  EXPECT_EQ(rows(16, 2, 128, 128, h200), 64);
  EXPECT_EQ(rows(4, 16, 128, 128, h200), 64);
  EXPECT_EQ(rows(4, 17, 128, 128, h200), 128);
  EXPECT_EQ(rows(4, 17, 256, 256, h200), 64);
  EXPECT_EQ(rows(1, 1, 576, 256, h200), 16);
  EXPECT_EQ(rows(1, 500, 576, 256, h200), 16);
  EXPECT_EQ(rows(1, 32, 512, 512, h200), 16);
  EXPECT_EQ(rows(1, 33, 512, 512, h200), 32);
  DeviceProps turing = h200;
  turing.compute_capability = 75;
  EXPECT_EQ(rows(1, 1, 128, 128, turing), 64);
  DeviceProps small = h200;  // 99 KB a block
  small.compute_capability = 89;
  small.max_shared_bytes = 101376;
  EXPECT_EQ(rows(1, 1, 448, 256, small), 64);
  EXPECT_EQ(rows(1, 1, 448, 256, small, 1), 16);
}

TEST(Plan, VerifyWindowIsUniform) {
  const std::vector<std::int32_t> pages(8, 10);
  const std::vector<std::int32_t> qo_indptr = {0, 3, 6, 9, 12, 15, 18, 21, 24};
  WorkLoad window = heads(64, 8);
  window.kv_pages = pages;
  window.uniform_qo_len = 3;
  WorkLoad ragged = window;
  ragged.qo_indptr = qo_indptr;
  const SplitPolicy graph{.graph = true};
  const ScheduleShape a = shape_schedule(KernelFamily::kTensorTile, DeviceProps::h200(), window, graph);
  const ScheduleShape b = shape_schedule(KernelFamily::kTensorTile, DeviceProps::h200(), ragged, graph);
  EXPECT_EQ(a.tile_rows, 64) << "24 packed rows";
  EXPECT_EQ(b.tile_rows, 128) << "one request might hold all 192 packed rows";
  EXPECT_LT(a.partial_rows, b.partial_rows);

  window.uniform_qo_len = 32;  // 256 packed rows: two tiles, which share the rows of a chunk
  const ScheduleShape two = shape_schedule(KernelFamily::kTensorTile, DeviceProps::h200(), window, graph);
  EXPECT_EQ(two.tile_rows, 128);
  EXPECT_EQ(two.partial_rows, two.padded_items / 2 * 32);
}

// The last page of 2^31 - 1 tokens ends past what 32 bits count, and so does that limit as a chunk, in whole pages.
TEST(Plan, LongestRequestAndLongestChunk) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  WorkLoad work = heads(8, 1);
  for (const std::int32_t page_size : {1, 16, 4096, 1 << 30}) {
    work.page_size = page_size;
    const std::vector<std::int32_t> pages(3, kMost / page_size + (kMost % page_size != 0 ? 1 : 0));
    work.kv_pages = pages;
    for (const KernelFamily family : {KernelFamily::kCpuStream, KernelFamily::kCpuTile, KernelFamily::kTensorTile}) {
      for (const SplitPolicy& policy : {SplitPolicy{.allow_split = false}, SplitPolicy{.fixed_chunk_tokens = kMost}}) {
        const Planned plan(family, DeviceProps::cpu(2), work, policy);
        EXPECT_EQ(plan.shape.items, 3) << "page size " << page_size;
        EXPECT_EQ(plan.shape.kv_chunk_tokens, kMost) << "page size " << page_size;
        EXPECT_EQ(to_vector(plan.requests()), (std::vector{0, 1, 2})) << "page size " << page_size;
      }
    }
  }
}

TEST(Plan, OverflowNamesWhatOverflowed) {
  const std::vector<std::int32_t> pages(4, 2'000'000'000);
  WorkLoad work = heads(8, 1);
  work.page_size = 1;
  work.kv_pages = pages;
  const DeviceProps device = DeviceProps::h200();
  const auto message = [&](const WorkLoad& bad, const SplitPolicy& policy) {
    const Error error = error_of([&] { shape_schedule(KernelFamily::kTensorTile, device, bad, policy); });
    EXPECT_EQ(error.reason(), Reason::kSizeOverflow);
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_EQ(message(work, {.fixed_chunk_tokens = 1}),
            "the number of work items is 8000000000, which does not fit 32 bits");
  work.uniform_qo_len = 1'000'000'000;
  EXPECT_EQ(message(work, {}), "the number of query rows is 4000000000, which does not fit 32 bits");
  work.uniform_qo_len = 1;
  work.page_size = 16;
  EXPECT_NE(message(work, {.allow_split = false}).find("the KV chunk in tokens is 32000000000"), std::string::npos);
  const std::vector<std::int32_t> many(100, 100'000);
  work.kv_pages = many;
  EXPECT_NE(message(work, {.fixed_chunk_tokens = 16}).find("partial outputs are 10000000 rows of 1024 elements"),
            std::string::npos);
}

TEST(Plan, WrongMemoryOrWorkIsRefusedBeforeItIsOverrun) {
  const std::vector<std::int32_t> pages = {2, 3};
  const std::vector<std::int32_t> longer = {2000, 3000};
  WorkLoad work = heads(8, 1);
  work.kv_pages = pages;
  const SplitPolicy policy{.fixed_chunk_tokens = 16};
  const ScheduleShape shape = shape_schedule(KernelFamily::kCudaCore, DeviceProps::h200(), work, policy);
  std::vector<std::byte> memory(shape.bytes);
  EXPECT_EQ(error_of([&] { write_schedule(shape, work, std::span(memory).first(shape.bytes - 1)); }).reason(),
            Reason::kBug);
  work.kv_pages = longer;
  EXPECT_EQ(error_of([&] { write_schedule(shape, work, memory); }).reason(), Reason::kBug);
  work.uniform_qo_len = 2;
  EXPECT_EQ(error_of([&] { shape_schedule(KernelFamily::kCudaCore, DeviceProps::h200(), work, {}); }).reason(),
            Reason::kBug);
}

TEST(Plan, PlanningAllocatesNothing) {
  std::vector<std::int32_t> pages(256, 20);
  pages[7] = 9000;
  std::vector<std::int32_t> qo_indptr(257);
  for (std::size_t r = 0; r < qo_indptr.size(); ++r) qo_indptr[r] = static_cast<std::int32_t>(r * r % 40 + 40 * r);
  WorkLoad work = heads(32, 8);
  work.kv_pages = pages;
  WorkLoad ragged = work;
  ragged.qo_indptr = qo_indptr;
  std::vector<std::byte> memory(1 << 20);
  const std::int64_t before = allocations;
  for (const WorkLoad& load : {work, ragged}) {
    for (const KernelFamily family : {KernelFamily::kCpuTile, KernelFamily::kTensorTile}) {
      for (const SplitPolicy policy :
           {SplitPolicy{}, SplitPolicy{.fixed_chunk_tokens = 512}, SplitPolicy{.graph = true}}) {
        if (policy.graph && family == KernelFamily::kCpuTile) continue;
        const ScheduleShape shape = shape_schedule(family, DeviceProps::h200(), load, policy);
        ASSERT_LE(shape.bytes, memory.size());
        write_schedule(shape, load, memory);
      }
    }
  }
  EXPECT_EQ(allocations, before);
}

TEST(Plan, HopperListsEveryHead) {
  const std::vector<std::int32_t> kv_lens = {300, 0, 128};
  const std::vector<std::int32_t> indptr = {0, 300, 300, 428};
  WorkLoad work = heads(4, 2);
  work.kv_pages = kv_lens;
  work.qo_indptr = indptr;
  const DeviceProps device = DeviceProps::h200();
  const auto shape = [&](KernelFamily family, const SplitPolicy& policy) {
    return shape_hopper(family, hopper_tile_rows(family, device, work, {}), device, work, policy);
  };
  EXPECT_EQ(shape(KernelFamily::kHopper, {}).works, 4 * (3 + 1));
  EXPECT_EQ(shape(KernelFamily::kHopper, {.graph = true, .max_batch = 5}).padded_works, 4 * ((428 + 5 * 127) / 128));
  EXPECT_EQ(error_of([&] { shape(KernelFamily::kHopper, {.graph = true, .max_batch = 2}); }).reason(), Reason::kBatch);
}

TEST(Plan, PrefillPacksHeadsAndMakesLowTilesOfLittleWork) {
  const DeviceProps device = DeviceProps::h200();
  constexpr KernelFamily kFamily = KernelFamily::kPrefill;
  WorkLoad work = heads(32, 8);
  work.page_size = 16;
  std::vector<std::int32_t> kv_pages = {512};
  work.kv_pages = kv_pages;
  work.uniform_qo_len = 8192;
  EXPECT_EQ(hopper_tile_rows(kFamily, device, work, {}), 192);
  EXPECT_EQ(shape_hopper(kFamily, 192, device, work, {}).works, 8 * ((4 * 8192 + 191) / 192));
  kv_pages[0] = 2048;
  work.uniform_qo_len = 512;
  EXPECT_EQ(hopper_tile_rows(kFamily, device, work, {.allow_split = false}), 128)
      << "one round of 128 works, where 88 would leave more idle";
  EXPECT_EQ(hopper_tile_rows(kFamily, device, work, {}), 192) << "two rounds of parts";
  EXPECT_EQ(shape_hopper(kFamily, 128, device, work, {}).works, 8 * (4 * 512 / 128));
  work.head_dim_vo = 64;
  EXPECT_EQ(hopper_tile_rows(kFamily, device, work, {}), 192);
  work.uniform_qo_len = 8192;
  work.head_dim_vo = 256;
  EXPECT_EQ(hopper_tile_rows(kFamily, device, work, {}), 128);
}

TEST(Plan, PrefillCutsKeysWhereTilesAreFew) {
  const DeviceProps device = DeviceProps::h200();
  const std::vector<std::int32_t> kv_pages = {2048};
  WorkLoad work = heads(8, 1);
  work.page_size = 16;
  work.kv_pages = kv_pages;
  work.uniform_qo_len = 512;
  const auto shape = [&](const SplitPolicy& policy) {
    const std::int32_t rows = hopper_tile_rows(KernelFamily::kPrefill, device, work, policy);
    return shape_hopper(KernelFamily::kPrefill, rows, device, work, policy);
  };
  EXPECT_EQ(shape({}).works, 6 * 22);
  EXPECT_EQ(shape({}).slots, 6 * 22);
  for (const SplitPolicy& policy : {SplitPolicy{.allow_split = false}, SplitPolicy{.fixed_chunk_tokens = 4096},
                                    SplitPolicy{.graph = true}, SplitPolicy{.partial_limit = 1000}}) {
    EXPECT_EQ(shape(policy).slots, 0);
  }
  const std::size_t limit = 100 * prefill_slot_bytes(128, 128);
  EXPECT_GT(shape({.partial_limit = limit}).slots, 0);
  EXPECT_LE(shape({.partial_limit = limit}).slots, 100);
  work.num_qo_heads = 32;
  work.num_kv_heads = 8;
  work.uniform_qo_len = 2048;
  EXPECT_EQ(shape({}).whole_tiles, 33) << "two rounds";
  EXPECT_EQ(shape({}).slots, 8 * 10 * 3);
  work.uniform_qo_len = 32768;
  EXPECT_EQ(shape({}).slots, 0);
}

}  // namespace
}  // namespace fiw
