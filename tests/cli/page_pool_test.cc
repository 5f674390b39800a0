// The page pool: reference counts, prefixes that outlive their request, and who is evicted first.
#include "page_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "seed.h"

namespace fiw::cli {
namespace {

TEST(PrefixTree, EqualSequencesMeetAndOthersDoNot) {
  PrefixTree tree;
  const std::int32_t a = tree.child(PrefixTree::kRoot, 7);
  const std::int32_t ab = tree.child(a, 8);
  EXPECT_EQ(tree.child(PrefixTree::kRoot, 7), a);
  EXPECT_EQ(tree.child(a, 8), ab);
  EXPECT_NE(tree.child(PrefixTree::kRoot, 8), ab);  // the same hash after another beginning
  EXPECT_NE(tree.child(tree.child(PrefixTree::kRoot, 8), 7), ab);
}

TEST(PagePool, HandsOutEveryPageOnceThenRefuses) {
  PagePool pool(5);
  std::set<std::int32_t> pages;
  for (int i = 0; i < 5; ++i) pages.insert(pool.allocate());
  EXPECT_EQ(pages, (std::set<std::int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(pool.available(), 0);
  EXPECT_EQ(pool.peak_used(), 5);
  EXPECT_THROW(pool.allocate(), std::logic_error);
  pool.release(3);
  EXPECT_EQ(pool.allocate(), 3);
  pool.release(0);
  EXPECT_THROW(pool.release(0), std::logic_error);
}

TEST(PagePool, SharesPublishedPagesByCount) {
  PagePool pool(2);
  const PageKey key{1, 0};
  EXPECT_FALSE(pool.acquire(key));
  const std::int32_t page = pool.allocate();
  pool.publish(page, key);
  EXPECT_TRUE(pool.in_use(key));
  EXPECT_EQ(pool.acquire(key), page);
  EXPECT_EQ(pool.references(page), 2);
  EXPECT_EQ(pool.used(), 1);
  pool.release(page);
  EXPECT_EQ(pool.available(), 1);
  pool.release(page);
  EXPECT_EQ(pool.available(), 2);
  EXPECT_FALSE(pool.in_use(key));
  EXPECT_EQ(pool.acquire(key), page);  // still there after its last user left
  EXPECT_EQ(pool.available(), 1);
}

TEST(PagePool, TheFirstPublisherKeepsTheKey) {
  PagePool pool(2);
  const std::int32_t first = pool.allocate();
  const std::int32_t second = pool.allocate();
  pool.publish(first, {1, 0});
  pool.publish(second, {1, 0});
  EXPECT_EQ(pool.acquire({1, 0}), first);
  pool.release(second);
  EXPECT_EQ(pool.allocate(), second);  // it was never kept
}

TEST(PagePool, EvictsTheLeastRecentlyUsedAfterAllFreePages) {
  PagePool pool(3);
  const std::int32_t old_page = pool.allocate();
  const std::int32_t new_page = pool.allocate();
  pool.publish(old_page, {1, 0});
  pool.publish(new_page, {2, 0});
  pool.release(new_page);
  pool.release(old_page);
  EXPECT_EQ(pool.allocate(), 2);         // the free one
  EXPECT_EQ(pool.allocate(), new_page);  // released first
  EXPECT_FALSE(pool.contains({2, 0}));
  EXPECT_TRUE(pool.contains({1, 0}));
  EXPECT_EQ(pool.allocate(), old_page);
  EXPECT_FALSE(pool.acquire({1, 0}));
}

class PagePoolFuzz : public SeededTest {};

TEST_F(PagePoolFuzz, AgreesWithPlainBookkeeping) {
  for (int round = 0; round < 50; ++round) {
    PagePool pool(between(1, 20));
    std::vector<std::int32_t> held;  // one entry a reference
    for (int action = 0; action < 500; ++action) {
      const PageKey key{between(1, 4), between(0, 3)};
      switch (between(0, 3)) {
        case 0:
          if (pool.available() > 0) held.push_back(pool.allocate());
          break;
        case 1:
          if (const auto page = pool.acquire(key)) held.push_back(*page);
          break;
        case 2:
          if (!held.empty())
            pool.publish(held[static_cast<std::size_t>(between(0, static_cast<int>(held.size()) - 1))], key);
          break;
        default:
          if (!held.empty()) {
            const auto at = held.begin() + between(0, static_cast<int>(held.size()) - 1);
            pool.release(*at);
            held.erase(at);
          }
      }
      std::map<std::int32_t, std::int32_t> counts;
      for (const std::int32_t page : held) ++counts[page];
      ASSERT_EQ(pool.used(), static_cast<std::int32_t>(counts.size()));
      ASSERT_LE(pool.used(), pool.peak_used());
      for (std::int32_t page = 0; page < pool.num_pages(); ++page) ASSERT_EQ(pool.references(page), counts[page]);
    }
  }
}

}  // namespace
}  // namespace fiw::cli
