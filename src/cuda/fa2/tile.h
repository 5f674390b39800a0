// The tensor-core tile kernels as the host sees them: one flat argument block, one registry, no kernel header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "fiw/types.h"

namespace fiw::cuda {

/// Which keys a kernel leaves out. kMasked decides bit by bit at run time and serves what the others cannot.
enum class TileVariant : std::uint8_t { kPlain, kCausal, kCausalOptions, kMasked };

/// What every attention kernel reads of K and V: paged, or ragged where `indices` is null.
struct KvView {
  void* k = nullptr;
  void* v = nullptr;
  std::int32_t num_kv_heads = 0;
  std::int32_t page_size = 1;
  std::int64_t num_pages = 0;
  std::int64_t k_page = 0, k_token = 0, k_head = 0;  ///< strides in elements
  std::int64_t v_page = 0, v_token = 0, v_head = 0;
  const std::int32_t* indptr = nullptr;   ///< [batch + 1]; pages, or tokens where ragged
  const std::int32_t* indices = nullptr;  ///< [pages]
  const std::int32_t* last_page_len = nullptr;
};

/// One launch. Device pointers, except that the block itself is on the host.
struct AttentionArgs {
  void* q = nullptr;
  std::int64_t q_row = 0, q_head = 0;
  KvView kv{};
  void* out = nullptr;   ///< contiguous [rows, heads, dim]: results, or partial results where the keys are split
  float* lse = nullptr;  ///< natural logarithm where not split, else base 2
  const std::int32_t* qo_indptr = nullptr;
  std::int32_t batch = 0;
  std::int32_t num_qo_heads = 0;

  // the schedule's arrays
  const std::int32_t* request_indices = nullptr;
  const std::int32_t* qo_tile_indices = nullptr;
  const std::int32_t* kv_tile_indices = nullptr;
  const std::int32_t* o_indptr = nullptr;
  const std::int32_t* kv_chunk_size = nullptr;
  const std::uint8_t* block_valid = nullptr;
  std::int32_t items = 0;
  bool split_kv = false;

  bool causal = false;
  /// What the kernel may skip, and what the schedule counted with; -1: nothing.
  std::int32_t skip_window = -1;
  std::int32_t window_left = -1;
  float sm_scale = 1;
  float soft_cap = 0;
  float v_scale = 1;
  const float* k_head_scale = nullptr;
  const float* v_head_scale = nullptr;
  const float* sinks = nullptr;
  const float* alibi_slopes = nullptr;
  const std::uint8_t* mask = nullptr;
  const std::int32_t* mask_indptr = nullptr;
};

/// One tile height of one instantiation.
struct TileKernel {
  std::int32_t rows = 0;
  bool paged = true;
  /// Else every result is a partial one, without sinks and V's scales: where a block's warps share out the values.
  bool finishes = true;
  const void* function = nullptr;
  std::size_t shared_bytes = 0;
  std::int32_t threads = 0;
  cudaError_t (*launch)(const AttentionArgs& args, cudaStream_t stream) = nullptr;
};

/// What is built for one combination of types, head sizes and variant.
struct TileEntry {
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  TileVariant variant = TileVariant::kPlain;
  std::span<const TileKernel> (*kernels)() = nullptr;
};

/// Everything that this build holds, generated from kernels.json.
std::span<const TileEntry> tile_entries() noexcept;

}  // namespace fiw::cuda
