// FlashInfer's FA3 prefill kernel over contiguous K and V, and over pages.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <flashinfer/attention/hopper/attention_updater.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/cutlass_utils.cuh>
#include <limits>
#include <tuple>

#include "cuda/fa3/hopper.h"
#include "cuda/fa3/pages.cuh"
#include "cuda/soft_tanh.cuh"

namespace fiw::cuda {

/// What FlashInfer's parameter blocks have no place for.
struct HopperExtras {
  const std::int32_t* page_indptr = nullptr;
  float sm_scale = 1;
  float soft_cap = 0;
  float v_scale = 1;
  const float* k_head_scale = nullptr;
  const float* v_head_scale = nullptr;
  const float* sinks = nullptr;
};

/// FlashInfer's online softmax, whose last step lets the sink join the sum and gives the natural logarithm.
template <int kRows>
struct HopperUpdater : flashinfer::OnlineSoftmax<kRows, true> {
  using Base = flashinfer::OnlineSoftmax<kRows, true>;

  float sink_log2;

  CUTLASS_DEVICE HopperUpdater(float sm_scale_log2, float sink) : Base(sm_scale_log2), sink_log2(sink) {}

  template <class Scores>
  __forceinline__ __device__ void finalize(Scores&, float pv_scale = 1.0F) {
    flashinfer::SumOp<float> add;
    flashinfer::quad_allreduce_(this->row_sum, this->row_sum, add);
#pragma unroll
    for (int row = 0; row < cute::size(this->row_max); ++row) {
      const float sum = this->row_sum(row);
      const bool empty = sum == 0.0F;  // NaN is not
      const float top = this->row_max(row) * this->sm_scale_log2;
      const float new_top = fmaxf(top, sink_log2);
      const float shrink = exp2f(top - new_top);
      const float total = sum * shrink + exp2f(sink_log2 - new_top);
      this->scores_scale(row) = empty ? 0.0F : pv_scale * shrink / total;
      this->row_sum(row) = empty ? -flashinfer::math::inf : (new_top + log2f(total)) * flashinfer::math::loge2;
    }
  }
};

template <bool kSoftCap>
struct HopperLogits {
  float to_cap;  ///< from a dot product to a share of the cap
  float sm_scale_log2;
  float scale_pv;
  float sink_log2;

  template <class MainloopParams, class BlockCoord>
  __device__ HopperLogits(const MainloopParams& params, const BlockCoord& coord) {
    const int qo_head = cute::get<1>(coord);
    const int kv_head = cute::get<2>(coord);
    const HopperExtras& extras = params.additional_params;
    float scale = extras.sm_scale;
    if (extras.k_head_scale != nullptr) scale *= extras.k_head_scale[kv_head];
    to_cap = scale / extras.soft_cap;
    sm_scale_log2 = (kSoftCap ? extras.soft_cap : scale) * flashinfer::math::log2e;
    scale_pv = extras.v_scale;
    if (extras.v_head_scale != nullptr) scale_pv *= extras.v_head_scale[kv_head];
    sink_log2 = extras.sinks == nullptr ? -flashinfer::math::inf : extras.sinks[qo_head] * flashinfer::math::log2e;
  }

  template <int kRows>
  __device__ auto GetAttentionUpdater() {
    return HopperUpdater<kRows>(sm_scale_log2, sink_log2);
  }

  template <class MainloopParams, class T>
  __device__ __forceinline__ T LogitsTransform(const MainloopParams&, T logits, std::uint32_t, std::uint32_t,
                                               std::uint32_t, std::uint32_t, std::uint32_t) {
    if constexpr (kSoftCap) return soft_tanh(logits * to_cap);
    return logits;
  }
};

/// Stores a tile's results: registers to shared memory, then to the output in whole rows.
///
/// FlashInfer's own store counts every thread twice at the barrier between the two, so that half of the warps can pass
/// it before the others have written; and it lets the next tile's values overwrite the staged rows while some warps
/// still read them. Here each thread arrives once, and leaves when all have read.
template <class Traits>
struct HopperEpilogue : flashinfer::CollectiveEpilogue<Traits> {
  using Base = flashinfer::CollectiveEpilogue<Traits>;
  using Params = typename Base::Params;

  CUTLASS_DEVICE static void join() {
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  template <class BlockCoord, class SharedStorage, class Output, class LogSums, class TiledMma>
  CUTLASS_DEVICE void store(const Params& params, const Output& output, const LogSums& log_sums, SharedStorage& shared,
                            TiledMma mma, int thread, const BlockCoord& coord) {
    const int tile = cute::get<0>(coord);
    const int head = cute::get<1>(coord);
    const int first_row = cute::get<3>(coord);
    const int rows = cute::get<5>(coord);

    // The staged rows share their memory with V, which all warps must have read.
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS, static_cast<int>(flashinfer::NamedBarriers::kValueEmpty));
    auto staged = cute::make_tensor(cute::make_smem_ptr(shared.smem_o.data()), typename Base::SmemLayoutO{});
    auto to_shared = cute::make_tiled_copy_C(typename Base::SmemCopyAtomO{}, mma);
    auto mine = to_shared.get_thread_slice(thread);
    auto narrowed = flashinfer::convert_type<typename Base::DTypeO>(output);
    auto from_registers = mine.retile_S(narrowed);
    auto into_shared = mine.partition_D(staged);
    cute::copy(to_shared, from_registers, into_shared);
    cutlass::arch::fence_view_async_shared();
    join();

    if (params.lse_ptr != nullptr) {
      auto places = cute::make_identity_tensor(cute::select<0, 1>(typename Base::TileShape_PDV{}));
      auto own = mma.get_thread_slice(thread).partition_C(places);
      auto own_rows = own(cute::make_coord(cute::_0{}, cute::_, cute::_0{}), cute::_, cute::_0{});
      const int heads = cute::size<0>(params.layout_LSE);
      if (cute::get<1>(own_rows(cute::_0{})) == 0) {
#pragma unroll
        for (int i = 0; i < cute::size(log_sums); ++i) {
          const int row = tile * Base::CTA_Q + cute::get<0>(own_rows(i));
          if (row < rows) params.lse_ptr[(static_cast<std::int64_t>(first_row) + row) * heads + head] = log_sums(i);
        }
      }
    }
    flashinfer::write_O<Base::NUM_COPY_THREADS>(params.O_ptr, typename Base::TiledCopyO{}, params.layout_O,
                                                cute::select<0, 1>(typename Base::TileShape_PDV{}), staged, thread,
                                                tile, head, first_row, rows, Base::NUM_WARPS - 1);
    join();
  }
};

/// (query rows, keys) of a tile: FlashInfer's choice where it has made one; over pages more keys, as registers allow.
template <int kHeadDimQk, int kHeadDimVo, bool kPaged, bool kCausal>
constexpr std::tuple<int, int> hopper_tile() {
  if constexpr (kPaged) {
    return kHeadDimVo == 64 ? std::tuple(192, 96) : kHeadDimVo == 128 ? std::tuple(128, 128) : std::tuple(128, 64);
  } else if constexpr (kHeadDimVo == 96) {
    return std::tuple(192, 96);
  } else {
    return flashinfer::getCTATileSize<kHeadDimQk, kHeadDimVo, kCausal>();
  }
}

/// kWindow: behind a window, which may be unlimited.
template <class Q, int kHeadDimQk, int kHeadDimVo, bool kPaged, bool kCausal, bool kWindow, bool kSoftCap>
struct HopperInstance {
  using Element = flashinfer::cutlass_dtype_t<Q>;
  static constexpr auto kTile = hopper_tile<kHeadDimQk, kHeadDimVo, kPaged, kCausal>();
  using Traits =
      flashinfer::AttentionKernelTraits<!kPaged, kHeadDimQk, kHeadDimVo, std::get<0>(kTile), std::get<1>(kTile), 2,
                                        Element, Element, Element, std::int32_t, HopperLogits<kSoftCap>>;
  using Mainloop = std::conditional_t<kPaged, HopperPages<HopperExtras, Traits, kCausal>,
                                      flashinfer::CollectiveMainloop<HopperExtras, Traits, kCausal>>;
  using Epilogue = HopperEpilogue<Traits>;
  using Scheduler = flashinfer::BatchPrefillPersistentTileScheduler<std::int32_t>;

  static constexpr auto function() {
    return &flashinfer::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, kWindow, kCausal, Scheduler, false>;
  }

  static auto layout(std::int64_t rows, int heads, int dim, std::int64_t row_stride, std::int64_t head_stride) {
    return flashinfer::get_gmem_layout(static_cast<int>(rows), heads, dim, row_stride, head_stride);
  }

  static typename Mainloop::Params mainloop_params(const HopperArgs& args) {
    const AttentionArgs& call = args.call;
    const KvView& kv = call.kv;
    auto* const q = static_cast<Element*>(call.q);
    auto* const k = static_cast<Element*>(kv.k);
    auto* const v = static_cast<Element*>(kv.v);
    const auto q_layout = layout(args.total_rows, call.num_qo_heads, kHeadDimQk, call.q_row, call.q_head);
    const auto k_layout = layout(args.total_kv, kv.num_kv_heads, kHeadDimQk, kv.k_token, kv.k_head);
    const auto v_layout = layout(args.total_kv, kv.num_kv_heads, kHeadDimVo, kv.v_token, kv.v_head);
    const int window = call.window_left >= 0 ? call.window_left : std::numeric_limits<int>::max();
    const HopperExtras extras{.page_indptr = kv.indptr,
                              .sm_scale = call.sm_scale,
                              .soft_cap = call.soft_cap,
                              .v_scale = call.v_scale,
                              .k_head_scale = call.k_head_scale,
                              .v_head_scale = call.v_head_scale,
                              .sinks = call.sinks};
    if constexpr (kPaged) {
      return {
          Mainloop::Base::to_underlying_arguments({q, q_layout, k, k_layout, v, v_layout, kv.indices, window, kv.k_page,
                                                   kv.v_page, static_cast<std::uint32_t>(kv.page_size), extras})};
    } else {
      return Mainloop::to_underlying_arguments({q, q_layout, k, k_layout, v, v_layout, window, extras});
    }
  }

  static cudaError_t launch(const HopperArgs& args, cudaStream_t stream) {
    const AttentionArgs& call = args.call;
    typename Mainloop::Params mainloop = mainloop_params(args);
    if constexpr (kPaged) {
      if (const cudaError_t status = Mainloop::encode(mainloop, call.kv); status != cudaSuccess) return status;
    }
    typename Epilogue::Params epilogue = Epilogue::to_underlying_arguments(
        {static_cast<Element*>(call.out),
         layout(args.total_rows, call.num_qo_heads, kHeadDimVo, args.out_row, args.out_head), call.lse,
         flashinfer::get_lse_gmem_layout(static_cast<int>(args.total_rows), call.num_qo_heads)});
    const auto words = [&](std::size_t offset) {
      return reinterpret_cast<std::int32_t*>(const_cast<std::byte*>(args.schedule + offset));
    };
    const HopperShape& shape = *args.shape;
    const typename Scheduler::Arguments schedule = {words(shape.work_indptr),
                                                    words(shape.head_indices),
                                                    words(shape.qo_tile_indices),
                                                    words(shape.qo_indptr),
                                                    words(shape.kv_indptr),
                                                    words(shape.qo_len),
                                                    words(shape.kv_len),
                                                    words(shape.batch_indices),
                                                    cutlass::FastDivmod(call.num_qo_heads / call.kv.num_kv_heads),
                                                    call.num_qo_heads};
    typename Scheduler::Params scheduler = Scheduler::to_underlying_arguments(schedule);
    void* arguments[] = {&mainloop, &epilogue, &scheduler};
    return cudaLaunchKernel(reinterpret_cast<const void*>(function()),
                            Scheduler::get_grid_dim(schedule, args.num_workers), dim3(Traits::NUM_WARPS * 32),
                            arguments, sizeof(typename Traits::SharedStorage), stream);
  }

  static HopperKernel describe() {
    return {.paged = kPaged,
            .causal = kCausal,
            .window = kWindow,
            .soft_cap = kSoftCap,
            .function = reinterpret_cast<const void*>(function()),
            .shared_bytes = sizeof(typename Traits::SharedStorage),
            .launch = &launch};
  }
};

template <class Q, int kHeadDimQk, int kHeadDimVo, HopperVariant kVariant>
std::span<const HopperKernel> hopper_kernels() {
  constexpr bool kPaged = kVariant == HopperVariant::kPaged;
  static const std::array kernels = {HopperInstance<Q, kHeadDimQk, kHeadDimVo, kPaged, false, false, false>::describe(),
                                     HopperInstance<Q, kHeadDimQk, kHeadDimVo, kPaged, true, false, false>::describe(),
                                     HopperInstance<Q, kHeadDimQk, kHeadDimVo, kPaged, true, true, false>::describe(),
                                     HopperInstance<Q, kHeadDimQk, kHeadDimVo, kPaged, true, true, true>::describe()};
  return kernels;
}

}  // namespace fiw::cuda
