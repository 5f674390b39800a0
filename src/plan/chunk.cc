// The chunk search: a few candidate item counts, each with the shortest chunk that respects it.
#include "plan/chunk.h"

#include <algorithm>
#include <cmath>

namespace fiw {
namespace {

// Chunks shorter than this cost more in merging than they gain.
constexpr std::int32_t kMinCudaChunkTokens = 128;
constexpr std::int32_t kMinCpuChunkTokens = 256;
// Threads differ in speed from moment to moment, so a CPU gets several items a thread.
constexpr std::int64_t kCpuItemsPerThread = 4;
constexpr double kGoodBalance = 1.25;

// About the shortest chunk in [low, high] with at most `limit` items; `high` is known to respect it.
std::int32_t short_chunk(const Tiling& tiling, const Tiling::Totals& totals, std::int64_t limit, std::int32_t low,
                         std::int32_t high) noexcept {
  const std::int64_t extra = limit - totals.uncut_items;
  if (extra <= 0) return high;
  // items(c) is at least walked / c, and at least uncut - 1 + longest / c; it is at most uncut + walked / c.
  const auto most = [&](std::int64_t items, double pages) {
    low = std::max(low, static_cast<std::int32_t>(std::min<double>(high, pages / static_cast<double>(items))));
  };
  most(limit, totals.walked_pages);
  most(extra + 1, totals.longest);
  const double enough = std::ceil(totals.walked_pages / static_cast<double>(extra));
  if (enough < high) high = std::max(low, static_cast<std::int32_t>(enough));
  if (tiling.items(low) <= limit) return low;
  while (high - low > low / 32) {
    const std::int32_t middle = low + (high - low) / 2;
    if (tiling.items(middle) > limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return high;
}

}  // namespace

Grid::Grid(KernelFamily family, const DeviceProps& device, const WorkLoad& work) noexcept {
  const std::int64_t workers = std::max(device.num_workers, 1);
  std::int32_t min_tokens = kMinCudaChunkTokens;
  switch (family) {
    case KernelFamily::kCpuStream:
    case KernelFamily::kCpuTile:
      slots = workers * kCpuItemsPerThread;
      min_tokens = kMinCpuChunkTokens;
      break;
    case KernelFamily::kCudaCore:
      slots = workers * std::max(device.decode_blocks_per_sm, 1);
      break;
    case KernelFamily::kTensorTile:
    case KernelFamily::kHopper:
    case KernelFamily::kHopperPaged:
      slots = workers * std::max(device.tile_blocks_per_sm, 1);
      break;
  }
  depth = family == KernelFamily::kCpuStream ? 1 : work.num_kv_heads;
  min_chunk_pages = std::max(min_tokens / work.page_size, 1);
}

std::int32_t choose_chunk(const Tiling& tiling, const Tiling::Totals& totals, const Grid& grid) noexcept {
  const std::int64_t uncut = totals.uncut_items;
  std::int32_t chunk = totals.longest;
  if (uncut == 0 || chunk <= grid.min_chunk_pages) return chunk;

  const double ideal = totals.visible_pages * static_cast<double>(grid.depth) / static_cast<double>(grid.slots);
  const auto finish = [&](std::int64_t items, std::int32_t pages) {
    const std::int64_t waves = ceil_div(items * grid.depth, grid.slots);
    return std::min(static_cast<double>(waves) * pages, ideal + pages);
  };
  std::int32_t best_chunk = chunk;
  double best_finish = finish(uncut, chunk);
  const std::int64_t waves = ceil_div(uncut * grid.depth, grid.slots);
  for (const std::int64_t limit :
       {waves * grid.slots / grid.depth, (waves + 1) * grid.slots / grid.depth, uncut + grid.spare_items()}) {
    if (best_finish <= kGoodBalance * ideal) break;
    const std::int32_t longer = chunk;
    chunk = short_chunk(tiling, totals, limit, grid.min_chunk_pages, chunk);
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
