// The steps that graph_steps measures and replays: one shape of layer, and a page table in device memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda_bench.h"
#include "fiw/page_table.h"
#include "fiw/workspace.h"

namespace fiw::bench {

inline constexpr int kDevice = 0;
inline constexpr std::int32_t kBatch = 64;
inline constexpr std::int32_t kQoHeads = 32;
inline constexpr std::int32_t kKvHeads = 8;
inline constexpr std::int32_t kHeadDim = 128;
inline constexpr std::int32_t kPageSize = 16;
inline constexpr std::int64_t kQoRow = std::int64_t{kQoHeads} * kHeadDim;  ///< elements of a token
inline constexpr std::int64_t kKvRow = std::int64_t{kKvHeads} * kHeadDim;
inline constexpr std::size_t kElement = size_of(DType::kBFloat16);

inline StepSpec layer_spec() {
  return {.params = {.num_qo_heads = kQoHeads, .num_kv_heads = kKvHeads, .head_dim_qk = kHeadDim}};
}

/// A page table in device memory, rewritten in place as an engine's kernels would.
class LiveArrays {
 public:
  explicit LiveArrays(std::int32_t max_pages)
      : max_pages_(max_pages), device_(bytes()), staging_{PinnedMemory(bytes()), PinnedMemory(bytes())} {
    check(cudaMemset(device_.data(), 0, bytes()), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  DevicePageTable view(std::int64_t num_pages) const {
    const auto* const ints = reinterpret_cast<const std::int32_t*>(device_.data());
    return {.page_size = kPageSize,
            .num_pages = num_pages,
            .indptr = {ints, kLast},
            .indices = {ints + kIndices, static_cast<std::size_t>(max_pages_)},
            .last_page_len = {ints + kLast, static_cast<std::size_t>(kBatch)}};
  }

  /// Enqueues the copy of `table`. Of three copies, the first must be done before the last is asked for.
  void put(const PageTable& table, cudaStream_t stream) {
    auto* const ints = reinterpret_cast<std::int32_t*>(staging_[next_].data());
    next_ = 1 - next_;
    std::fill(std::ranges::copy(table.indptr(), ints).out, ints + kLast, table.indptr().back());
    std::fill(std::ranges::copy(table.last_page_len(), ints + kLast).out, ints + kIndices, 0);
    const auto* const end = std::ranges::copy(table.indices(), ints + kIndices).out;
    check(cudaMemcpyAsync(device_.data(), ints, static_cast<std::size_t>(end - ints) * sizeof(std::int32_t),
                          cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
  }

 private:
  static constexpr std::size_t kLast = kBatch + 1;  ///< where last_page_len starts, and ...
  static constexpr std::size_t kIndices = kLast + kBatch;

  std::size_t bytes() const { return (kIndices + static_cast<std::size_t>(max_pages_)) * sizeof(std::int32_t); }

  const std::int32_t max_pages_;
  DeviceMemory device_;
  PinnedMemory staging_[2];
  std::size_t next_ = 0;
};

}  // namespace fiw::bench
