// The plan's arrays: how one attention call is cut into work items, in the form that FlashInfer's kernels read.
//
// A schedule is plain bytes in int scratch. `ScheduleShape` says how many of them there are and where each array
// starts; the planners in src/plan compute a shape first (no writes) and then write the arrays into memory of that
// size, so nothing is staged or allocated in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fiw {

/// Which kind of kernel reads the schedule. Fixes the tile shape and what the grid's second axis covers.
enum class KernelFamily : std::uint8_t {
  kCpuStream,    ///< CPU, few rows a request: an item streams a chunk of keys for all heads
  kCpuTile,      ///< CPU, many rows: an item is (query tile, KV chunk), once per KV head
  kCudaCore,     ///< FlashInfer's CUDA-core decode kernel
  kTensorTile,   ///< FlashInfer's FA2 tiles: prefill, verify and grouped decode
  kHopper,       ///< FlashInfer's FA3 kernel with its persistent per-SM work lists, over contiguous K and V
  kHopperPaged,  ///< the same over pages where they lie
  kCudaStream,   ///< our decode and verify kernel: a request of few rows is one tile
  kPrefill       ///< our prefill kernel, with the Hopper families' work lists, over pages or contiguous K and V
};

constexpr bool is_hopper(KernelFamily family) noexcept {
  return family == KernelFamily::kHopper || family == KernelFamily::kHopperPaged || family == KernelFamily::kPrefill;
}

/// kPrefill reads pages of a multiple of this many slots where they lie.
inline constexpr std::int32_t kPrefillPageSlots = 16;
/// Packed rows of a tile that one warp of kPrefill owns.
inline constexpr std::int32_t kPrefillWarpRows = 16;
/// Most parts into which kPrefill cuts the keys of a tile.
inline constexpr std::int32_t kMostPrefillParts = 16;
/// Most packed (token, head-in-group) rows of a request that kCudaStream takes.
inline constexpr std::int32_t kCudaStreamRows = 32;
/// Token slots in the pages of one table, up to which FlashInfer's kernels number them, in 32 bits.
inline constexpr std::int64_t kMostTableSlots = std::int64_t{1} << 32;
/// Packed (token, head-in-group) rows of a kCpuTile query tile: whole panels of 12, 24 and 48 rows.
inline constexpr std::int32_t kCpuTileRows = 288;
/// Most query tokens a request that kCpuStream takes; bounds the scratch it can ask for.
inline constexpr std::int32_t kCpuStreamMaxQoLen = 64;

/// Sizes and byte offsets of a Hopper schedule: one work list an SM, work_indptr delimiting them.
struct HopperShape {
  std::int32_t works = 0;
  std::int32_t padded_works = 0;
  std::size_t qo_tile_indices = 0;
  std::size_t qo_indptr = 0;
  std::size_t kv_indptr = 0;
  std::size_t qo_len = 0;
  std::size_t kv_len = 0;
  std::size_t head_indices = 0;
  std::size_t work_indptr = 0;  ///< [num_workers + 1]
  std::size_t batch_indices = 0;

  // kPrefill, where the keys of some tiles are cut into parts
  std::int32_t slots = 0;           ///< of partial results; 0: nothing is cut
  std::int32_t whole_tiles = 0;     ///< of a head, in the order of requests: left whole
  std::int32_t most_part_keys = 0;  ///< longer tiles are cut into parts of about so many keys
  std::size_t part_indices = 0;     ///< [works]
  std::size_t parts = 0;            ///< [works], of the work's tile
  std::size_t slot_indices = 0;     ///< [works], of its tile's first part
  std::size_t arrivals = 0;         ///< [slots * warps of a tile], zeros

  std::size_t bytes = 0;
};

/// Sizes and byte offsets of one split-KV schedule (every family but the Hopper ones). Offsets are 16-byte aligned.
///
/// Items: (request, query tile, KV chunk) triples. Partial rows: a request that is cut into n chunks writes n partial
/// outputs a row, at row o_indptr[request] + row * n + chunk; merge_indptr[row] .. merge_indptr[row + 1] are its
/// partials.
struct ScheduleShape {
  KernelFamily family = KernelFamily::kCpuStream;
  std::int32_t batch = 0;
  std::int32_t total_rows = 0;  ///< query tokens
  std::int32_t max_qo_len = 0;  ///< most query tokens of one request
  std::int32_t items = 0;
  std::int32_t padded_items = 0;  ///< == items unless the grid is fixed by a graph
  std::int32_t padded_batch = 0;  ///< == batch unless a graph leaves room for more; the room reads as empty requests
  std::int32_t padded_rows = 0;   ///< == total_rows unless a graph leaves room for more
  std::int32_t tile_rows = 0;     ///< packed (token, head-in-group) rows a tile, of FA3 tokens; 0: one tile a request
  std::int32_t kv_chunk_tokens = 0;  ///< whole pages, at most 2^31 - 1; the largest request's when not split
  std::int64_t partial_rows = 0;     ///< rows of partial outputs; 0 when not split
  std::int32_t max_chunks = 1;       ///< most chunks of one request
  bool split_kv = false;
  bool graph = false;

  // int32 arrays, then the mask of one byte an item
  std::size_t request_indices = 0;   ///< [padded_items]
  std::size_t qo_tile_indices = 0;   ///< [padded_items]
  std::size_t kv_tile_indices = 0;   ///< [padded_items]
  std::size_t o_indptr = 0;          ///< [padded_batch + 1]
  std::size_t merge_indptr = 0;      ///< [padded_rows + 1]; only when split
  std::size_t kv_chunk_size = 0;     ///< [1], tokens
  std::size_t total_num_rows = 0;    ///< [1]
  std::size_t arrivals = 0;          ///< [padded_batch * KV heads], zeros; kCudaStream only, and only when split
  std::size_t block_valid_mask = 0;  ///< [padded_items], 1 for a real item; only under a graph
  std::size_t bytes = 0;             ///< all of the above

  HopperShape hopper{};          ///< Hopper families only, which have none of the arrays above
  std::int64_t gathered_kv = 0;  ///< kHopper and kPrefill: tokens that are copied together first
};

}  // namespace fiw
