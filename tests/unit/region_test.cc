// Regions against every byte written down: aliasing strides, and views that interleave, touch or meet.
#include "core/region.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "fiw/error.h"

namespace fiw {
namespace {

using Axes = std::vector<Region::Axis>;

Region region(std::int64_t first, std::int64_t element, std::int64_t count, const Axes& axes) {
  const auto* data = reinterpret_cast<const void*>(first);
  Region::Axis three[3] = {{"", 1, 0}, {"", 1, 0}, {"", 1, 0}};
  std::copy(axes.begin(), axes.end(), three);
  return {"it", data, element, count, {three[0], three[1], three[2]}};
}

/// Every byte, as often as it is reached.
std::vector<std::int64_t> bytes_of(std::int64_t first, std::int64_t element, std::int64_t count, const Axes& axes) {
  std::vector<std::int64_t> bytes;
  for (std::int64_t i = 0; i < element * count; ++i) bytes.push_back(first + i);
  for (const Region::Axis& axis : axes) {
    std::vector<std::int64_t> repeated;
    for (std::int64_t i = 0; i < axis.extent; ++i) {
      for (const std::int64_t byte : bytes) repeated.push_back(byte + i * axis.stride * element);
    }
    bytes = std::move(repeated);
  }
  return bytes;
}

TEST(Region, MeetsExactlyWhereBytesAreShared) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(n));
  };
  int met = 0;
  int interleaved = 0;
  for (int round = 0; round < 20'000; ++round) {
    struct View {
      std::int64_t first = 0, element = 1, count = 1;
      Axes axes;
    };
    View views[2];
    const std::int64_t common[3] = {1 + below(8), 4 + below(24), 16 + below(60)};
    for (View& view : views) {
      view.first = 1000 + below(80);
      view.element = std::int64_t{1} << below(3);
      view.count = 1 + below(4);
      for (std::int64_t i = below(4); i > 0; --i) {
        // Often the strides of the other view, as columns of one buffer have them.
        view.axes.push_back({"axis", below(5), below(3) == 0 ? below(40) : common[i - 1]});
      }
    }
    std::vector<std::int64_t> bytes[2];
    std::vector<Region> regions;
    for (int v = 0; v < 2; ++v) {
      bytes[v] = bytes_of(views[v].first, views[v].element, views[v].count, views[v].axes);
      regions.push_back(region(views[v].first, views[v].element, views[v].count, views[v].axes));
      std::sort(bytes[v].begin(), bytes[v].end());
      const bool repeats = std::adjacent_find(bytes[v].begin(), bytes[v].end()) != bytes[v].end();
      if (repeats) {
        ASSERT_NE(regions[v].aliasing_axis(), nullptr) << "round " << round;
      }
    }
    std::vector<std::int64_t> shared;
    std::set_intersection(bytes[0].begin(), bytes[0].end(), bytes[1].begin(), bytes[1].end(),
                          std::back_inserter(shared));
    ASSERT_EQ(meet(regions[0], regions[1]), !shared.empty()) << "round " << round;
    ASSERT_EQ(meet(regions[1], regions[0]), !shared.empty()) << "round " << round;
    met += shared.empty() ? 0 : 1;
    interleaved += shared.empty() && !bytes[0].empty() && !bytes[1].empty() && bytes[0].front() < bytes[1].back() &&
                           bytes[1].front() < bytes[0].back()
                       ? 1
                       : 0;
  }
  EXPECT_GT(met, 1000);
  EXPECT_GT(interleaved, 1000);
}

TEST(Region, NestingStridesInAnyOrderAreApart) {
  const Axes good[] = {
      {{"row", 3, 32}, {"head", 4, 8}},          {{"row", 3, 8}, {"head", 4, 24}},   // head-major
      {{"row", 1, 0}, {"head", 4, 8}},           {{"row", 3, 100}, {"head", 4, 9}},  // gaps
      {{"a", 2, 8}, {"b", 3, 48}, {"c", 3, 16}}, {{"a", 0, 0}, {"b", 3, 0}},         // nothing
  };
  for (const Axes& axes : good) EXPECT_EQ(region(4096, 2, 8, axes).aliasing_axis(), nullptr) << axes[0].stride;
  const Axes bad[] = {
      {{"row", 3, 31}, {"head", 4, 8}},
      {{"row", 3, 8}, {"head", 4, 23}},
      {{"row", 2, 0}, {"head", 1, 8}},
      {{"row", 2, 16}, {"head", 2, 16}},
      {{"row", 2, 7}},
  };
  for (const Axes& axes : bad) EXPECT_NE(region(4096, 2, 8, axes).aliasing_axis(), nullptr) << axes[0].stride;
}

TEST(Region, NamesTheAxisAndWhatItShouldSpan) {
  const Region rows = region(4096, 2, 8, {{"row", 3, 31}, {"head", 4, 8}});
  const Region::Axis* axis = rows.aliasing_axis();
  ASSERT_NE(axis, nullptr);
  EXPECT_STREQ(axis->name, "row");
  EXPECT_EQ(rows.span_within(*axis), 2 * 32);
}

TEST(Region, StridesThatNoElementTakesDoNotMatter) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const Region one = region(4096, 2, 8, {{"row", 1, kMost}, {"head", 2, 8}});
  EXPECT_TRUE(meet(one, region(4096 + 31, 1, 1, {})));
  EXPECT_FALSE(meet(one, region(4096 + 32, 1, 1, {})));
  EXPECT_TRUE(region(4096, 2, 8, {{"row", 0, kMost}}).empty());
}

TEST(Region, WhatDoesNotFitIsRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto refused = [](std::int64_t element, std::int64_t count, const Axes& axes) {
    try {
      region(4096, element, count, axes);
      return false;
    } catch (const Error& error) {
      return error.reason() == Reason::kSizeOverflow && std::string(error.what()).starts_with("it:");
    }
  };
  EXPECT_TRUE(refused(1, 8, {{"row", 2, kMost}}));
  EXPECT_TRUE(refused(2, 8, {{"row", 2, kMost / 2}}));
  EXPECT_TRUE(refused(1, 8, {{"row", kMost, 2}}));
  EXPECT_TRUE(refused(4, kMost / 2, {}));
  EXPECT_FALSE(refused(1, 8, {{"row", 2, kMost / 2}}));
}

TEST(Region, FarReachesAreStillToldApart) {
  constexpr std::int64_t kFar = std::int64_t{1} << 60;
  const Region a = region(4096, 1, 8, {{"page", 4, kFar}, {"token", 1000, 64}});
  EXPECT_FALSE(meet(a, region(4096 + 8, 1, 56, {{"page", 4, kFar}, {"token", 1000, 64}})));
  EXPECT_TRUE(meet(a, region(4096 + 8, 1, 57, {{"page", 4, kFar}, {"token", 1000, 64}})));
}

}  // namespace
}  // namespace fiw
