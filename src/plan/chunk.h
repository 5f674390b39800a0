// How long the KV chunks of a batch should be.
#pragma once

#include <cstdint>

#include "plan/tiling.h"

namespace fiw {

/// What runs items: `slots` at a time, every item `depth` times (once a KV head, or once).
struct Grid {
  std::int64_t slots = 1;
  std::int64_t depth = 1;
  std::int32_t min_chunk_pages = 1;

  Grid(KernelFamily family, const DeviceProps& device, const WorkLoad& work) noexcept;

  /// Items that splitting may add to a batch: two waves. See choose_chunk.
  std::int64_t spare_items() const noexcept { return 2 * slots / depth; }
};

/// Pages a chunk, so that items handed to the slots in order finish early; tiling.longest() where cutting would not
/// help.
///
/// Greedy dispatch finishes by min(waves * chunk, ideal + chunk), ideal being the work of a slot under perfect balance.
/// The longest chunk that holds this to 1.25 * ideal wins, else the one that finishes earliest. Cutting at ideal / 2
/// adds at most two waves of items, and so many are allowed: so a decode batch never takes more than 1.5 * ideal, or
/// ideal and one least chunk where that is longer.
std::int32_t choose_chunk(const Tiling& tiling, const Tiling::Totals& totals, const Grid& grid) noexcept;

}  // namespace fiw
