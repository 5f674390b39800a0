// Page tables in device memory: what is read is what lies there, whatever versions are given, and an unchanged table
// keeps its handle.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "conformance/bad_call.h"
#include "support/problem.h"

namespace fiw::test {
namespace {

constexpr std::int32_t kPageSize = 16;
constexpr std::int64_t kPool = 500;
constexpr std::size_t kMostBatch = 12;
constexpr std::size_t kMostPages = 100;

/// Three arrays on the device that keep their addresses, and a model of what they hold.
class DeviceArrays {
 public:
  explicit DeviceArrays(int device)
      : indptr_(device, kMostBatch + 1), indices_(device, kMostPages), last_page_len_(device, kMostBatch) {}

  void write(const PageTable& table) {
    batch_ = static_cast<std::size_t>(table.batch());
    used_ = table.indices().size();
    std::ranges::copy(table.indptr(), indptr_.host().begin());
    std::ranges::fill(indices_.host(), -1);  // what no request uses may hold anything
    std::ranges::copy(table.indices(), indices_.host().begin());
    std::ranges::copy(table.last_page_len(), last_page_len_.host().begin());
    upload();
  }
  void upload() {
    indptr_.upload();
    indices_.upload();
    last_page_len_.upload();
  }

  /// `surplus`: all entries of `indices`, not only those in use.
  DevicePageTable view(std::uint64_t version = 0, bool surplus = false) const {
    return {.page_size = kPageSize,
            .num_pages = kPool,
            .indptr = {indptr_.device(), batch_ + 1},
            .indices = {indices_.device(), surplus ? kMostPages : used_},
            .last_page_len = {last_page_len_.device(), batch_},
            .version = version};
  }
  std::vector<std::int32_t>& indptr() { return indptr_.host(); }
  std::vector<std::int32_t>& indices() { return indices_.host(); }
  std::vector<std::int32_t>& last_page_len() { return last_page_len_.host(); }

 private:
  Mirror<std::int32_t> indptr_;
  Mirror<std::int32_t> indices_;
  Mirror<std::int32_t> last_page_len_;
  std::size_t batch_ = 0;
  std::size_t used_ = 0;
};

/// One shared object behind two handles.
bool same_handle(const PageTable& a, const PageTable& b) { return a.indptr().data() == b.indptr().data(); }

class DeviceTables : public testing::TestWithParam<int>, public Seeded {
 protected:
  PageTable random_table() {
    std::vector<std::vector<std::int32_t>> pages;
    std::vector<std::int32_t> kv_lens;
    for (std::int32_t r = rng_.uniform(0, static_cast<std::int32_t>(kMostBatch)); r > 0; --r) {
      kv_lens.push_back(rng_.uniform(0, 8 * kPageSize));
      pages.emplace_back();
      for (std::int32_t i = 0; i < (kv_lens.back() + kPageSize - 1) / kPageSize; ++i) {
        pages.back().push_back(rng_.uniform(0, kPool - 1));
      }
    }
    return PageTable::from_pages(kPageSize, kPool, pages, kv_lens);
  }

  struct Counts {
    std::uint64_t known;
    std::uint64_t copied;
  };
  Counts counts() const { return {workspace_->stats().tables_known, workspace_->stats().tables_copied}; }
  void expect_counts(Counts expected) const {
    EXPECT_EQ(counts().known, expected.known);
    EXPECT_EQ(counts().copied, expected.copied);
  }

  std::unique_ptr<FlashInferWorkspace> workspace_ = make_workspace(GetParam(), {.cache_entries = 4});
};

TEST_P(DeviceTables, WhatIsReadIsWhatLiesThere) {
  std::vector<std::unique_ptr<DeviceArrays>> arrays;
  std::vector<PageTable> contents(3);
  std::vector<std::uint64_t> versions(3, 0);  ///< of the contents; never used before for these arrays
  std::uint64_t next_version = 0;
  for (int i = 0; i < 3; ++i) arrays.push_back(std::make_unique<DeviceArrays>(GetParam()));
  for (int round = 0; round < 300; ++round) {
    const auto i = static_cast<std::size_t>(round < 3 ? round : rng_.uniform(0, 2));
    if (rng_.chance(0.5) || round < 3) {
      contents[i] = round >= 3 && rng_.chance(0.3) ? contents[(i + 1) % 3] : random_table();
      arrays[i]->write(contents[i]);
      versions[i] = ++next_version;
    }
    const DevicePageTable table = arrays[i]->view(rng_.chance(0.6) ? versions[i] : 0, rng_.chance(0.3));
    const Counts before = counts();
    const PageTable read = workspace_->read_table(table);
    ASSERT_EQ(read, contents[i]) << "round " << round;
    ASSERT_EQ(read.num_pages(), kPool);
    const Counts after = counts();
    ASSERT_EQ(after.known + after.copied, before.known + before.copied + 1);
    ASSERT_TRUE(table.version != 0 || after.known == before.known);
    // Again, under its version if it has one: no copy.
    ASSERT_TRUE(same_handle(workspace_->read_table(table), read));
    ASSERT_EQ(counts().known, after.known + (table.version != 0 ? 1 : 0));
  }
}

TEST_P(DeviceTables, AVersionSavesTheCopy) {
  DeviceArrays arrays(GetParam());
  const PageTable first = PageTable::from_pages(kPageSize, kPool, std::vector<std::vector<std::int32_t>>{{3, 4}},
                                                std::vector<std::int32_t>{20});
  const PageTable second = PageTable::from_pages(kPageSize, kPool, std::vector<std::vector<std::int32_t>>{{3, 5}},
                                                 std::vector<std::int32_t>{20});
  arrays.write(first);
  const PageTable read = workspace_->read_table(arrays.view(7));
  EXPECT_EQ(read, first);
  expect_counts({0, 1});
  EXPECT_TRUE(same_handle(workspace_->read_table(arrays.view(7)), read));
  expect_counts({1, 1});
  // A caller whose word is wrong is believed, which shows that nothing is copied.
  arrays.write(second);
  EXPECT_EQ(workspace_->read_table(arrays.view(7)), first);
  expect_counts({2, 1});
  // Another version, other lengths, or no version: the contents count.
  EXPECT_EQ(workspace_->read_table(arrays.view(8)), second);
  expect_counts({2, 2});
  EXPECT_EQ(workspace_->read_table(arrays.view(8, true)), second);
  expect_counts({2, 3});
  EXPECT_EQ(workspace_->read_table(arrays.view(0)), second);
  expect_counts({2, 4});
  // What these arrays held under version 7 was overwritten, so version 7 is new to them.
  EXPECT_EQ(workspace_->read_table(arrays.view(7)), second);
  expect_counts({2, 5});
}

TEST_P(DeviceTables, UnchangedContentsKeepTheirHandle) {
  DeviceArrays a(GetParam());
  DeviceArrays b(GetParam());
  const PageTable contents = random_table();
  a.write(contents);
  b.write(contents);
  const PageTable read = workspace_->read_table(a.view());
  EXPECT_TRUE(same_handle(workspace_->read_table(a.view()), read));
  EXPECT_TRUE(same_handle(workspace_->read_table(b.view()), read));
  EXPECT_TRUE(same_handle(workspace_->read_table(b.view(1)), read));
  // A pool of another size is another table, even with the same pages.
  DevicePageTable larger = b.view();
  larger.num_pages = kPool + 1;
  EXPECT_EQ(workspace_->read_table(larger).num_pages(), kPool + 1);
  expect_counts({0, 5});
}

TEST_P(DeviceTables, InvalidatingTheRuntimeCacheForgetsVersions) {
  DeviceArrays arrays(GetParam());
  arrays.write(random_table());
  const PageTable read = workspace_->read_table(arrays.view(1));
  workspace_->invalidate_prefill_runtime_cache();
  workspace_->invalidate_verify_runtime_cache();
  workspace_->read_table(arrays.view(1));
  expect_counts({1, 1});
  workspace_->invalidate_runtime_cache();
  EXPECT_EQ(workspace_->read_table(arrays.view(1)), read);
  expect_counts({1, 2});
}

TEST_P(DeviceTables, TheLeastRecentlyUsedIsForgotten) {
  std::vector<std::unique_ptr<DeviceArrays>> arrays;
  const auto read = [&](std::size_t i) { workspace_->read_table(arrays[i]->view(1)); };
  for (std::int32_t i = 0; i < 5; ++i) {
    arrays.push_back(std::make_unique<DeviceArrays>(GetParam()));
    arrays.back()->write(PageTable::from_pages(kPageSize, kPool, std::vector<std::vector<std::int32_t>>{{i}},
                                               std::vector<std::int32_t>{5}));
  }
  for (std::size_t i = 0; i < 4; ++i) read(i);
  read(0);
  expect_counts({1, 4});
  read(4);  // in place of 1
  for (const std::size_t i : {0, 2, 3, 4}) read(i);
  expect_counts({5, 5});
  read(1);
  expect_counts({5, 6});
}

TEST_P(DeviceTables, OnePlanServesTheStepsThatReadThem) {
  const std::int32_t tokens = 3 * kPageSize;
  Problem problem(GetParam(),
                  {.params = {.num_qo_heads = 8, .num_kv_heads = 2, .head_dim_qk = 128},
                   .qo_lens = {1, 1, 1},
                   .kv_lens = {tokens, 0, tokens - 5},
                   .spare_pages = 4},
                  rng_);
  DeviceArrays arrays(GetParam());
  arrays.write(problem.table());
  for (int step = 0; step < 3; ++step) {
    DevicePageTable view = arrays.view(static_cast<std::uint64_t>(step % 2));
    view.num_pages = problem.cache().device().num_pages;
    problem.set_table(workspace_->read_table(view));
    for (int layer = 0; layer < 2; ++layer) {
      problem.call(*workspace_);
      EXPECT_TRUE(problem.check());
    }
  }
  EXPECT_EQ(workspace_->stats().decode.misses, 1U);
  EXPECT_EQ(workspace_->stats().decode.hits, 5U);
}

TEST_P(DeviceTables, BadOnesAreRefusedAndChangeNothing) {
  DeviceArrays arrays(GetParam());
  const PageTable good =
      PageTable::from_pages(kPageSize, kPool, std::vector<std::vector<std::int32_t>>{{1, 2, 3}, {}, {4}},
                            std::vector<std::int32_t>{40, 0, 7});
  struct Fault {
    const char* name;
    void (*spoil)(DeviceArrays& arrays, DevicePageTable& view);
    Expected expected;
  };
  const Fault kFaults[] = {
      {"a page outside the cache",
       [](DeviceArrays& a, DevicePageTable&) { a.indices()[3] = kPool; },
       {Reason::kPageIndex, {"request 2 uses page 500", "num_pages = 500"}, Status::kInvalidArgument, 2}},
      {"a negative page",
       [](DeviceArrays& a, DevicePageTable&) { a.indices()[0] = -1; },
       {Reason::kPageIndex, {"request 0 uses page -1"}, Status::kInvalidArgument, 0}},
      {"an indptr that starts late",
       [](DeviceArrays& a, DevicePageTable&) { a.indptr()[0] = 1; },
       {Reason::kIndptrStart, {"indptr[0] is 1"}}},
      {"an indptr that decreases",
       [](DeviceArrays& a, DevicePageTable&) { a.indptr()[2] = 2; },
       {Reason::kIndptrDecreasing, {"indptr[2] is 2"}, Status::kInvalidArgument, 1}},
      {"an indptr past the indices",
       [](DeviceArrays& a, DevicePageTable&) { a.indptr()[3] = 5; },
       {Reason::kIndicesLength, {"indices has 4 entries", "indptr[3] = 5"}}},
      {"an indptr that ends below 0",
       [](DeviceArrays& a, DevicePageTable&) { a.indptr()[3] = -3; },
       {Reason::kIndptrDecreasing, {"indptr[3] is -3"}, Status::kInvalidArgument, 2}},
      {"an empty last page",
       [](DeviceArrays& a, DevicePageTable&) { a.last_page_len()[0] = 0; },
       {Reason::kLastPageLen, {"request 0", "last_page_len is 0"}, Status::kInvalidArgument, 0}},
      {"an overfull last page",
       [](DeviceArrays& a, DevicePageTable&) { a.last_page_len()[2] = 17; },
       {Reason::kLastPageLen, {"request 2", "17", "page_size = 16"}, Status::kInvalidArgument, 2}},
      {"a page size of 0",
       [](DeviceArrays&, DevicePageTable& view) { view.page_size = 0; },
       {Reason::kPageSize, {"page_size is 0"}}},
      {"a pool of less than nothing",
       [](DeviceArrays&, DevicePageTable& view) { view.num_pages = -1; },
       {Reason::kTableSize, {"num_pages is -1"}}},
      {"no indptr",
       [](DeviceArrays&, DevicePageTable& view) { view.indptr = {}; },
       {Reason::kIndptrLength, {"indptr has 0 entries", "batch + 1 = 4"}}},
      {"null indices",
       [](DeviceArrays&, DevicePageTable& view) {
         view.indices = {static_cast<const std::int32_t*>(nullptr), 4};
       },
       {Reason::kTableNull, {"indices is null", "4 entries"}}},
      {"a short last_page_len",
       [](DeviceArrays&, DevicePageTable& view) { view.last_page_len = view.last_page_len.first(2); },
       {Reason::kIndptrLength, {"indptr has 4 entries", "last_page_len has 2"}}},
  };
  for (const Fault& fault : kFaults) {
    arrays.write(good);
    EXPECT_EQ(workspace_->read_table(arrays.view()), good) << fault.name;
    DevicePageTable view = arrays.view(99);
    fault.spoil(arrays, view);
    arrays.upload();
    const WorkspaceStats before = workspace_->stats();
    expect_error(fault.name, fault.expected, [&] { workspace_->read_table(view); });
    EXPECT_TRUE(unchanged(before, workspace_->stats())) << fault.name;
  }
  arrays.write(good);
  EXPECT_EQ(workspace_->read_table(arrays.view(99)), good);
  workspace_->close();
  expect_error("a closed workspace", {Reason::kClosedWorkspace, {"closed"}, Status::kClosed},
               [&] { workspace_->read_table(arrays.view()); });
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceTables, testing::ValuesIn(compiled_devices()), device_test_name);

}  // namespace
}  // namespace fiw::test
