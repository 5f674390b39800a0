// The choice of a chunk, for the planners on the host and for the kernel that plans on the device: what is chosen is
// defined without regard to how it is found, so that one may search step by step and the other all at once.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
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
  std::int32_t step_pages = 1;  ///< an item walks whole ones; a power of two

  // What cutting costs beside the reading, in pages that a slot reads meanwhile. All zero: it is not reckoned.
  float merge_pages = 0;  ///< to bring in one chunk more of a request at the end
  float cut_pages = 0;    ///< to have chunks of a request at all
  float lone_pages = 0;  ///< to have no item behind the first in a slot, that reads while the first one starts and ends
  float lone_share = 0;  ///< ... and so much of the item's pages

  /// Items that splitting may add to a batch: two waves. See choose_chunk.
  std::int64_t spare_items() const { return 2 * slots / depth; }
  /// In which the slots run so many items.
  std::int64_t waves(std::int64_t items) const { return (items * depth + slots - 1) / slots; }
};

/// What the choice needs to know of a grid, and of a batch without its lengths. All divisions are in here.
struct ChunkRule {
  static constexpr int kLimits = 3;

  std::int64_t uncut_items = 0;
  std::int32_t min_chunk_pages = 1;
  std::int32_t step_pages = 1;
  float merge_pages = 0;
  float cut_pages = 0;
  float lone_pages = 0;
  float lone_share = 0;
  double slot_share = 1;    ///< of a slot, of the work of all items
  double uncut_waves = 0;   ///< in which the slots run uncut_items
  double waves[kLimits]{};  ///< in which the slots run as many items as each of chunk_limits() says

  ChunkRule() = default;
  ChunkRule(std::int64_t uncut, const GridSize& grid);

  /// Pages of the least chunk worth cutting from a request of `longest`: n chunks take longest / n + n * merge_pages.
  FIW_HOST_DEVICE std::int32_t least_chunk(std::int32_t longest) const {
    const auto best = static_cast<std::int32_t>(sqrtf(merge_pages * static_cast<float>(longest)));
    const std::int32_t nearest = (best + step_pages / 2) & -step_pages;
    return nearest > min_chunk_pages ? nearest : min_chunk_pages;
  }
  /// A chunk of at least so many pages that wastes no part of a step.
  FIW_HOST_DEVICE std::int32_t in_steps(std::int32_t chunk, std::int32_t longest) const {
    const auto last = static_cast<std::uint32_t>(chunk - 1) | static_cast<std::uint32_t>(step_pages - 1);
    return last < static_cast<std::uint32_t>(longest) ? static_cast<std::int32_t>(last + 1) : longest;
  }
};

/// Numbers of items that chunks are sought for, ascending: what fits the waves of the uncut ones, what fits one wave
/// more, and two waves' items more.
using ChunkLimits = std::array<std::int64_t, ChunkRule::kLimits>;
inline ChunkLimits chunk_limits(std::int64_t uncut, const GridSize& grid) {
  const std::int64_t first = grid.waves(uncut);
  return {first * grid.slots / grid.depth, (first + 1) * grid.slots / grid.depth, uncut + grid.spare_items()};
}

inline ChunkRule::ChunkRule(std::int64_t uncut, const GridSize& grid)
    : uncut_items(uncut),
      min_chunk_pages(grid.min_chunk_pages),
      step_pages(grid.step_pages),
      merge_pages(grid.merge_pages),
      cut_pages(grid.cut_pages),
      lone_pages(grid.lone_pages),
      lone_share(grid.lone_share),
      slot_share(static_cast<double>(grid.depth) / static_cast<double>(grid.slots)),
      uncut_waves(static_cast<double>(grid.waves(uncut))) {
  const ChunkLimits limits = chunk_limits(uncut, grid);
  for (int i = 0; i < kLimits; ++i) waves[i] = static_cast<double>(grid.waves(limits[static_cast<std::size_t>(i)]));
}

/// The chunks to choose among are numbered in ascending order: every number of pages below 2 * kChunksAnOctave, then as
/// many numbers an octave; none below the least, and the longest for all beyond.
inline constexpr int kChunkBits = 5;
inline constexpr std::int32_t kChunksAnOctave = 1 << kChunkBits;

/// Any index is good.
FIW_HOST_DEVICE inline std::int32_t nth_chunk(std::int32_t index, std::int32_t least, std::int32_t longest) {
  constexpr std::int32_t kMostOctaves = 31 - kChunkBits;  // beyond, 31 bits do not hold the pages
  const std::int32_t octave = index / kChunksAnOctave;
  if (octave > kMostOctaves) return longest;
  const std::int32_t pages = octave <= 0 ? index : (kChunksAnOctave + index % kChunksAnOctave) << (octave - 1);
  if (pages < least) return least;
  return pages < longest ? pages : longest;
}

/// The last index whose chunk has at most `pages` pages (>= 0), where neither least nor longest forbids.
FIW_HOST_DEVICE inline std::int32_t chunk_index(std::int32_t pages) {
  if (pages < 2 * kChunksAnOctave) return pages;
#ifdef __CUDA_ARCH__
  const std::int32_t octave = 32 - __clz(pages) - kChunkBits;
#else
  const std::int32_t octave = static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(pages))) - kChunkBits;
#endif
  return octave * kChunksAnOctave + (pages >> (octave - 1)) - kChunksAnOctave;
}

/// Pages a chunk, so that items handed to the slots in order finish early; totals.longest where cutting would not help.
/// `least` is the rule's least chunk of that; `shortest(i)` is the first nth_chunk that makes at most as many items as
/// the i-th of chunk_limits().
///
/// Greedy dispatch finishes by min(waves * chunk, ideal + chunk), ideal being the work of a slot under perfect balance.
/// The longest chunk that holds this to 1.25 * ideal wins, else the one that finishes earliest. Cutting at ideal / 2
/// adds at most two waves of items, and so many are allowed: so a decode batch never takes more than 1.5 * ideal, or
/// ideal and one least chunk where that is longer. Where the costs of cutting are known, the chunk that finishes
/// earliest with them wins, unless a longer one is within 1.04 * ideal.
template <class Shortest>
FIW_HOST_DEVICE std::int32_t choose_chunk(const Shortest& shortest, const ChunkTotals& totals, std::int32_t least,
                                          const ChunkRule& rule) {
  constexpr double kGoodBalance = 1.25;
  constexpr double kGoodFinish = 1.04;
  if (rule.uncut_items == 0 || totals.longest <= least) return totals.longest;

  const bool reckoned = rule.merge_pages > 0;
  const double ideal = totals.visible_pages * rule.slot_share;
  const auto finish = [&](double waves, std::int32_t pages) {
    const double in_waves = waves * pages;
    const double in_order = ideal + pages;
    const double reading = in_waves < in_order ? in_waves : in_order;
    if (!reckoned) return reading;
    float more = waves > 1 ? 0 : rule.lone_pages + rule.lone_share * static_cast<float>(pages);
    if (pages < totals.longest) {
      more += rule.cut_pages + rule.merge_pages * (static_cast<float>(totals.longest) / static_cast<float>(pages));
    }
    return reading + more;
  };
  const double enough = (reckoned ? kGoodFinish : kGoodBalance) * ideal;
  std::int32_t best_chunk = totals.longest;
  double best_finish = finish(rule.uncut_waves, best_chunk);
  for (int i = 0; i < ChunkRule::kLimits && best_finish > enough; ++i) {
    const std::int32_t chunk = rule.in_steps(shortest(i), totals.longest);
    const double candidate = finish(rule.waves[i], chunk);
    if (candidate < best_finish) {
      best_finish = candidate;
      best_chunk = chunk;
    }
  }
  return best_chunk;
}

}  // namespace fiw
