// What a grid holds on each kind of device, and the chunk search on the host.
#include "plan/chunk.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace fiw {
namespace {

// Chunks shorter than this cost more in merging than they gain.
constexpr std::int32_t kMinCudaChunkTokens = 128;
constexpr std::int32_t kMinCpuChunkTokens = 256;
// The stream kernel, in tokens that a multiprocessor reads meanwhile, fitted to 130 shapes on an H200 in up to 30 chunk
// lengths each. Two blocks fit on a multiprocessor, but take as long as one of twice the length nearly does: its slots
// are whole multiprocessors. With 8/1 heads, requests of 512, 2048, 8192 and 32,768 tokens alone take least time in
// chunks of 64, 128, 256 and 512.
constexpr float kStreamMergeTokens = 8;
constexpr float kStreamCutTokens = 350;
constexpr float kStreamLoneTokens = 90;
constexpr float kStreamLoneShare = 0.04F;
constexpr std::int32_t kMinStreamChunkTokens = 64;
// Threads differ in speed from moment to moment, so a CPU gets several items a thread.
constexpr std::int64_t kCpuItemsPerThread = 4;

/// Tokens that a block of the stream kernel takes at once: a tile for each of its warps.
std::int32_t stream_step_tokens(const WorkLoad& work) noexcept {
  const std::int64_t row_bytes = std::int64_t{work.head_dim_qk} * work.kv_element_bytes;
  return row_bytes <= 128 ? 4 * 32 : row_bytes <= 256 ? 4 * 16 : 2 * 16;
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
    case KernelFamily::kPrefill:
      slots = workers * std::max(device.tile_blocks_per_sm, 1);
      break;
    case KernelFamily::kCudaStream: {
      slots = workers;
      const std::int32_t step_tokens = stream_step_tokens(work);
      min_tokens = std::max(step_tokens, kMinStreamChunkTokens);
      const auto pages_a_step = static_cast<std::uint32_t>(std::max(step_tokens / work.page_size, 1));
      step_pages = static_cast<std::int32_t>(std::bit_floor(pages_a_step));
      const auto page_tokens = static_cast<float>(work.page_size);
      merge_pages = kStreamMergeTokens / page_tokens;
      cut_pages = kStreamCutTokens / page_tokens;
      lone_pages = kStreamLoneTokens / page_tokens;
      lone_share = kStreamLoneShare;
      break;
    }
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
