// Page tables from damaged arrays, against a judgement of their own in 64 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fiw/error.h"
#include "fiw/page_table.h"
#include "support/random.h"

namespace fiw {
namespace {

constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

struct Arrays {
  std::int32_t page_size = 1;
  std::int64_t num_pages = 0;
  std::vector<std::int32_t> indptr{0};
  std::vector<std::int32_t> indices;
  std::vector<std::int32_t> last_page_len;
  std::vector<std::int32_t> kv_lens;  ///< of the undamaged table; given to the call only when `with_lens`
  bool with_lens = false;

  std::int64_t kv_len(std::size_t r) const {
    const std::int64_t pages = std::int64_t{indptr[r + 1]} - indptr[r];
    return pages == 0 ? 0 : (pages - 1) * page_size + last_page_len[r];
  }

  bool legal() const {
    const std::size_t batch = last_page_len.size();
    if (page_size < 1 || num_pages < 0 || indptr.size() != batch + 1 || indptr.front() != 0) return false;
    if (!std::ranges::is_sorted(indptr) || std::int64_t{indptr.back()} != std::ssize(indices)) return false;
    const auto in_pool = [this](std::int32_t page) { return 0 <= page && page < num_pages; };
    if (!std::ranges::all_of(indices, in_pool)) return false;
    // An empty list of lengths is none.
    if (with_lens && !kv_lens.empty() && kv_lens.size() != batch) return false;
    for (std::size_t r = 0; r < batch; ++r) {
      const bool has_pages = indptr[r + 1] > indptr[r];
      if (has_pages && (last_page_len[r] < 1 || last_page_len[r] > page_size)) return false;
      if (kv_len(r) > kMost) return false;
      if (with_lens && !kv_lens.empty() && kv_lens[r] != kv_len(r)) return false;
    }
    return true;
  }

  PageTable build() const {
    return PageTable::from_csr(page_size, num_pages, indptr, indices, last_page_len,
                               with_lens ? std::span<const std::int32_t>(kv_lens) : std::span<const std::int32_t>());
  }
};

class PageTableFuzz : public testing::Test, protected test::Seeded {
 protected:
  Arrays good() {
    Arrays a;
    a.page_size = rng_.pick({1, 2, 7, 16, 256, kMost});
    a.num_pages = rng_.uniform(1, 40);
    a.with_lens = rng_.chance(0.5);
    for (std::int32_t r = rng_.uniform(0, 6); r > 0; --r) {
      const std::int32_t pages = rng_.uniform(0, a.page_size == kMost ? 1 : 5);
      for (std::int32_t i = 0; i < pages; ++i) {
        a.indices.push_back(rng_.uniform(0, static_cast<std::int32_t>(a.num_pages) - 1));
      }
      a.indptr.push_back(static_cast<std::int32_t>(a.indices.size()));
      a.last_page_len.push_back(pages == 0 ? rng_.uniform(-3, 3) : rng_.uniform(1, a.page_size));
      a.kv_lens.push_back(static_cast<std::int32_t>(a.kv_len(a.last_page_len.size() - 1)));
    }
    return a;
  }

  std::int32_t nasty(std::int32_t near) {
    const std::int32_t step = rng_.uniform(-2, 2);
    const bool fits = step < 0 ? near >= kLeast - step : near <= kMost - step;
    return rng_.pick({kLeast, -1, 0, 1, kMost, rng_.uniform(-20, 300), fits ? near + step : near});
  }

  void damage(std::vector<std::int32_t>& values) {
    const auto at = [&] { return values.begin() + rng_.uniform(0, static_cast<std::int32_t>(values.size()) - 1); };
    switch (rng_.uniform(0, 3)) {
      case 0:
        values.push_back(nasty(values.empty() ? 0 : values.back()));
        break;
      case 1:
        if (!values.empty()) values.erase(at());
        break;
      default:
        if (!values.empty()) {
          const auto value = at();
          *value = nasty(*value);
        }
    }
  }

  void damage(Arrays& a) {
    switch (rng_.uniform(0, 5)) {
      case 0:
        a.page_size = nasty(a.page_size);
        break;
      case 1:
        a.num_pages = nasty(static_cast<std::int32_t>(a.num_pages));
        break;
      case 2:
        damage(a.indptr);
        break;
      case 3:
        damage(a.indices);
        break;
      case 4:
        damage(a.last_page_len);
        break;
      default:
        damage(a.kv_lens);
    }
  }
};

TEST_F(PageTableFuzz, TakenExactlyWhenLegal) {
  constexpr int kRounds = test::rounds(100'000);
  int taken = 0;
  for (int round = 0; round < kRounds; ++round) {
    Arrays a = good();
    for (std::int32_t n = rng_.uniform(0, 2); n > 0; --n) damage(a);
    try {
      const PageTable table = a.build();
      ASSERT_TRUE(a.legal()) << "round " << round << " built a bad table";
      ++taken;
      ASSERT_EQ(table.batch(), std::ssize(a.last_page_len));
      std::int64_t total = 0;
      for (std::size_t r = 0; r < a.last_page_len.size(); ++r) {
        ASSERT_EQ(table.kv_lens()[r], a.kv_len(r));
        total += a.kv_len(r);
      }
      ASSERT_EQ(table.total_kv(), total);
      ASSERT_TRUE(std::ranges::equal(table.indices(), a.indices));
      ASSERT_EQ(PageTable::from_block_table(table.to_block_table(), a.num_pages), table);
    } catch (const Error& error) {
      ASSERT_FALSE(a.legal()) << "round " << round << " was refused: " << error.what();
      ASSERT_EQ(error.status(), Status::kInvalidArgument) << error.what();
      ASSERT_GT(std::string(error.what()).size(), 10U);
      ASSERT_LT(error.index(), std::int64_t{64}) << error.what();
    }
  }
  // Both kinds were met.
  EXPECT_GT(taken, kRounds / 10);
  EXPECT_LT(taken, kRounds * 9 / 10);
}

TEST_F(PageTableFuzz, AdvanceTakesExactlyThePagesItNeeds) {
  for (int round = 0; round < 20'000; ++round) {
    const Arrays a = good();
    PageTable table = a.build();
    const PageTable before = table;
    std::vector<std::int32_t> growth(a.last_page_len.size());
    std::int64_t needed = 0;
    bool legal = true;
    for (std::size_t r = 0; r < growth.size(); ++r) {
      const std::int64_t len = a.kv_len(r);
      growth[r] = static_cast<std::int32_t>(std::min<std::int64_t>(rng_.uniform(0, 300), kMost - len));
      if (rng_.chance(0.05)) {
        growth[r] = rng_.pick({kLeast, -1, len > 0 ? kMost : -2});
        legal = false;
      } else {
        needed += (len + growth[r] + a.page_size - 1) / a.page_size - (a.indptr[r + 1] - a.indptr[r]);
      }
    }
    std::vector<std::int32_t> pages(static_cast<std::size_t>(legal ? needed : 3));
    for (std::int32_t& page : pages) page = rng_.uniform(0, static_cast<std::int32_t>(a.num_pages) - 1);
    if (legal && rng_.chance(0.3)) {
      legal = false;
      if (pages.empty() || rng_.chance(0.5)) {
        pages.push_back(0);
      } else {
        pages.pop_back();
      }
    }
    try {
      table.advance(growth, pages);
      ASSERT_TRUE(legal) << "round " << round;
      for (std::size_t r = 0; r < growth.size(); ++r) ASSERT_EQ(table.kv_lens()[r], a.kv_len(r) + growth[r]);
    } catch (const Error& error) {
      ASSERT_FALSE(legal) << "round " << round << ": " << error.what();
      ASSERT_EQ(table, before) << "a refused growth changed the table";
    }
  }
}

}  // namespace
}  // namespace fiw
