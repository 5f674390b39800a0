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
constexpr double kStreamMergeTokens = 16;
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
      slots = workers * std::max(device.tile_blocks_per_sm, 1);
      break;
    case KernelFamily::kCudaStream:
      slots = workers * kStreamBlocksPerSm;
      merge_pages = kStreamMergeTokens / work.page_size;
      break;
  }
  depth = family == KernelFamily::kCpuStream ? 1 : work.num_kv_heads;
  min_chunk_pages = std::max(min_tokens / work.page_size, 1);
}

std::int32_t choose_chunk(const Tiling& tiling, const Tiling::Totals& totals, const Grid& grid) noexcept {
  return choose_chunk([&tiling](std::int32_t chunk_pages) { return tiling.items(chunk_pages); },
                      {.uncut_items = totals.uncut_items,
                       .walked_pages = totals.walked_pages,
                       .visible_pages = totals.visible_pages,
                       .longest = totals.longest},
                      static_cast<const GridSize&>(grid));
}

}  // namespace fiw
