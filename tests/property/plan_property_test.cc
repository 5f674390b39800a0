// Properties that every schedule must have, over random batches, devices and options.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "fiw/error.h"
#include "plan/chunk.h"
#include "plan/planner.h"
#include "support/random.h"
#include "support/schedule_view.h"

namespace fiw {
namespace {

using test::KeyRange;
using test::Planned;
using test::Rng;

constexpr KernelFamily kFamilies[] = {KernelFamily::kCpuStream, KernelFamily::kCpuTile, KernelFamily::kCudaCore,
                                      KernelFamily::kTensorTile, KernelFamily::kCudaStream};

struct Case {
  KernelFamily family = KernelFamily::kCpuStream;
  DeviceProps device;
  SplitPolicy policy;
  WorkLoad work;
  std::vector<std::int32_t> pages;
  std::vector<std::int32_t> qo_indptr;

  // The spans of `work` point into this object.
  Case() = default;
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  void bind() {
    work.kv_pages = pages;
    work.qo_indptr = qo_indptr;
  }
};

void fill(Case& c, Rng& random) {
  c.family = random.pick(kFamilies);
  const bool cpu = c.family == KernelFamily::kCpuStream || c.family == KernelFamily::kCpuTile;
  c.device = cpu ? DeviceProps::cpu(random.pick({1, 2, 3, 8, 64})) : DeviceProps::h200();
  if (!cpu) c.device.num_workers = random.pick({1, 78, 108, 132, 144});
  c.work.num_kv_heads = random.pick({1, 2, 3, 5, 8, 32});
  c.work.num_qo_heads = c.work.num_kv_heads * random.pick({1, 2, 3, 4, 5, 7, 8, 16, 64});
  if (c.work.num_qo_heads > 64) c.work.num_qo_heads = c.work.num_kv_heads * std::max(64 / c.work.num_kv_heads, 1);
  c.work.head_dim_qk = c.work.head_dim_vo = random.pick({64, 80, 128, 256, 512, 576});
  c.work.page_size = random.pick({1, 3, 16, 64, 128, 129, 256});
  c.work.window_left = random.chance(0.4) ? random.pick({0, 1, 7, 333, 4096, 2147483647}) : -1;
  c.work.causal = random.chance(0.7);
  const std::int32_t batch = random.chance(0.05) ? 0 : random.pick({1, 2, 3, 8, 61, 300});
  const std::int32_t typical = random.pick({1, 40, 300, 5000});
  c.pages.clear();
  c.qo_indptr.clear();
  for (std::int32_t r = 0; r < batch; ++r) {
    std::int32_t tokens = random.chance(0.1) ? 0 : random.uniform(1, typical);
    if (random.chance(0.03)) tokens = 100'000;
    c.pages.push_back((tokens + c.work.page_size - 1) / c.work.page_size);
  }
  if (c.family == KernelFamily::kCudaCore) {
    c.work.uniform_qo_len = 1;
  } else if (random.chance(0.5)) {
    c.work.uniform_qo_len = random.pick({0, 1, 1, 2, 3, 5, c.family == KernelFamily::kCudaStream ? 32 : 64});
  } else {
    const std::int32_t most = c.family == KernelFamily::kCpuStream ? 64
                              : c.family == KernelFamily::kCudaStream
                                  ? kCudaStreamRows
                                  : random.pick({1, 4, 100, batch < 100 ? 1500 : 100});
    c.qo_indptr.push_back(0);
    for (std::int32_t r = 0; r < batch; ++r) c.qo_indptr.push_back(c.qo_indptr.back() + random.uniform(0, most));
    c.work.uniform_qo_len = 0;
  }
  if (c.work.head_dim_vo > 256) c.work.num_qo_heads = c.work.num_kv_heads = 3;
  c.policy = {};
  c.policy.allow_split = random.chance(0.9);
  if (random.chance(0.3)) c.policy.fixed_chunk_tokens = random.pick({16, 100, 2048, 1 << 20});
  if (c.policy.fixed_chunk_tokens > 0) {
    // Small chunks of long requests with many heads overflow, which is an error of its own (see the unit tests).
    c.work.num_qo_heads = c.work.num_kv_heads = 2;
    c.work.head_dim_vo = std::min(c.work.head_dim_vo, 128);
    const std::int32_t most = 2000 / c.work.page_size;
    if (c.policy.fixed_chunk_tokens < 2048) {
      for (std::int32_t& pages : c.pages) pages = std::min(pages, most);
    }
  }
  const bool uniform = c.qo_indptr.empty();
  const bool one_tile = c.family == KernelFamily::kCpuStream || c.family == KernelFamily::kCudaStream;
  c.policy.graph = c.policy.fixed_chunk_tokens == 0 && (uniform || !one_tile) && random.chance(0.3);
  if (c.policy.graph && random.chance(0.5)) c.policy.max_batch = batch + random.uniform(0, 20);
  c.bind();
}

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "family " << int{static_cast<std::uint8_t>(c.family)} << " workers " << c.device.num_workers
             << " heads " << c.work.num_qo_heads << "/" << c.work.num_kv_heads << " dim " << c.work.head_dim_qk
             << " page " << c.work.page_size << " window " << c.work.window_left << " causal " << c.work.causal
             << " batch " << c.pages.size() << " uniform " << c.work.uniform_qo_len << " ragged "
             << !c.qo_indptr.empty() << " fixed " << c.policy.fixed_chunk_tokens << " graph " << c.policy.graph
             << " allow " << c.policy.allow_split;
}

// Every (tile, chunk) once, every visible key of every row in exactly one chunk, whatever the last page holds.
void check_coverage(const Case& c, const Planned& plan, Rng& random) {
  const ScheduleShape& shape = plan.shape;
  std::size_t item = 0;
  for (std::int32_t r = 0; r < shape.batch; ++r) {
    const std::int64_t qo_len = c.work.qo_len(r);
    const std::int64_t tiles = shape.tile_rows == 0
                                   ? std::min<std::int64_t>(qo_len, 1)
                                   : (qo_len * c.work.group_size() + shape.tile_rows - 1) / shape.tile_rows;
    const std::size_t begin = item;
    while (item < static_cast<std::size_t>(shape.items) && plan.requests()[item] == r) ++item;
    if (qo_len == 0) {
      ASSERT_EQ(item, begin);
      ASSERT_EQ(plan.o_indptr()[r], plan.o_indptr()[r + 1]);
      continue;
    }
    const std::int64_t partials = plan.o_indptr()[r + 1] - plan.o_indptr()[r];
    ASSERT_EQ(partials % qo_len, 0) << "request " << r;
    const std::int64_t chunks = partials / qo_len;
    ASSERT_GE(chunks, 1);
    ASSERT_TRUE(shape.split_kv || chunks == 1);
    ASSERT_EQ(static_cast<std::int64_t>(item - begin), tiles * chunks) << "request " << r;
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(tiles * chunks));
    for (std::size_t i = begin; i < item; ++i) {
      const std::int32_t tile = plan.qo_tiles()[i];
      const std::int32_t chunk = plan.kv_tiles()[i];
      ASSERT_TRUE(tile >= 0 && tile < tiles && chunk >= 0 && chunk < chunks);
      ASSERT_EQ(seen[static_cast<std::size_t>(tile * chunks + chunk)]++, 0) << "an item appears twice";
      if (c.family == KernelFamily::kCudaCore) {
        ASSERT_EQ(plan.o_indptr()[r] + chunk, static_cast<std::int32_t>(i)) << "this kernel writes partial row = item";
      }
    }
    const std::int32_t pages = c.pages[static_cast<std::size_t>(r)];
    const std::int64_t kv_len =
        pages == 0 ? 0 : (std::int64_t{pages} - 1) * c.work.page_size + random.uniform(1, c.work.page_size);
    if (shape.split_kv && c.family == KernelFamily::kTensorTile) {
      // The kernel derives the chunks of a row by itself and strides the partial rows by them.
      const std::int64_t reach = c.work.window_left >= 0 ? std::int64_t{c.work.window_left} + shape.tile_rows : kv_len;
      const std::int64_t live = std::min(std::max<std::int64_t>(kv_len, 1), std::max<std::int64_t>(reach, 1));
      ASSERT_EQ(chunks, (live + plan.kv_chunk() - 1) / plan.kv_chunk()) << "request " << r << " kv_len " << kv_len;
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const KeyRange walked = test::tile_keys(shape, c.work, qo_len, kv_len, tile);
      std::int64_t reached = walked.begin;
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        const KeyRange keys = test::chunk_keys(plan, walked, chunk);
        if (keys.size() == 0) continue;
        ASSERT_EQ(keys.begin, reached) << "gap or overlap between chunks";
        reached = keys.end;
      }
      const test::TokenRange tokens = test::tile_tokens(shape, c.work, qo_len, tile);
      for (std::int64_t p : {tokens.begin, (tokens.begin + tokens.end) / 2, tokens.end - 1}) {
        if (p >= tokens.end) continue;
        const KeyRange needed = test::visible_keys(c.work, qo_len, kv_len, p);
        if (needed.size() == 0) continue;
        ASSERT_LE(walked.begin, needed.begin) << "request " << r << " row " << p;
        ASSERT_GE(reached, needed.end) << "request " << r << " row " << p << " of " << qo_len << " kv_len " << kv_len;
      }
    }
  }
  ASSERT_EQ(item, static_cast<std::size_t>(shape.items));
}

void check_arrays(const Case& c, const Planned& plan) {
  const ScheduleShape& shape = plan.shape;
  const std::size_t items = static_cast<std::size_t>(shape.padded_items);
  const std::size_t rows = shape.split_kv ? static_cast<std::size_t>(shape.padded_rows) + 1 : 0;
  const std::pair<std::size_t, std::size_t> arrays[] = {
      {shape.request_indices, 4 * items},
      {shape.qo_tile_indices, 4 * items},
      {shape.kv_tile_indices, 4 * items},
      {shape.o_indptr, 4 * (static_cast<std::size_t>(shape.padded_batch) + 1)},
      {shape.merge_indptr, 4 * rows},
      {shape.kv_chunk_size, 4},
      {shape.total_num_rows, 4},
      {shape.arrivals, 4 * plan.arrivals().size()},
      {shape.block_valid_mask, shape.graph ? items : 0},
      {shape.bytes, 0}};
  std::size_t end = 0;
  for (const auto& [offset, bytes] : arrays) {
    ASSERT_EQ(offset % 16, 0U);
    ASSERT_GE(offset, end) << "arrays overlap";
    end = offset + bytes;
  }
  ASSERT_TRUE(plan.guard_intact());
  ASSERT_EQ(plan.kv_chunk(), shape.kv_chunk_tokens);
  ASSERT_GT(shape.kv_chunk_tokens, 0);
  ASSERT_EQ(shape.kv_chunk_tokens % c.work.page_size, 0);
  ASSERT_EQ(plan.total_num_rows(), shape.total_rows);
  const bool counts = shape.split_kv && shape.family == KernelFamily::kCudaStream;
  const std::int64_t counted = counts ? std::int64_t{shape.padded_batch} * c.work.num_kv_heads : 0;
  ASSERT_GE(std::ssize(plan.arrivals()), counted);
  ASSERT_TRUE(std::ranges::all_of(plan.arrivals(), [](std::int32_t count) { return count == 0; }));
  for (std::int32_t i = shape.items; i < shape.padded_items; ++i) {
    ASSERT_EQ(plan.requests()[i], 0);
    ASSERT_EQ(plan.qo_tiles()[i], 0);
    ASSERT_EQ(plan.kv_tiles()[i], 0);
  }
  for (std::size_t i = 0; i < plan.mask().size(); ++i) {
    ASSERT_EQ(plan.mask()[i], std::byte{i < static_cast<std::size_t>(shape.items)});
  }

  // merge_indptr lists the partial rows of each query row, contiguous and in order; padding has none.
  if (shape.split_kv) {
    std::size_t row = 0;
    for (std::int32_t r = 0; r < shape.batch; ++r) {
      const std::int32_t qo_len = c.work.qo_len(r);
      for (std::int32_t p = 0; p < qo_len; ++p, ++row) {
        const std::int32_t chunks = (plan.o_indptr()[r + 1] - plan.o_indptr()[r]) / qo_len;
        ASSERT_LE(chunks, shape.max_chunks);
        ASSERT_EQ(plan.merge_indptr()[row], plan.o_indptr()[r] + p * chunks);
        ASSERT_EQ(plan.merge_indptr()[row + 1] - plan.merge_indptr()[row], chunks);
      }
    }
    for (; row < plan.merge_indptr().size(); ++row) ASSERT_EQ(plan.merge_indptr()[row], plan.o_indptr().back());
    if (shape.graph) {
      ASSERT_LE(plan.o_indptr().back(), shape.partial_rows);
    } else {
      ASSERT_EQ(plan.o_indptr().back(), shape.partial_rows);
    }
  } else {
    ASSERT_EQ(shape.partial_rows, 0);
    ASSERT_EQ(plan.o_indptr().back(), shape.total_rows);
  }
  for (std::int32_t r = shape.batch; r <= shape.padded_batch; ++r) {
    ASSERT_EQ(plan.o_indptr()[r], plan.o_indptr()[shape.batch]);
  }
}

class PlanProperty : public ::testing::Test, protected test::Seeded {};
class HopperProperty : public ::testing::Test, protected test::Seeded {};

TEST_F(PlanProperty, EveryKeyOnceAndArraysConsistent) {
  for (int trial = 0; trial < 3000; ++trial) {
    Rng& random = rng_;
    Case c;
    fill(c, random);
    SCOPED_TRACE(c);
    const Planned plan(c.family, c.device, c.work, c.policy);
    check_arrays(c, plan);
    check_coverage(c, plan, random);
    const Planned again(c.family, c.device, c.work, c.policy);
    ASSERT_TRUE(std::ranges::equal(plan.bytes(), again.bytes())) << "the same input gave other bytes";
    if (HasFailure()) return;
  }
}

TEST_F(PlanProperty, WorstShapeBoundsEveryShape) {
  double tightest = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    Rng& random = rng_;
    Case c;
    fill(c, random);
    SCOPED_TRACE(c);
    const ScheduleShape shape = shape_schedule(c.family, c.device, c.work, c.policy);
    const std::int32_t max_batch = std::max(static_cast<std::int32_t>(c.pages.size()), c.policy.max_batch);
    std::int32_t max_pages = 1;
    for (const std::int32_t pages : c.pages) max_pages = std::max(max_pages, pages);
    WorkLoad widest = c.work;
    widest.kv_pages = {};
    widest.qo_indptr = {};
    if (!c.qo_indptr.empty()) widest.uniform_qo_len = 0;
    const ScheduleShape worst =
        worst_shape(c.family, c.device, widest, max_batch, max_pages, shape.total_rows, c.policy);
    const auto bytes = [&](const ScheduleShape& s) {
      return partial_bytes(s, c.work.num_qo_heads, c.work.head_dim_vo);
    };
    if (shape.total_rows > 0) {
      ASSERT_GE(bytes(worst), bytes(shape));
      ASSERT_GE(worst.max_qo_len, shape.max_qo_len);
    }
    if (c.policy.graph && shape.total_rows > 0) {
      ASSERT_EQ(bytes(worst), bytes(shape)) << "a graph's bytes are constant";
    }
    if (!c.policy.graph && bytes(worst) > 0) {
      tightest = std::max(tightest, static_cast<double>(bytes(shape)) / static_cast<double>(bytes(worst)));
    }
  }
  EXPECT_GT(tightest, 0.99) << "no random work came near the worst case";
}

TEST_F(PlanProperty, DecodeBatchesAreBalanced) {
  for (int trial = 0; trial < 600; ++trial) {
    Rng& random = rng_;
    Case c;
    c.family = random.pick(kFamilies);
    const bool cpu = c.family == KernelFamily::kCpuStream || c.family == KernelFamily::kCpuTile;
    c.device = cpu ? DeviceProps::cpu(random.pick({2, 8, 64})) : DeviceProps::h200();
    c.work.num_kv_heads = random.pick({1, 2, 4, 5, 8});
    c.work.num_qo_heads = c.work.num_kv_heads * random.pick({1, 4, 8});
    c.work.head_dim_qk = c.work.head_dim_vo = 128;
    c.work.page_size = random.pick({1, 16, 64});
    const std::int32_t batch = random.uniform(1, 200);
    const std::int32_t typical = random.pick({300, 3000, 30000});
    for (std::int32_t r = 0; r < batch; ++r) {
      const std::int32_t tokens = random.chance(0.03) ? 100000 : random.uniform(1, typical);
      c.pages.push_back((tokens + c.work.page_size - 1) / c.work.page_size);
    }
    c.bind();
    SCOPED_TRACE(c);
    const Planned plan(c.family, c.device, c.work, {});
    const std::vector<std::int64_t> costs = test::item_costs(plan, c.work);
    const std::int64_t depth = c.family == KernelFamily::kCpuStream ? 1 : c.work.num_kv_heads;
    const std::int64_t workers =
        std::int64_t{c.device.num_workers} * (c.family == KernelFamily::kCudaCore     ? c.device.decode_blocks_per_sm
                                              : c.family == KernelFamily::kTensorTile ? c.device.tile_blocks_per_sm
                                                                                      : 1);
    const double ideal = static_cast<double>(std::accumulate(costs.begin(), costs.end(), std::int64_t{0}) * depth) /
                         static_cast<double>(workers);
    // A chunk has a least size, and is whole pages.
    const double least = cpu ? 256 : 128;
    double allowed = std::max(1.5 * ideal + c.work.page_size, ideal + least);
    if (c.family == KernelFamily::kCudaStream) {
      // Whole steps of 64 tokens; and what more chunks would gain must be worth what they cost.
      const double longest = c.work.page_size * *std::ranges::max_element(c.pages);
      const double shortest = std::max(std::sqrt(8 * longest) + 32, ideal / 2) + 64;
      allowed = ideal + shortest + 350 + 8 * longest / shortest + 64;
    }
    ASSERT_LE(static_cast<double>(test::greedy_finish(costs, depth, workers)), allowed) << "ideal " << ideal;
  }
}

TEST_F(PlanProperty, GraphGridIsTheSameForEveryTable) {
  for (int trial = 0; trial < 300; ++trial) {
    Rng& random = rng_;
    Case c;
    fill(c, random);
    c.qo_indptr.clear();
    c.work.uniform_qo_len = c.family == KernelFamily::kCudaCore ? 1 : random.uniform(1, 8);
    c.policy = {.graph = true, .max_batch = 300};
    c.bind();
    const ScheduleShape first = shape_schedule(c.family, c.device, c.work, c.policy);
    for (int table = 0; table < 4; ++table) {
      c.pages.assign(static_cast<std::size_t>(random.uniform(0, 300)), 0);
      for (std::int32_t& pages : c.pages) pages = random.uniform(0, random.pick({1, 100, 7000}));
      c.bind();
      SCOPED_TRACE(c);
      const ScheduleShape next = shape_schedule(c.family, c.device, c.work, c.policy);
      ASSERT_EQ(next.padded_items, first.padded_items);
      ASSERT_EQ(next.tile_rows, first.tile_rows);
      ASSERT_EQ(next.split_kv, first.split_kv);
      ASSERT_EQ(next.partial_rows, first.partial_rows);
      ASSERT_EQ(next.bytes, first.bytes);
      ASSERT_EQ(next.block_valid_mask, first.block_valid_mask);
      ASSERT_EQ(next.merge_indptr, first.merge_indptr);
    }
  }
}

TEST_F(PlanProperty, FixedSplitDependsOnNothingButTheRequest) {
  for (int trial = 0; trial < 500; ++trial) {
    Rng& random = rng_;
    Case c;
    fill(c, random);
    c.policy = {.fixed_chunk_tokens = random.pick({64, 500, 2048})};
    // So many partial outputs at most as 32-bit offsets reach: 40 chunks of 61 * 1500 rows of 2 * 576 elements.
    c.work.num_qo_heads = c.work.num_kv_heads = std::min(c.work.num_kv_heads, 2);
    for (std::int32_t& pages : c.pages) pages = std::min(pages, 2500 / c.work.page_size);
    if (c.pages.empty()) continue;
    const std::int32_t r = random.uniform(0, static_cast<std::int32_t>(c.pages.size()) - 1);
    const std::int32_t qo_len = c.work.qo_len(r);
    if (qo_len == 0) continue;
    SCOPED_TRACE(c);
    const Planned batch(c.family, c.device, c.work, c.policy);
    const std::vector<std::int32_t> pages = {c.pages[static_cast<std::size_t>(r)]};
    const std::vector<std::int32_t> qo_indptr = {0, qo_len};
    WorkLoad alone = c.work;
    alone.kv_pages = pages;
    if (!c.qo_indptr.empty()) alone.qo_indptr = qo_indptr;
    DeviceProps other = c.device;
    other.num_workers = random.uniform(1, 200);
    const Planned single(c.family, other, alone, c.policy);
    ASSERT_EQ(single.shape.tile_rows, batch.shape.tile_rows);
    ASSERT_EQ(single.o_indptr()[1], batch.o_indptr()[r + 1] - batch.o_indptr()[r]);
    ASSERT_TRUE(!single.shape.split_kv || single.kv_chunk() == batch.kv_chunk());
  }
}

// --- Hopper
// -------------------------------------------------------------------------------------------------------------

struct HopperCase {
  KernelFamily family;
  DeviceProps device = DeviceProps::h200();
  WorkLoad work;
  std::vector<std::int32_t> kv_lens;
  std::vector<std::int32_t> kv_indptr{0};
  std::vector<std::int32_t> qo_indptr{0};

  HopperCase(Rng& random, std::int32_t batch, std::int32_t most_qo)
      : family(random.pick({KernelFamily::kHopper, KernelFamily::kPrefill})) {
    work.num_kv_heads = random.pick({1, 2, 8});
    work.num_qo_heads = work.num_kv_heads * random.pick({1, 4, 5});
    work.head_dim_qk = work.head_dim_vo = random.pick({64, 96, 128});
    work.causal = random.chance(0.7);
    work.window_left = random.chance(0.2) ? 500 : -1;
    device.num_workers = random.pick({1, 108, 132, 144});
    for (std::int32_t r = 0; r < batch; ++r) {
      const std::int32_t qo_len = random.uniform(0, most_qo);
      kv_lens.push_back(qo_len + random.uniform(0, random.pick({0, 1000, 20000})));
      kv_indptr.push_back(kv_indptr.back() + kv_lens.back());
      qo_indptr.push_back(qo_indptr.back() + qo_len);
    }
    work.kv_pages = kv_lens;
    work.qo_indptr = qo_indptr;
  }
  HopperCase(const HopperCase&) = delete;
  HopperCase& operator=(const HopperCase&) = delete;

  std::int32_t rows_per_token() const { return family == KernelFamily::kPrefill ? work.group_size() : 1; }
  std::int32_t heads() const { return work.num_qo_heads / rows_per_token(); }
  std::int64_t tiles(std::int32_t r, std::int32_t tile_rows) const {
    return (std::int64_t{work.qo_len(r)} * rows_per_token() + tile_rows - 1) / tile_rows;
  }
  std::int64_t cost(std::int32_t r, std::int64_t tile, std::int32_t tile_rows, std::int32_t parts) const {
    const auto tokens = [&](std::int64_t rows) { return (rows + rows_per_token() - 1) / rows_per_token(); };
    std::int64_t end = kv_lens[r];
    if (work.causal) {
      end = std::clamp<std::int64_t>(end - work.qo_len(r) + tokens((tile + 1) * tile_rows), 0, end);
    }
    if (work.window_left >= 0) end = std::min(end, work.window_left + tokens(tile_rows));
    const std::int32_t fixed = family == KernelFamily::kHopper ? 2 * tile_rows : tile_rows == 192 ? 264 : 288;
    return end / parts + fixed + (parts > 1 ? 130 : 0);
  }
};

TEST_F(HopperProperty, EveryTileOfEveryHeadOnceAndBalancedLikeAHeap) {
  double excess = 0;
  int nonempty = 0;
  for (int trial = 0; trial < 300; ++trial) {
    Rng& random = rng_;
    const HopperCase c(random, random.pick({0, 1, 7, 64}), random.pick({1, 300, 3000, 20000}));
    SCOPED_TRACE(::testing::Message() << "heads " << c.work.num_qo_heads << " workers " << c.device.num_workers
                                      << " batch " << c.kv_lens.size());
    const SplitPolicy policy{.graph = random.chance(0.3)};
    std::vector<std::byte> scratch;
    const std::int32_t tile_rows = hopper_tile_rows(c.family, c.device, c.work, policy);
    const HopperShape shape = shape_hopper(c.family, tile_rows, c.device, c.work, policy);
    std::vector<std::int32_t> memory(shape.bytes / 4 + 4, Planned::kPoison);
    const auto out = std::as_writable_bytes(std::span(memory)).first(shape.bytes);
    write_hopper(c.family, tile_rows, shape, c.device, c.work, c.kv_indptr, c.kv_lens, scratch, out);
    for (std::size_t i = shape.bytes / 4; i < memory.size(); ++i) ASSERT_EQ(memory[i], Planned::kPoison);
    std::vector<std::int32_t> again(memory.size(), 17);
    write_hopper(c.family, tile_rows, shape, c.device, c.work, c.kv_indptr, c.kv_lens, scratch,
                 std::as_writable_bytes(std::span(again)).first(shape.bytes));
    ASSERT_TRUE(
        std::equal(again.begin(), again.begin() + static_cast<std::ptrdiff_t>(shape.bytes / 4), memory.begin()));

    const auto array = [&](std::size_t offset) { return memory.data() + offset / 4; };
    const std::int32_t* indptr = array(shape.work_indptr);
    ASSERT_EQ(indptr[0], 0);
    ASSERT_EQ(indptr[c.device.num_workers], shape.works);
    ASSERT_LE(shape.works, shape.padded_works);
    const std::int32_t heads = c.heads();
    std::vector<std::int32_t> first_tile{0};
    std::int32_t all_tiles = 0;
    for (std::size_t r = 0; r < c.kv_lens.size(); ++r) {
      const auto tiles = static_cast<std::int32_t>(c.tiles(static_cast<std::int32_t>(r), tile_rows));
      all_tiles += tiles;
      first_tile.push_back(all_tiles);
    }
    // Of each (tile, head): which parts were seen, of how many, and where their partial results start.
    struct Seen {
      std::vector<std::uint8_t> parts{};
      std::int32_t slot = 0;
    };
    std::vector<Seen> seen(static_cast<std::size_t>(all_tiles) * static_cast<std::size_t>(heads));
    std::vector<std::int64_t> jobs;
    const bool cut = shape.slots > 0;
    ASSERT_TRUE(!cut || (c.family == KernelFamily::kPrefill && !policy.graph));
    std::int64_t finish = 0;
    for (std::int32_t w = 0; w < c.device.num_workers; ++w) {
      ASSERT_LE(indptr[w], indptr[w + 1]);
      std::int64_t load = 0;
      for (std::int32_t i = indptr[w]; i < indptr[w + 1]; ++i) {
        const std::int32_t r = array(shape.batch_indices)[i];
        const std::int32_t tile = array(shape.qo_tile_indices)[i];
        const std::int32_t head = array(shape.head_indices)[i];
        ASSERT_TRUE(r >= 0 && r < static_cast<std::int32_t>(c.kv_lens.size()) && head >= 0 && head < heads);
        ASSERT_TRUE(tile >= 0 && tile < first_tile[r + 1] - first_tile[r]);
        Seen& of = seen[static_cast<std::size_t>(first_tile[r] + tile) * static_cast<std::size_t>(heads) +
                        static_cast<std::size_t>(head)];
        const std::int32_t part = cut ? array(shape.part_indices)[i] : 0;
        const std::int32_t parts = cut ? array(shape.parts)[i] : 1;
        if (of.parts.empty()) {
          of.parts.resize(static_cast<std::size_t>(parts));
          of.slot = cut ? array(shape.slot_indices)[i] : 0;
        }
        ASSERT_EQ(static_cast<std::size_t>(parts), of.parts.size());
        ASSERT_TRUE(part >= 0 && part < parts);
        ASSERT_EQ(of.parts[static_cast<std::size_t>(part)]++, 0);
        if (cut) {
          ASSERT_EQ(array(shape.slot_indices)[i], of.slot);
        }
        ASSERT_EQ(array(shape.qo_indptr)[i], c.qo_indptr[r]);
        ASSERT_EQ(array(shape.kv_indptr)[i], c.kv_indptr[r]);
        ASSERT_EQ(array(shape.qo_len)[i], c.work.qo_len(r));
        ASSERT_EQ(array(shape.kv_len)[i], c.kv_lens[r]);
        jobs.push_back(c.cost(r, tile, tile_rows, parts));
        load += jobs.back();
      }
      finish = std::max(finish, load);
    }
    std::vector<std::uint8_t> slots(static_cast<std::size_t>(shape.slots));
    for (const Seen& of : seen) {
      ASSERT_FALSE(of.parts.empty());
      for (const std::uint8_t times : of.parts) ASSERT_EQ(times, 1);
      if (of.parts.size() == 1) continue;
      for (std::size_t part = 0; part < of.parts.size(); ++part) {
        ASSERT_LT(static_cast<std::size_t>(of.slot) + part, slots.size());
        ASSERT_EQ(slots[static_cast<std::size_t>(of.slot) + part]++, 0);
      }
    }
    for (const std::uint8_t times : slots) ASSERT_EQ(times, 1);
    for (std::int32_t i = 0; i < shape.slots * (tile_rows / 16); ++i) ASSERT_EQ(array(shape.arrivals)[i], 0);
    // The textbook rule: all works by descending cost, each onto the least loaded of all workers. Many short works are
    // given out head by head instead, which may end somewhat later.
    std::sort(jobs.begin(), jobs.end(), std::greater<>());
    const std::int64_t heap = test::greedy_finish(jobs, 1, c.device.num_workers);
    if (heap == 0) continue;
    const double ratio = static_cast<double>(finish) / static_cast<double>(heap);
    ASSERT_LE(ratio, 1.08);
    excess += ratio - 1;
    ++nonempty;
  }
  EXPECT_LE(excess, 0.001 * nonempty);
}

// The search may look at any of the candidates in any order; what it finds must be what trying all of them finds.
TEST_F(PlanProperty, TheChunkIsTheShortestOfAllCandidates) {
  for (int round = 0; round < 2000; ++round) {
    Case c;
    fill(c, rng_);
    c.bind();
    const Tiling tiling(c.family, c.work, choose_tile_rows(c.family, c.device, c.work, c.policy));
    const Tiling::Totals totals = tiling.totals();
    const Grid grid(c.family, c.device, c.work);
    const ChunkRule rule(totals.uncut_items, grid);
    const ChunkLimits limits = chunk_limits(totals.uncut_items, grid);
    const std::int32_t least = rule.least_chunk(totals.longest);
    const auto candidate = [&](std::int32_t n) { return nth_chunk(n, least, totals.longest); };
    const auto shortest = [&](int i) {
      std::int32_t n = 0;
      while (tiling.items(candidate(n)) > limits[static_cast<std::size_t>(i)]) ++n;
      return candidate(n);
    };
    EXPECT_EQ(choose_chunk(tiling, totals, grid),
              choose_chunk(shortest, {.visible_pages = totals.visible_pages, .longest = totals.longest}, least, rule))
        << "round " << round;
  }
}

TEST_F(PlanProperty, CandidatesForChunksAscendInSmallSteps) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(nth_chunk(-100, 7, 1000), 7);
  EXPECT_EQ(nth_chunk(63, 1, kMost), 63);
  for (std::int32_t n = 1; nth_chunk(n, 1, kMost) < kMost; ++n) {
    const std::int64_t chunk = nth_chunk(n, 1, kMost);
    const std::int64_t next = nth_chunk(n + 1, 1, kMost);
    EXPECT_GT(next, chunk);
    EXPECT_LE(next, std::max(chunk + 1, chunk + chunk / 32)) << "after " << chunk;
  }
}

}  // namespace
}  // namespace fiw
