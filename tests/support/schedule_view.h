// Reading planned schedules in tests: typed arrays over the bytes, and what the items mean to each kernel family.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <queue>
#include <span>
#include <vector>

#include "plan/planner.h"

namespace fiw::test {

/// A planned schedule with the memory that holds it. The memory is poisoned before it is written, and guarded behind.
struct Planned {
  ScheduleShape shape;
  std::vector<std::int32_t> memory;

  static constexpr std::int32_t kPoison = -0x55555556;

  Planned(KernelFamily family, const DeviceProps& device, const WorkLoad& work, const SplitPolicy& policy)
      : shape(shape_schedule(family, device, work, policy)), memory(shape.bytes / 4 + 16, kPoison) {
    write_schedule(shape, work, std::as_writable_bytes(std::span(memory)).first(shape.bytes));
  }

  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(memory)).first(shape.bytes); }
  std::span<const std::int32_t> ints(std::size_t offset, std::size_t count) const {
    return std::span(memory).subspan(offset / 4, count);
  }
  std::span<const std::int32_t> requests() const { return ints(shape.request_indices, padded()); }
  std::span<const std::int32_t> qo_tiles() const { return ints(shape.qo_tile_indices, padded()); }
  std::span<const std::int32_t> kv_tiles() const { return ints(shape.kv_tile_indices, padded()); }
  std::span<const std::int32_t> o_indptr() const {
    return ints(shape.o_indptr, static_cast<std::size_t>(shape.padded_batch) + 1);
  }
  std::span<const std::int32_t> merge_indptr() const {
    return ints(shape.merge_indptr, shape.split_kv ? static_cast<std::size_t>(shape.padded_rows) + 1 : 0);
  }
  std::int32_t kv_chunk() const { return memory[shape.kv_chunk_size / 4]; }
  std::int32_t total_num_rows() const { return memory[shape.total_num_rows / 4]; }
  std::span<const std::int32_t> arrivals() const {
    return ints(shape.arrivals, (shape.block_valid_mask - shape.arrivals) / 4);
  }
  std::span<const std::byte> mask() const {
    return bytes().subspan(shape.block_valid_mask, shape.graph ? padded() : 0);
  }
  bool guard_intact() const {
    return std::all_of(memory.end() - 16, memory.end(), [](std::int32_t word) { return word == kPoison; });
  }

 private:
  std::size_t padded() const { return static_cast<std::size_t>(shape.padded_items); }
};

/// Keys [begin, end).
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
};

/// What row p of a request may attend to, by the definition of causal and window.
inline KeyRange visible_keys(const WorkLoad& work, std::int64_t qo_len, std::int64_t kv_len, std::int64_t p) {
  const std::int64_t q_pos = kv_len - qo_len + p;
  KeyRange keys{0, kv_len};
  if (work.causal) keys.end = std::clamp<std::int64_t>(q_pos + 1, 0, kv_len);
  if (work.window_left >= 0) keys.begin = std::clamp<std::int64_t>(q_pos - work.window_left, 0, keys.end);
  return keys;
}

/// First and one past the last query token that a tile touches.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
inline TokenRange tile_tokens(const ScheduleShape& shape, const WorkLoad& work, std::int64_t qo_len,
                              std::int64_t tile) {
  if (shape.tile_rows == 0) return {0, qo_len};
  const std::int64_t group = work.group_size();
  const std::int64_t end = ((tile + 1) * shape.tile_rows + group - 1) / group;
  return {tile * shape.tile_rows / group, std::min(end, qo_len)};
}

/// The keys that a kernel of this family walks for a tile before they are cut into chunks.
inline KeyRange tile_keys(const ScheduleShape& shape, const WorkLoad& work, std::int64_t qo_len, std::int64_t kv_len,
                          std::int64_t tile) {
  const TokenRange tokens = tile_tokens(shape, work, qo_len, tile);
  switch (shape.family) {
    case KernelFamily::kCudaCore:
      return {0, kv_len};
    case KernelFamily::kTensorTile: {
      const std::int64_t window = work.window_left >= 0 ? work.window_left : kv_len;
      return {std::max<std::int64_t>(kv_len + tokens.begin - qo_len - window, 0), kv_len};
    }
    default:
      return {visible_keys(work, qo_len, kv_len, tokens.begin).begin,
              visible_keys(work, qo_len, kv_len, tokens.end - 1).end};
  }
}

/// The keys of one chunk of a tile.
inline KeyRange chunk_keys(const Planned& plan, const KeyRange& tile, std::int64_t chunk) {
  if (!plan.shape.split_kv) return tile;
  const std::int64_t size = plan.kv_chunk();
  return {std::min(tile.begin + chunk * size, tile.end), std::min(tile.begin + (chunk + 1) * size, tile.end)};
}

/// Finish time of items of these costs, `repeats` passes over them, handed in order to whichever of `workers` is free
/// first.
inline std::int64_t greedy_finish(std::span<const std::int64_t> costs, std::int64_t repeats, std::int64_t workers) {
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (std::int64_t w = 0; w < workers; ++w) free.push(0);
  std::int64_t finish = 0;
  for (std::int64_t pass = 0; pass < repeats; ++pass) {
    for (const std::int64_t cost : costs) {
      const std::int64_t end = free.top() + cost;
      free.pop();
      free.push(end);
      finish = std::max(finish, end);
    }
  }
  return finish;
}

/// Keys that each item walks when every request fills its pages.
inline std::vector<std::int64_t> item_costs(const Planned& plan, const WorkLoad& work) {
  std::vector<std::int64_t> costs;
  for (std::int32_t i = 0; i < plan.shape.items; ++i) {
    const std::int32_t r = plan.requests()[i];
    const std::int64_t kv_len = std::int64_t{work.kv_pages[r]} * work.page_size;
    KeyRange tile = tile_keys(plan.shape, work, work.qo_len(r), kv_len, plan.qo_tiles()[i]);
    KeyRange keys = chunk_keys(plan, tile, plan.kv_tiles()[i]);
    const TokenRange tokens = tile_tokens(plan.shape, work, work.qo_len(r), plan.qo_tiles()[i]);
    keys.end = std::min(keys.end, visible_keys(work, work.qo_len(r), kv_len, tokens.end - 1).end);
    costs.push_back(keys.size());
  }
  return costs;
}

}  // namespace fiw::test
