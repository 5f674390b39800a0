// Tile sizes by kernel family, and what a tile sees. The facts about FlashInfer's kernels that the planners rely on are
// here.
#include "plan/tiling.h"

namespace fiw {
namespace {

constexpr std::int64_t kAnyLength = std::numeric_limits<std::int64_t>::max();

// The tile heights that the FA2 kernels are built for, and the conditions under which each one fits registers and
// shared memory.
std::int32_t tensor_tile_rows(const DeviceProps& device, const WorkLoad& work, std::int64_t packed_len) noexcept {
  if (work.head_dim_vo >= 512) return packed_len <= 32 ? 16 : 32;
  if (work.head_dim_qk >= 512) return 16;
  if (packed_len > 64 && work.head_dim_vo < 256) return 128;
  if (packed_len > 16 || device.compute_capability < 80) return 64;
  // 16 rows leave the four warps to share the keys: one step of 64 keys has to fit beside the queries.
  const std::int64_t q_bytes = std::int64_t{16} * work.head_dim_qk * 2;
  const std::int64_t kv_bytes = (std::int64_t{work.head_dim_qk} + work.head_dim_vo) * 16 * 4 * work.kv_element_bytes;
  return q_bytes + kv_bytes > device.max_shared_bytes ? 64 : 16;
}

}  // namespace

std::int32_t choose_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              std::int64_t packed_len) noexcept {
  switch (family) {
    case KernelFamily::kCpuTile:
      return kCpuTileRows;
    case KernelFamily::kTensorTile:
      return tensor_tile_rows(device, work, packed_len);
    case KernelFamily::kCpuStream:
    case KernelFamily::kCudaCore:
    case KernelFamily::kHopper:
    case KernelFamily::kHopperPaged:
    case KernelFamily::kPrefill:
    case KernelFamily::kCudaStream:
      break;
  }
  return 0;
}

std::int32_t choose_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              const SplitPolicy& policy) noexcept {
  std::int64_t packed_len = 0;
  if (work.qo_indptr.empty()) {
    packed_len = std::int64_t{work.uniform_qo_len} * work.group_size();
  } else if (policy.fixed_chunk_tokens > 0) {
    packed_len = kAnyLength;
  } else if (policy.graph) {
    packed_len = work.total_rows() * work.group_size();  // any request may come to hold all rows
  } else {
    packed_len = work.total_rows() * work.group_size() / std::max(work.batch(), 1);
  }
  return choose_tile_rows(family, device, work, packed_len);
}

Tiling::Tiling(KernelFamily family, const WorkLoad& work, std::int32_t tile_rows) noexcept
    : work_(work), family_(family), tile_rows_(tile_rows) {
  if (uniform()) {
    uniform_tiles_ = tiles_of(work.uniform_qo_len);
    uniform_reach_ = reach_of(work.uniform_qo_len);
  }
}

Tiling::Totals Tiling::totals() const noexcept {
  Totals totals;
  const auto spared = [&](std::int32_t pages, std::int32_t rows) { return 0.5 * std::min(pages, spared_span(rows)); };
  if (uniform() && spared_span(work_.uniform_qo_len) == 0) {
    if (uniform_tiles_ == 0) return totals;
    std::int64_t pages = 0;
    for (const std::int32_t count : work_.kv_pages) {
      const std::int32_t walked = std::min(std::max(count, 1), uniform_reach_);
      pages += walked;
      totals.longest = std::max(totals.longest, walked);
    }
    totals.uncut_items = std::int64_t{uniform_tiles_} * batch();
    totals.walked_pages = totals.visible_pages = static_cast<double>(uniform_tiles_) * static_cast<double>(pages);
    totals.max_qo_len = batch() > 0 ? work_.uniform_qo_len : 0;
    return totals;
  }
  for (std::int32_t r = 0; r < batch(); ++r) {
    const std::int32_t rows = qo_len(r);
    const std::int32_t count = tiles(r);
    if (count == 0) continue;
    const std::int32_t walked = pages(r);
    totals.uncut_items += count;
    totals.walked_pages += static_cast<double>(count) * walked;
    totals.visible_pages += count * (walked - spared(walked, rows));
    totals.longest = std::max(totals.longest, walked);
    totals.max_qo_len = std::max(totals.max_qo_len, rows);
  }
  return totals;
}

std::int32_t Tiling::tiles_of(std::int32_t qo_len) const noexcept {
  if (tile_rows_ == 0) return qo_len > 0 ? 1 : 0;
  // Group sizes reach 64 and more, so the packed length may leave 32 bits; the tile count then fits again.
  return static_cast<std::int32_t>(ceil_div(std::int64_t{qo_len} * work_.group_size(), std::int64_t{tile_rows_}));
}

std::int32_t Tiling::reach_of(std::int32_t qo_len) const noexcept {
  // The CUDA-core kernel walks all keys and masks.
  if (work_.window_left < 0 || family_ == KernelFamily::kCudaCore) return std::numeric_limits<std::int32_t>::max();
  std::int64_t rows = qo_len;
  if (family_ == KernelFamily::kTensorTile) {
    rows = tile_rows_;  // what the kernel itself reckons with, whatever the group size
  } else if (family_ == KernelFamily::kCpuTile && work_.causal) {
    // Tokens that a tile can touch when it starts inside a token's group of heads.
    const std::int64_t group = work_.group_size();
    rows = std::min(rows, (tile_rows_ + group - 2) / group + 1);
  }
  const std::int64_t pages = ceil_div(work_.window_left + rows, std::int64_t{work_.page_size});
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(pages, 1, std::numeric_limits<std::int32_t>::max()));
}

std::int64_t Tiling::items(std::int32_t chunk_pages) const noexcept {
  const FastDiv chunk(static_cast<std::uint32_t>(chunk_pages));
  std::int64_t items = 0;
  if (uniform()) {
    for (const std::int32_t pages : work_.kv_pages) {
      items += chunk.ceil(static_cast<std::uint32_t>(std::min(std::max(pages, 1), uniform_reach_)));
    }
    return items * uniform_tiles_;
  }
  for (std::int32_t r = 0; r < batch(); ++r) {
    items += std::int64_t{tiles(r)} * chunk.ceil(static_cast<std::uint32_t>(pages(r)));
  }
  return items;
}

}  // namespace fiw
