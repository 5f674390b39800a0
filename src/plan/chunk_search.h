// The choice of a chunk, for the planners on the host and for the kernel that plans on the device: what is chosen is
// defined without regard to how it is found, so that one may search step by step and the other all at once.
#pragma once

#include <cmath>
#include <cstdint>

#include "plan/host_device.h"

namespace fiw {

/// What the choice needs to know of a batch; see Tiling::Totals.
struct ChunkTotals {
  double visible_pages = 0;
  std::int32_t longest = 1;
};

/// What runs items: `slots` at a time, every item `depth` times (once a KV head, or once).
struct GridSize {
  std::int64_t slots = 1;
  std::int64_t depth = 1;
  std::int32_t min_chunk_pages = 1;
  float merge_pages = 0;  ///< pages whose reading takes as long as bringing in one chunk more at the end

  /// Items that splitting may add to a batch: two waves. See choose_chunk.
  std::int64_t spare_items() const { return 2 * slots / depth; }
};

/// What the choice needs to know of a grid, and of a batch without its lengths. All divisions are in here.
struct ChunkRule {
  static constexpr int kLimits = 3;

  std::int64_t uncut_items = 0;
  std::int32_t min_chunk_pages = 1;
  float merge_pages = 0;
  double slot_share = 1;           ///< of a slot, of the work of all items
  double uncut_waves = 0;          ///< in which the slots run uncut_items
  std::int64_t limits[kLimits]{};  ///< numbers of items that chunks are sought for, ascending
  double waves[kLimits]{};         ///< in which the slots run so many

  ChunkRule() = default;
  ChunkRule(std::int64_t uncut, const GridSize& grid)
      : uncut_items(uncut),
        min_chunk_pages(grid.min_chunk_pages),
        merge_pages(grid.merge_pages),
        slot_share(static_cast<double>(grid.depth) / static_cast<double>(grid.slots)) {
    const auto waves_of = [&](std::int64_t items) { return (items * grid.depth + grid.slots - 1) / grid.slots; };
    const std::int64_t first = waves_of(uncut);
    uncut_waves = static_cast<double>(first);
    limits[0] = first * grid.slots / grid.depth;
    limits[1] = (first + 1) * grid.slots / grid.depth;
    limits[2] = uncut + grid.spare_items();
    for (int i = 0; i < kLimits; ++i) waves[i] = static_cast<double>(waves_of(limits[i]));
  }

  /// Pages of the least chunk worth cutting from a request of `longest`: n chunks take longest / n + n * merge_pages.
  FIW_HOST_DEVICE std::int32_t least_chunk(std::int32_t longest) const {
    const auto best = static_cast<std::int32_t>(sqrtf(merge_pages * static_cast<float>(longest)));
    return best > min_chunk_pages ? best : min_chunk_pages;
  }
};

/// The chunks to choose among, in ascending order: every number of pages below 64, then 32 numbers an octave; none
/// below `least`, and `longest` for all beyond. Any index is good.
FIW_HOST_DEVICE inline std::int32_t nth_chunk(std::int32_t index, std::int32_t least, std::int32_t longest) {
  constexpr std::int32_t kOctave = 32;
  constexpr std::int32_t kMostOctaves = 31;
  const std::int32_t octave = index / kOctave;
  std::int64_t pages = index;
  if (octave > kMostOctaves) return longest;
  if (octave > 0) pages = static_cast<std::int64_t>(kOctave + index % kOctave) << (octave - 1);
  if (pages < least) return least;
  return pages < longest ? static_cast<std::int32_t>(pages) : longest;
}

/// Pages a chunk, so that items handed to the slots in order finish early; totals.longest where cutting would not help.
/// `shortest(i)` is the first nth_chunk that makes at most rule.limits[i] items.
///
/// Greedy dispatch finishes by min(waves * chunk, ideal + chunk), ideal being the work of a slot under perfect balance.
/// The longest chunk that holds this to 1.25 * ideal wins, else the one that finishes earliest. Cutting at ideal / 2
/// adds at most two waves of items, and so many are allowed: so a decode batch never takes more than 1.5 * ideal, or
/// ideal and one least chunk where that is longer.
template <class Shortest>
FIW_HOST_DEVICE std::int32_t choose_chunk(const Shortest& shortest, const ChunkTotals& totals, const ChunkRule& rule) {
  constexpr double kGoodBalance = 1.25;
  std::int32_t chunk = totals.longest;
  if (rule.uncut_items == 0 || chunk <= rule.least_chunk(chunk)) return chunk;

  const double ideal = totals.visible_pages * rule.slot_share;
  const auto finish = [&](double waves, std::int32_t pages) {
    const double in_waves = waves * pages;
    const double in_order = ideal + pages;
    return in_waves < in_order ? in_waves : in_order;
  };
  std::int32_t best_chunk = chunk;
  double best_finish = finish(rule.uncut_waves, chunk);
  for (int i = 0; i < ChunkRule::kLimits && best_finish > kGoodBalance * ideal; ++i) {
    const std::int32_t shorter = shortest(i);
    if (shorter == chunk) continue;
    chunk = shorter;
    const double candidate = finish(rule.waves[i], chunk);
    if (candidate < best_finish) {
      best_finish = candidate;
      best_chunk = chunk;
    }
  }
  return best_chunk;
}

}  // namespace fiw
