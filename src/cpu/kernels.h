// What the SIMD files offer, and how much scratch each thread of theirs takes. No SIMD header leaks through here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/schedule.h"
#include "cpu/fetch.h"
#include "cpu/job.h"

namespace fiw::cpu {

/// Runs one work unit on one thread's scratch (64-byte aligned).
using UnitKernel = void (*)(const Job& job, std::int64_t unit, std::byte* scratch);

constexpr std::size_t align_scratch(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

/// The few-row kernel: a unit is an item, for all heads, so that memory is read as it lies whatever the layout.
UnitKernel stream_kernel(DType kv_dtype);

/// Most packed (token, head-in-group) rows a request that the few-row kernel is given.
inline constexpr std::int32_t kStreamMaxRows = 32;

/// Offsets into a thread's scratch for the few-row kernel.
struct StreamScratch {
  std::size_t q = 0;            ///< float [num_kv_heads, padded rows, head_dim_qk], scaled
  std::size_t acc = 0;          ///< float [num_kv_heads, padded rows, head_dim_vo]
  std::size_t top = 0;          ///< float [num_kv_heads, tiles, 4], highest logits so far
  std::size_t sum = 0;          ///< float [num_kv_heads, tiles, 4], sums of weights
  std::size_t logits = 0;       ///< float [num_kv_heads, padded rows, kLogits]
  std::size_t added = 0;        ///< bool [num_kv_heads, tiles]
  std::size_t offsets = 0;      ///< int64 [2 (this block, the next), 2 (K, V), kBlock]
  std::size_t ahead = 0;        ///< MemoryRun [2 (this block, the next), 2 (K, V), num_kv_heads * kBlock], to fetch
  std::size_t spare_ahead = 0;  ///< as ahead
  std::size_t visible = 0;      ///< uint64 [query tokens], a bit a key of the block
  std::size_t rows = 0;         ///< uint16 [kStep, max(head_dim_qk, head_dim_vo)], fp8 rows as bfloat16
  std::size_t row_offsets = 0;  ///< int64 [kStep], into rows
  std::size_t bytes = 0;

  static constexpr std::int32_t kStep = 24;    ///< keys that every tile can take, each so many at once
  static constexpr std::int32_t kBlock = 48;   ///< keys between two looks at the softmax
  static constexpr std::int32_t kLogits = 64;  ///< a row's logits of a block, and room for keys that do not exist
  /// Tiles have 1, 2 or 4 rows.
  static constexpr std::int32_t padded(std::int32_t rows) noexcept { return rows % 4 == 3 ? rows + 1 : rows; }

  StreamScratch(const AttentionParams& params, std::int32_t max_qo_len) noexcept {
    const auto place = [this](std::size_t count, std::size_t element) {
      const std::size_t offset = bytes;
      bytes += align_scratch(count * element);
      return offset;
    };
    const auto heads = static_cast<std::size_t>(params.num_kv_heads);
    const std::int32_t packed = max_qo_len * (params.num_qo_heads / params.num_kv_heads);
    const std::size_t row_slots = heads * padded(packed);
    q = place(row_slots * params.head_dim_qk, sizeof(float));
    acc = place(row_slots * params.head_dim_vo, sizeof(float));
    top = place(heads * packed * 4, sizeof(float));
    sum = place(heads * packed * 4, sizeof(float));
    logits = place(row_slots * kLogits, sizeof(float));
    added = place(heads * packed, sizeof(bool));
    offsets = place(std::size_t{4} * kBlock, sizeof(std::int64_t));
    ahead = place(heads * kBlock * 4, sizeof(MemoryRun));
    spare_ahead = place(heads * kBlock * 4, sizeof(MemoryRun));
    visible = place(static_cast<std::size_t>(max_qo_len), sizeof(std::uint64_t));
    rows = place(std::size_t{kStep} * std::max(params.head_dim_qk, params.head_dim_vo), sizeof(std::uint16_t));
    row_offsets = place(std::size_t{kStep}, sizeof(std::int64_t));
  }
};

/// The many-row kernel: a unit is (item, KV head).
UnitKernel tile_kernel(DType kv_dtype);

/// Widest panel of rows: three vectors of the widest target.
inline constexpr std::int32_t kMaxPanelRows = 48;
/// Keys that a block of keys is requested ahead of its use.
inline constexpr std::int32_t kTileKeysAhead = 32;

struct TileScratch {
  std::int32_t block = 0;   ///< keys a step
  std::size_t q = 0;        ///< float [tile_rows * head_dim_qk], panels of [head_dim_qk, panel rows], scaled
  std::size_t acc = 0;      ///< float [tile_rows * head_dim_vo], panels of [head_dim_vo, panel rows]
  std::size_t k = 0;        ///< float [block, head_dim_qk]
  std::size_t v = 0;        ///< float [head_dim_vo / 4, block, 4]
  std::size_t weights = 0;  ///< float [block, panel rows]
  std::size_t visible = 0;  ///< uint32 [block, panel rows], all ones where a row sees a key
  std::size_t lanes = 0;    ///< struct of arrays, see tile.cc
  std::size_t row = 0;      ///< float [max(head_dim_qk, head_dim_vo)]
  std::size_t offsets = 0;  ///< int64 [2 (K, V), block + kTileKeysAhead]
  std::size_t bytes = 0;

  explicit TileScratch(const AttentionParams& params) noexcept {
    // The block's K and V as floats are to stay in the second-level cache.
    constexpr std::int64_t kBlockFloats = 32 << 10;
    block = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(kBlockFloats / (params.head_dim_qk + params.head_dim_vo) / 16 * 16, 32, 128));
    const auto place = [this](std::size_t count, std::size_t element) {
      const std::size_t offset = bytes;
      bytes += align_scratch(count * element);
      return offset;
    };
    const auto dim_qk = static_cast<std::size_t>(params.head_dim_qk);
    const auto dim_vo = static_cast<std::size_t>(params.head_dim_vo);
    const auto keys = static_cast<std::size_t>(block);
    q = place(kCpuTileRows * dim_qk, sizeof(float));
    acc = place(kCpuTileRows * dim_vo, sizeof(float));
    k = place(keys * dim_qk, sizeof(float));
    v = place(keys * dim_vo, sizeof(float));
    weights = place(keys * kMaxPanelRows, sizeof(float));
    visible = place(keys * kMaxPanelRows, sizeof(std::uint32_t));
    lanes = place(std::size_t{kCpuTileRows} * 5, sizeof(float));
    row = place(std::max(dim_qk, dim_vo), sizeof(float));
    offsets = place((keys + kTileKeysAhead) * 2, sizeof(std::int64_t));
  }
};

/// Merges the partial outputs of one query row, all heads, in the order of their chunks.
using PartialMergeKernel = void (*)(const Job& job, std::int32_t row);
PartialMergeKernel partial_merge_kernel(DType out_dtype);

/// Merges one row of a launch, all heads.
using StateMergeKernel = void (*)(const MergeLaunch& launch, std::int64_t row);
StateMergeKernel state_merge_kernel(DType dtype);

/// Converts `count` elements (a multiple of 8) of `from`, divided by `scale`.
using ConvertKernel = void (*)(const void* from, std::int32_t count, float scale, void* to);
ConvertKernel convert_kernel(DType from, DType to);

}  // namespace fiw::cpu
