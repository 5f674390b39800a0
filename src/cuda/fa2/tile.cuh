// FlashInfer's FA2 prefill kernels at each query-tile height: tile shapes fixed at compile time, so that a launch asks
// the driver nothing.
#pragma once

#include <array>
#include <flashinfer/attention/prefill.cuh>

#include "cuda/fa2/params.cuh"
#include "cuda/fa2/tile.h"
#include "cuda/fa2/variant.cuh"

namespace fiw::cuda {

/// Shared memory that a tile may take so that two blocks share a multiprocessor on every built architecture.
inline constexpr std::size_t kTileSharedBytes = FIW_TILE_SHARED_BYTES;

template <class Q, class Kv, int kHeadDimQk, int kHeadDimVo, TileVariant kVariant>
struct TileConfig {
  static constexpr bool kOptions = kVariant == TileVariant::kCausalOptions || kVariant == TileVariant::kMasked;
  static constexpr bool kMasked = kVariant == TileVariant::kMasked;
  static constexpr flashinfer::MaskMode kMaskMode = kMasked                           ? flashinfer::MaskMode::kCustom
                                                    : kVariant == TileVariant::kPlain ? flashinfer::MaskMode::kNone
                                                                                      : flashinfer::MaskMode::kCausal;

  // FlashInfer's layout of warps. It has tiles of 32 rows for head_dim 512 alone, two by two warps: at 128, windows of
  // a few tokens took less time by them, but came out wrong where a sanitizer slowed the warps down.
  static constexpr std::uint32_t mmas(std::uint32_t rows) { return rows == 32 ? 1 : flashinfer::get_num_mma_q(rows); }
  static constexpr std::uint32_t warps_q(std::uint32_t rows) {
    return rows == 32 ? 2 : flashinfer::get_num_warps_q(rows);
  }

  template <std::uint32_t kRows, std::uint32_t kSteps>
  using Traits =
      flashinfer::KernelTraits<kMaskMode, kRows, mmas(kRows), kSteps, kHeadDimQk / 16, kHeadDimVo / 16, warps_q(kRows),
                               4 / warps_q(kRows), flashinfer::PosEncodingMode::kNone, Q, Kv, Q, float, std::int32_t,
                               Variant<kOptions, kMasked>, flashinfer::kPrefillLauncherRepacksFp4>;

  template <std::uint32_t kRows, std::uint32_t kSteps>
  static constexpr bool fits() {
    using T = Traits<kRows, kSteps>;
    if constexpr (T::IsInvalid() || (kRows == 32 && kHeadDimVo != 512) || kSteps > 8 / mmas(kRows)) {
      return false;
    } else {
      return sizeof(typename T::SharedStoragePaged) <= kTileSharedBytes &&
             sizeof(typename T::SharedStorage) <= kTileSharedBytes;
    }
  }

  /// Steps of 16 keys a warp takes at once: as many as shared memory and registers allow; 0: the height does not fit.
  template <std::uint32_t kRows>
  static constexpr std::uint32_t steps() {
    return fits<kRows, 8>() ? 8 : fits<kRows, 4>() ? 4 : fits<kRows, 2>() ? 2 : fits<kRows, 1>() ? 1 : 0;
  }
};

template <class Config, std::uint32_t kRows, bool kPaged, class Q, class Kv>
struct TileInstance {
  using Traits = typename Config::template Traits<kRows, Config::template steps<kRows>()>;
  using Params = std::conditional_t<kPaged, PagedParams<Q, Kv>, RaggedParams<Q, Kv>>;
  static constexpr bool kSplitsValues = kPaged ? Traits::USE_VO_SPLIT : Traits::USE_SOFTMAX_VO_SPLIT;
  using Storage =
      std::conditional_t<kPaged || kSplitsValues, typename Traits::SharedStoragePaged, typename Traits::SharedStorage>;

  static constexpr auto function() {
    if constexpr (kPaged) {
      return &flashinfer::BatchPrefillWithPagedKVCacheKernel<false, Traits, Params>;
    } else {
      return &flashinfer::BatchPrefillWithRaggedKVCacheKernel<Traits, Params>;
    }
  }

  static cudaError_t launch(const AttentionArgs& args, cudaStream_t stream) {
    Params params(args);
    const dim3 grid(static_cast<unsigned>(args.items), 1, static_cast<unsigned>(args.kv.num_kv_heads));
    const dim3 block(32, Traits::NUM_WARPS_Q, Traits::NUM_WARPS_KV);
    void* arguments[] = {&params};
    return cudaLaunchKernel(reinterpret_cast<const void*>(function()), grid, block, arguments, sizeof(Storage), stream);
  }

  static TileKernel describe() {
    return {.rows = kRows,
            .paged = kPaged,
            .finishes = !kSplitsValues,
            .function = reinterpret_cast<const void*>(function()),
            .shared_bytes = sizeof(Storage),
            .threads = Traits::NUM_THREADS,
            .launch = &launch};
  }
};

/// All heights that fit, paged and ragged.
template <class Q, class Kv, int kHeadDimQk, int kHeadDimVo, TileVariant kVariant>
std::span<const TileKernel> tile_kernels() {
  using Config = TileConfig<Q, Kv, kHeadDimQk, kHeadDimVo, kVariant>;
  static const auto kernels = [] {
    std::array<TileKernel, 8> all{};
    std::size_t count = 0;
    const auto add = [&]<std::uint32_t kRows>() {
      if constexpr (Config::template steps<kRows>() > 0) {
        all[count++] = TileInstance<Config, kRows, true, Q, Kv>::describe();
        all[count++] = TileInstance<Config, kRows, false, Q, Kv>::describe();
      }
    };
    add.template operator()<16>();
    add.template operator()<32>();
    add.template operator()<64>();
    add.template operator()<128>();
    return std::pair(all, count);
  }();
  return {kernels.first.data(), kernels.second};
}

}  // namespace fiw::cuda
