// FlashInfer's CUDA-core decode kernel for the group sizes it is built for.
#pragma once

#include <algorithm>
#include <array>
#include <flashinfer/attention/decode.cuh>

#include "cuda/decode/core.h"
#include "cuda/fa2/params.cuh"
#include "cuda/fa2/variant.cuh"

namespace fiw::cuda {

template <class Q, class Kv, std::uint32_t kHeadDim, std::uint32_t kGroup, bool kOptions>
struct CoreInstance {
  static constexpr std::uint32_t kStages = 2;
  static constexpr std::uint32_t kVector = std::max<std::uint32_t>(16 / sizeof(Kv), kHeadDim / 32);
  static constexpr std::uint32_t kX = kHeadDim / kVector;
  static constexpr std::uint32_t kThreads = std::max(128U, kX* kGroup);
  static constexpr std::uint32_t kZ = kThreads / (kX * kGroup);
  static constexpr std::uint32_t kTile = kGroup == 1 ? (sizeof(Kv) == 1 ? 2 : 4) : 1;
  // K and V stages, which later hold the partial outputs; then page offsets, which later hold their (m, d).
  static constexpr std::size_t kSharedBytes =
      std::max<std::size_t>(std::size_t{2} * kStages * kTile * kGroup * kZ * kHeadDim * sizeof(Kv),
                            std::size_t{kZ} * kGroup * kHeadDim * sizeof(float)) +
      std::max<std::size_t>(std::size_t{kTile} * kThreads * sizeof(std::size_t),
                            std::size_t{2} * kGroup * kZ * sizeof(float));

  using Params = PagedParams<Q, Kv>;

  static constexpr auto function() {
    return &flashinfer::BatchDecodeWithPagedKVCacheKernel<flashinfer::PosEncodingMode::kNone, kStages, kTile, kVector,
                                                          kX, kGroup, kZ, CoreVariant<kOptions>, Params>;
  }

  static cudaError_t launch(const AttentionArgs& args, cudaStream_t stream) {
    Params params(args);
    const dim3 grid(static_cast<unsigned>(args.items), static_cast<unsigned>(args.kv.num_kv_heads));
    const dim3 block(kX, kGroup, kZ);
    void* arguments[] = {&params};
    return cudaLaunchKernel(reinterpret_cast<const void*>(function()), grid, block, arguments, kSharedBytes, stream);
  }

  static CoreKernel describe() {
    return {.group_size = static_cast<std::int32_t>(kGroup),
            .options = kOptions,
            .function = reinterpret_cast<const void*>(function()),
            .shared_bytes = kSharedBytes,
            .threads = static_cast<std::int32_t>(kX * kGroup * kZ),
            .launch = &launch};
  }
};

template <class Q, class Kv, std::uint32_t kHeadDim>
std::span<const CoreKernel> core_kernels() {
  static const std::array kernels = {
      CoreInstance<Q, Kv, kHeadDim, 1, false>::describe(), CoreInstance<Q, Kv, kHeadDim, 1, true>::describe(),
      CoreInstance<Q, Kv, kHeadDim, 2, false>::describe(), CoreInstance<Q, Kv, kHeadDim, 2, true>::describe(),
      CoreInstance<Q, Kv, kHeadDim, 4, false>::describe(), CoreInstance<Q, Kv, kHeadDim, 4, true>::describe(),
      CoreInstance<Q, Kv, kHeadDim, 8, false>::describe(), CoreInstance<Q, Kv, kHeadDim, 8, true>::describe()};
  return kernels;
}

}  // namespace fiw::cuda
