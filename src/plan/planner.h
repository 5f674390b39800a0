// Cutting one attention call into work items: pure host code, for any DeviceProps, deterministic, allocation-free.
//
// Two steps, so that memory is sized before it is written: `shape_*` computes counts and offsets, `write_*` fills
// memory of `shape.bytes`. The same input always gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/schedule.h"
#include "fiw/device_props.h"

namespace fiw {

/// One attention call as a planner sees it: counts, no pointers to data.
struct WorkLoad {
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  std::int32_t kv_element_bytes = 2;
  std::int32_t page_size = 1;
  std::int32_t window_left = -1;
  bool causal = true;
  std::span<const std::int32_t> kv_pages{};   ///< [batch]; for ragged K/V, lengths with page_size 1
  std::span<const std::int32_t> qo_indptr{};  ///< [batch + 1]; empty: every request has `uniform_qo_len` rows
  std::int32_t uniform_qo_len = 1;

  std::int32_t batch() const noexcept { return static_cast<std::int32_t>(kv_pages.size()); }
  std::int32_t group_size() const noexcept { return num_qo_heads / num_kv_heads; }
  std::int32_t qo_len(std::int32_t r) const noexcept {
    return qo_indptr.empty() ? uniform_qo_len : qo_indptr[r + 1] - qo_indptr[r];
  }
  std::int64_t total_rows() const noexcept {
    return qo_indptr.empty() ? static_cast<std::int64_t>(uniform_qo_len) * batch() : qo_indptr.back();
  }
};

/// How freely the planner may cut.
struct SplitPolicy {
  bool allow_split = true;
  std::int32_t fixed_chunk_tokens =
      0;               ///< > 0: batch-invariant; every request is cut at multiples of this (rounded up to pages)
  bool graph = false;  ///< fix the grid for `max_batch` requests, so that any later table fits it
  std::int32_t max_batch = 0;            ///< graph only; 0: the batch at hand
  std::size_t partial_limit = SIZE_MAX;  ///< kPrefill: most bytes of partial results
  std::int32_t max_pages = 0;  ///< graph only: page table entries of all requests, for a fixed split; 0: unknown
};

/// Shape of a split-KV schedule for any family but the Hopper ones. Throws fiw::Error when a count overflows int32.
ScheduleShape shape_schedule(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                             const SplitPolicy& policy);
/// Writes the arrays of `shape` into `out` (at least shape.bytes, 16-byte aligned). `work` is what the shape was made
/// for.
void write_schedule(const ScheduleShape& shape, const WorkLoad& work, std::span<std::byte> out);
/// Float scratch for the partial outputs (float32 [partial_rows, num_qo_heads, head_dim_vo]) and their LSE
/// (float32 [partial_rows, num_qo_heads]), each 16-byte aligned; 0 when not split. Throws kSizeOverflow when they are
/// more than a pointer difference holds.
std::size_t partial_bytes(const ScheduleShape& shape, std::int32_t num_qo_heads, std::int32_t head_dim_vo);

/// A shape whose `partial_rows` and `max_qo_len` are the worst over all work within the limits: up to `max_batch`
/// requests of up to `max_kv_pages` pages, with `max_total_rows` query rows in all (uniform windows of
/// `widest.uniform_qo_len` when that is > 0). Only for sizing (partial_bytes, Backend::scratch_bytes): its offsets mean
/// nothing. `widest` gives the heads, dims, page size, window and causality; its arrays are not read.
ScheduleShape worst_shape(KernelFamily family, const DeviceProps& device, const WorkLoad& widest,
                          std::int32_t max_batch, std::int32_t max_kv_pages, std::int64_t max_total_rows,
                          const SplitPolicy& policy);

/// Most partial results of a kPrefill schedule, and what one of them takes.
std::int64_t prefill_slots(const DeviceProps& device) noexcept;
std::size_t prefill_slot_bytes(std::int32_t tile_rows, std::int32_t head_dim_vo) noexcept;
/// Rows of a tile of the Hopper families: query tokens; kPrefill: packed (token, head-in-group) rows.
std::int32_t hopper_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              const SplitPolicy& policy) noexcept;
/// Work lists of the Hopper families: longest work first onto the least loaded SM. `kv_lens` [batch] are tokens.
HopperShape shape_hopper(KernelFamily family, std::int32_t tile_rows, const DeviceProps& device, const WorkLoad& work,
                         const SplitPolicy& policy);
/// Works in `scratch`, which grows to what it needs: the next plan of that size allocates nothing.
void write_hopper(KernelFamily family, std::int32_t tile_rows, const HopperShape& shape, const DeviceProps& device,
                  const WorkLoad& work, std::span<const std::int32_t> kv_indptr, std::span<const std::int32_t> kv_lens,
                  std::vector<std::byte>& scratch, std::span<std::byte> out);

}  // namespace fiw
