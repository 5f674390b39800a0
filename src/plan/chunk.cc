// What a grid holds on each kind of device, and the chunk search on the host.
#include "plan/chunk.h"

#include <algorithm>

namespace fiw {
namespace {

// Chunks shorter than this cost more in merging than they gain.
constexpr std::int32_t kMinCudaChunkTokens = 128;
constexpr std::int32_t kMinCpuChunkTokens = 256;
// The stream kernel's shared memory is made for this many, and a chunk more takes its blocks as long as some tokens do:
// on an H200, requests of 512, 4096 and 32,768 tokens alone took least time in chunks of 128, 256 and 512 to 700.
constexpr std::int64_t kStreamBlocksPerSm = 2;
constexpr float kStreamMergeTokens = 16;
// Threads differ in speed from moment to moment, so a CPU gets several items a thread.
constexpr std::int64_t kCpuItemsPerThread = 4;

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
    case KernelFamily::kPrefill:
      slots = workers * std::max(device.tile_blocks_per_sm, 1);
      break;
    case KernelFamily::kCudaStream:
      slots = workers * kStreamBlocksPerSm;
      merge_pages = kStreamMergeTokens / static_cast<float>(work.page_size);
      break;
  }
  depth = family == KernelFamily::kCpuStream ? 1 : work.num_kv_heads;
  min_chunk_pages = std::max(min_tokens / work.page_size, 1);
}

std::int32_t choose_chunk(const Tiling& tiling, const Tiling::Totals& totals, const Grid& grid) noexcept {
  const ChunkRule rule(totals.uncut_items, grid);
  const ChunkLimits limits = chunk_limits(totals.uncut_items, grid);
  const std::int32_t least = rule.least_chunk(totals.longest);
  std::int32_t high = chunk_index(totals.longest) + 1;
  const auto shortest = [&](int i) {
    const std::int64_t limit = limits[static_cast<std::size_t>(i)];
    const std::int64_t extra = limit - rule.uncut_items;
    std::int32_t low = chunk_index(least);
    // items(c) is at least walked / c, and at least uncut - 1 + longest / c; it is at most uncut + walked / c.
    const auto raise = [&](double pages, std::int64_t most) {
      const double bound = std::min<double>(totals.longest, pages / static_cast<double>(most));
      low = std::max(low, chunk_index(static_cast<std::int32_t>(bound)));
    };
    raise(totals.walked_pages, limit);
    raise(totals.longest, extra + 1);
    const double enough = totals.walked_pages / static_cast<double>(extra);
    if (enough < totals.longest) high = std::min(high, chunk_index(static_cast<std::int32_t>(enough) + 1) + 1);
    while (low < high) {
      const std::int32_t middle = low + (high - low) / 2;
      if (tiling.items(nth_chunk(middle, least, totals.longest)) > limit) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return nth_chunk(high, least, totals.longest);
  };
  return choose_chunk(shortest, {.visible_pages = totals.visible_pages, .longest = totals.longest}, least, rule);
}

}  // namespace fiw
