// The search for a chunk, for the planners on the host and for the kernel that plans on the device.
#pragma once

#include <cmath>
#include <cstdint>

#include "plan/host_device.h"

namespace fiw {

/// What the search needs to know of a batch; see Tiling::Totals.
struct ChunkTotals {
  std::int64_t uncut_items = 0;
  double walked_pages = 0;
  double visible_pages = 0;
  std::int32_t longest = 1;
};

/// What runs items: `slots` at a time, every item `depth` times (once a KV head, or once).
struct GridSize {
  std::int64_t slots = 1;
  std::int64_t depth = 1;
  std::int32_t min_chunk_pages = 1;
  double merge_pages = 0;  ///< pages whose reading takes as long as bringing in one chunk more at the end

  /// Items that splitting may add to a batch: two waves. See choose_chunk.
  FIW_HOST_DEVICE std::int64_t spare_items() const { return 2 * slots / depth; }
  /// Pages of the least chunk worth cutting from a request of `longest`: n chunks take longest / n + n * merge_pages.
  FIW_HOST_DEVICE std::int32_t least_chunk(std::int32_t longest) const {
    const auto best = static_cast<std::int32_t>(sqrt(merge_pages * longest));
    return best > min_chunk_pages ? best : min_chunk_pages;
  }
};

namespace chunk_search {

inline constexpr double kGoodBalance = 1.25;

FIW_HOST_DEVICE inline std::int64_t ceil_div(std::int64_t n, std::int64_t divisor) {
  return (n + divisor - 1) / divisor;
}
FIW_HOST_DEVICE inline double lesser(double a, double b) { return b < a ? b : a; }

// About the shortest chunk in [low, high] with at most `limit` items; `high` is known to respect it.
template <class Items>
FIW_HOST_DEVICE std::int32_t short_chunk(const Items& items, const ChunkTotals& totals, std::int64_t limit,
                                         std::int32_t low, std::int32_t high) {
  const std::int64_t extra = limit - totals.uncut_items;
  if (extra <= 0) return high;
  // items(c) is at least walked / c, and at least uncut - 1 + longest / c; it is at most uncut + walked / c.
  const auto raise = [&](double pages, std::int64_t most) {
    const auto least = static_cast<std::int32_t>(lesser(high, pages / static_cast<double>(most)));
    if (least > low) low = least;
  };
  raise(totals.walked_pages, limit);
  raise(totals.longest, extra + 1);
  const double quotient = totals.walked_pages / static_cast<double>(extra);
  if (quotient <= static_cast<double>(high - 1)) {
    const auto whole = static_cast<std::int32_t>(quotient);
    const std::int32_t enough = whole + (static_cast<double>(whole) < quotient ? 1 : 0);
    high = enough > low ? enough : low;
  }
  if (items(low) <= limit) return low;
  while (high - low > low / 32) {
    const std::int32_t middle = low + (high - low) / 2;
    if (items(middle) > limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return high;
}

}  // namespace chunk_search

/// Pages a chunk, so that items handed to the slots in order finish early; totals.longest where cutting would not help.
/// `items(chunk)` counts the items of a chunk.
///
/// Greedy dispatch finishes by min(waves * chunk, ideal + chunk), ideal being the work of a slot under perfect balance.
/// The longest chunk that holds this to 1.25 * ideal wins, else the one that finishes earliest. Cutting at ideal / 2
/// adds at most two waves of items, and so many are allowed: so a decode batch never takes more than 1.5 * ideal, or
/// ideal and one least chunk where that is longer.
template <class Items>
FIW_HOST_DEVICE std::int32_t choose_chunk(const Items& items, const ChunkTotals& totals, const GridSize& grid) {
  using chunk_search::ceil_div;
  const std::int64_t uncut = totals.uncut_items;
  const std::int32_t least = grid.least_chunk(totals.longest);
  std::int32_t chunk = totals.longest;
  if (uncut == 0 || chunk <= least) return chunk;

  const double ideal = totals.visible_pages * static_cast<double>(grid.depth) / static_cast<double>(grid.slots);
  const auto finish = [&](std::int64_t count, std::int32_t pages) {
    const double waves = static_cast<double>(ceil_div(count * grid.depth, grid.slots));
    return chunk_search::lesser(waves * pages, ideal + pages);
  };
  std::int32_t best_chunk = chunk;
  double best_finish = finish(uncut, chunk);
  const std::int64_t waves = ceil_div(uncut * grid.depth, grid.slots);
  const std::int64_t limits[] = {waves * grid.slots / grid.depth, (waves + 1) * grid.slots / grid.depth,
                                 uncut + grid.spare_items()};
  for (const std::int64_t limit : limits) {
    if (best_finish <= chunk_search::kGoodBalance * ideal) break;
    const std::int32_t longer = chunk;
    chunk = chunk_search::short_chunk(items, totals, limit, least, chunk);
    if (chunk == longer) continue;
    const double candidate = finish(limit, chunk);
    if (candidate < best_finish) {
      best_finish = candidate;
      best_chunk = chunk;
    }
  }
  return best_chunk;
}

}  // namespace fiw
