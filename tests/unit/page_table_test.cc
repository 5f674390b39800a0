// Page tables: what builds, what is refused and with which words, and how they advance.
#include "fiw/page_table.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "fiw/error.h"

namespace fiw {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr std::int32_t kPageSize = 16;
constexpr std::int64_t kNumPages = 10;

struct Csr {
  Ints indptr{0, 2, 3};
  Ints indices{7, 1, 4};
  Ints last{3, 16};
  Ints kv_lens{};
  PageTable build() const { return PageTable::from_csr(kPageSize, kNumPages, indptr, indices, last, kv_lens); }
};

void expect_refused(const Csr& csr, Reason reason, std::int64_t request, const std::vector<std::string>& words) {
  try {
    csr.build();
    FAIL() << "built a bad table";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_EQ(error.reason(), reason) << error.what();
    EXPECT_EQ(error.index(), request) << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << "'" << word << "' in: " << error.what();
    }
  }
}

TEST(PageTable, DerivesLengths) {
  const PageTable table = Csr{}.build();
  EXPECT_EQ(table.batch(), 2);
  EXPECT_EQ(Ints(table.kv_lens().begin(), table.kv_lens().end()), (Ints{19, 16}));
  EXPECT_EQ(Ints(table.page_counts().begin(), table.page_counts().end()), (Ints{2, 1}));
  EXPECT_EQ(table.total_kv(), 35);
  EXPECT_EQ(table.max_kv_len(), 19);
  EXPECT_EQ(table.max_page_index(), 7);
}

TEST(PageTable, EmptyBatchAndRequestsWithNoPage) {
  EXPECT_EQ(PageTable().batch(), 0);
  EXPECT_EQ(PageTable::from_csr(16, 0, Ints{0}, {}, {}).batch(), 0);
  // A request with no page has length 0 whatever its last_page_len says.
  const PageTable table = PageTable::from_csr(16, 10, Ints{0, 0, 1, 1}, Ints{9}, Ints{99, 1, -5});
  EXPECT_EQ(Ints(table.kv_lens().begin(), table.kv_lens().end()), (Ints{0, 1, 0}));
}

TEST(PageTable, EveryPageInUseAndPagesShared) {
  Ints all(kNumPages);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(PageTable::from_csr(16, kNumPages, Ints{0, 10}, all, Ints{16}).total_kv(), 160);
  const PageTable shared = PageTable::from_csr(16, kNumPages, Ints{0, 2, 4}, Ints{3, 5, 3, 6}, Ints{1, 2});
  EXPECT_EQ(shared.total_kv(), 35);
}

TEST(PageTable, RefusesEachFault) {
  expect_refused({.last = {0, 16}}, Reason::kLastPageLen, 0, {"request 0", "is 0", "16"});
  expect_refused({.last = {3, 17}}, Reason::kLastPageLen, 1, {"request 1", "is 17", "16"});
  expect_refused({.last = {-3, 16}}, Reason::kLastPageLen, 0, {"request 0", "is -3"});
  expect_refused({.indptr = {0, 2, 1}}, Reason::kIndptrDecreasing, 1, {"request 1", "is 1", "= 2"});
  expect_refused({.indptr = {1, 2, 3}}, Reason::kIndptrStart, -1, {"indptr[0] is 1", "expected 0"});
  expect_refused({.indptr = {0, 3}}, Reason::kIndptrLength, -1, {"2 entries", "= 3"});
  expect_refused({.indices = {7, 1}}, Reason::kIndicesLength, -1, {"2 entries", "= 3"});
  expect_refused({.indices = {7, 1, 4, 2}}, Reason::kIndicesLength, -1, {"4 entries", "= 3"});
  expect_refused({.indices = {7, 1, 10}}, Reason::kPageIndex, 1, {"request 1", "page 10", "10"});
  expect_refused({.indices = {-1, 1, 4}}, Reason::kPageIndex, 0, {"request 0", "page -1"});
  expect_refused({.kv_lens = {19, 15}}, Reason::kKvLens, 1, {"request 1", "16 against 15"});
  expect_refused({.kv_lens = {19}}, Reason::kBatch, -1, {"1 entries", "= 2"});
  EXPECT_EQ((Csr{.kv_lens = {19, 16}}.build().total_kv()), 35);
  EXPECT_THROW(PageTable::from_csr(0, 10, Ints{0}, {}, {}), Error);
  EXPECT_THROW(PageTable::from_csr(-1, 10, Ints{0}, {}, {}), Error);
  // 2 pages of 2^31 - 1 tokens are more tokens than int32 counts.
  EXPECT_THROW(PageTable::from_csr(INT32_MAX, 10, Ints{0, 2}, Ints{0, 1}, Ints{1}), Error);
}

TEST(PageTable, SurplusPage) {
  for (const std::int32_t kv_len : {15, 16, 17, 32, 33}) {
    // The builder from lengths takes only the pages that the length needs.
    const std::vector<Ints> pages{{4, 2, 8}};
    const PageTable built = PageTable::from_pages(kPageSize, kNumPages, pages, Ints{kv_len});
    const std::int32_t needed = (kv_len + kPageSize - 1) / kPageSize;
    EXPECT_EQ(built.indptr()[1], needed);
    EXPECT_EQ(built.last_page_len()[0], kv_len - (needed - 1) * kPageSize);
    // A surplus page in CSR is caught by kv_lens, and only by it.
    Ints indices(static_cast<std::size_t>(needed) + 1, 5);
    const Ints indptr{0, needed + 1};
    EXPECT_THROW(PageTable::from_csr(kPageSize, kNumPages, indptr, indices, Ints{16}, Ints{kv_len}), Error);
    EXPECT_EQ(PageTable::from_csr(kPageSize, kNumPages, indptr, indices, Ints{16}).total_kv(), 16 * (needed + 1));
  }
  try {
    PageTable::from_csr(kPageSize, kNumPages, Ints{0, 2}, Ints{1, 2}, Ints{16}, Ints{16});
    FAIL() << "built a bad table";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("32 against 16"), std::string::npos) << error.what();
  }
}

TEST(PageTable, BlockTableBothWays) {
  std::mt19937 rng(7);
  for (int round = 0; round < 200; ++round) {
    const std::int32_t page_size = std::uniform_int_distribution<std::int32_t>(1, 33)(rng);
    const std::size_t batch = std::uniform_int_distribution<std::size_t>(0, 9)(rng);
    std::vector<Ints> pages(batch);
    Ints kv_lens;
    for (Ints& list : pages) {
      kv_lens.push_back(std::uniform_int_distribution<std::int32_t>(0, 100)(rng));
      for (std::int32_t t = 0; t < kv_lens.back(); t += page_size)
        list.push_back(static_cast<std::int32_t>(rng() % 1000));
    }
    const PageTable table = PageTable::from_pages(page_size, 1000, pages, kv_lens);
    const BlockTable tight = table.to_block_table();
    const BlockTable wide = table.to_block_table(tight.max_pages + 3, 12345678);
    EXPECT_TRUE(PageTable::from_block_table(tight, 1000) == table);
    EXPECT_TRUE(PageTable::from_block_table(wide, 1000) == table);  // padding is not read
  }
  const PageTable two = PageTable::from_csr(16, 10, Ints{0, 2}, Ints{1, 2}, Ints{1});
  EXPECT_THROW(two.to_block_table(1), Error);
  EXPECT_THROW(PageTable::from_block_table({.page_size = 16, .max_pages = 1, .blocks = {3}, .kv_lens = {17}}, 10),
               Error);
  EXPECT_THROW(PageTable::from_block_table({.page_size = 16, .max_pages = 2, .blocks = {3}, .kv_lens = {16}}, 10),
               Error);
  EXPECT_THROW(PageTable::from_block_table({.page_size = 16, .max_pages = 1, .blocks = {3}, .kv_lens = {-1}}, 10),
               Error);
}

TEST(PageTable, AdvanceTakesPagesOnlyWhenNeeded) {
  PageTable table = PageTable::from_csr(4, 100, Ints{0, 1, 1, 3}, Ints{9, 8, 7}, Ints{3, 0, 4});
  const PageTable before = table;
  EXPECT_EQ(table.pages_needed(0), 0);
  EXPECT_EQ(table.pages_needed(1), 2);  // request 1 had no page, request 2's last page is full
  table.advance(1, Ints{50, 51});
  EXPECT_EQ(Ints(table.indices().begin(), table.indices().end()), (Ints{9, 50, 8, 7, 51}));
  EXPECT_EQ(Ints(table.kv_lens().begin(), table.kv_lens().end()), (Ints{4, 1, 9}));
  // A copy made before keeps the old contents, and a moved-from handle stays a table.
  EXPECT_EQ(before.total_kv(), 11);
  EXPECT_FALSE(before == table);
  PageTable taken = std::move(table);
  EXPECT_TRUE(taken == table);  // NOLINT(bugprone-use-after-move): PageTable copies on move by design

  EXPECT_THROW(taken.advance(1, Ints{}), Error);      // request 0 needs a page
  EXPECT_THROW(taken.advance(1, Ints{1, 2}), Error);  // one too many
  EXPECT_THROW(taken.advance(1, Ints{100}), Error);   // outside the pool
  EXPECT_THROW(taken.advance(-1), Error);
  EXPECT_THROW(taken.advance(INT32_MAX, Ints{}), Error);   // more tokens than int32 counts
  EXPECT_THROW(taken.advance(Ints{1, 1}, Ints{}), Error);  // batch
  EXPECT_EQ(taken.total_kv(), 14);                         // a failed advance changes nothing
  taken.advance(Ints{0, 7, 0}, Ints{60});
  EXPECT_EQ(taken.kv_lens()[1], 8);
}

TEST(PageTable, AdvanceEqualsRebuild) {
  std::mt19937 rng(11);
  for (int round = 0; round < 100; ++round) {
    const std::int32_t page_size = std::uniform_int_distribution<std::int32_t>(1, 9)(rng);
    const std::size_t batch = std::uniform_int_distribution<std::size_t>(0, 6)(rng);
    std::vector<Ints> pages(batch);
    Ints kv_lens(batch, 0);
    PageTable table = PageTable::from_pages(page_size, 5000, pages, kv_lens);
    for (int step = 0; step < 20; ++step) {
      Ints tokens;
      Ints fresh;
      for (std::size_t r = 0; r < batch; ++r) {
        tokens.push_back(std::uniform_int_distribution<std::int32_t>(0, 5)(rng));
        kv_lens[r] += tokens.back();
        while (static_cast<std::int32_t>(pages[r].size()) * page_size < kv_lens[r]) {
          fresh.push_back(static_cast<std::int32_t>(rng() % 5000));
          pages[r].push_back(fresh.back());
        }
      }
      table.advance(tokens, fresh);
      EXPECT_TRUE(table == PageTable::from_pages(page_size, 5000, pages, kv_lens));
    }
  }
}

TEST(PageTable, EqualityIsByContents) {
  const Csr csr;
  EXPECT_TRUE(csr.build() == csr.build());
  EXPECT_FALSE(csr.build() == (Csr{.indices = {7, 1, 5}}.build()));
  EXPECT_FALSE(csr.build() == (Csr{.last = {4, 16}}.build()));
  // Same page counts in total, cut elsewhere.
  EXPECT_FALSE(csr.build() == (Csr{.indptr = {0, 1, 3}, .last = {16, 3}}.build()));
}

}  // namespace
}  // namespace fiw
