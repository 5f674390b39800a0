// FlashInfer's FA3 mainloop over pages, with a producer of our own.
#pragma once

#include <algorithm>
#include <cutlass/cuda_host_adapter.hpp>
#include <flashinfer/attention/hopper/sparse_mainloop.cuh>
#include <numeric>

#include "cuda/fa2/tile.h"

namespace fiw::cuda {

/// Loads a tile's keys by bulk copies of boxes: some slots of one page, 128 bytes of each. Behind a request's last key
/// are zeros: FlashInfer's mainloop masks those keys, but multiplies their values by 0.
///
/// FlashInfer's own producer copies 16 bytes a thread. It is a quarter slower, reckons the places of V by the strides
/// of K, and ends every tile with the values of the first keys, also where a window leaves those out.
///
/// `Extras` holds `page_indptr` [batch + 1].
template <class Extras, class Traits, bool kCausal>
struct HopperPages : flashinfer::SparseCollectiveMainloop<Extras, Traits, kCausal> {
  using Base = flashinfer::SparseCollectiveMainloop<Extras, Traits, kCausal>;
  using Pipeline = typename Base::MainloopPipeline;
  using State = typename Base::PipelineState;
  using Element = typename Base::DTypeKV;

  static constexpr int kKeys = Base::CTA_KV;
  static constexpr int kDim = Base::HEAD_DIM_VO;
  static constexpr int kWarps = Base::NUM_COPY_THREADS / 32;
  static constexpr int kColumns = 128 / sizeof(Element);  ///< of a box
  static constexpr int kMaxBoxSlots = 32;
  static constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;

  // A stage is columns of 128-byte rows, which the copies swizzle by their addresses.
  static_assert(kDim % kColumns == 0 && kKeys % kMaxBoxSlots == 0 && kKeys <= 32 * kWarps);
  using Stages = decltype(typename Base::SmemLayoutK{}.layout_b());
  static_assert(Stages{}(cute::_1{}, cute::_0{}, cute::_0{}) == kColumns);
  static_assert(Stages{}(cute::_8{}, cute::_0{}, cute::_0{}) == 8 * kColumns);
  static_assert(kDim == kColumns || Stages{}(cute::_0{}, cute::Int<kColumns>{}, cute::_0{}) == kKeys * kColumns);
  static_assert(Stages{}(cute::_0{}, cute::_0{}, cute::_1{}) == kKeys * kDim);
  static_assert(std::is_same_v<typename Base::SmemLayoutK, typename Base::SmemLayoutV>);

  struct Params : Base::Params {
    cute::TmaDescriptor k_boxes{};
    cute::TmaDescriptor v_boxes{};
    cute::TmaDescriptor v_slots{};  ///< boxes of one slot
    int box_slots = 1;
  };

  /// A map of [pages, heads, slots, dim] in boxes of `box_slots` slots.
  static cudaError_t encode(cute::TmaDescriptor& map, void* data, const KvView& kv, std::int64_t page_stride,
                            std::int64_t token_stride, std::int64_t head_stride, int box_slots) {
    constexpr std::int64_t kBytes = sizeof(Element);
    // Some drivers encode tensors of less than 128 KB wrongly; no page behind the last is ever asked for.
    constexpr std::int64_t kLeastBytes = 131072;
    const std::int64_t pages = std::max(kv.num_pages, kLeastBytes / (page_stride * kBytes) + 1);
    const cuuint64_t sizes[] = {kDim, static_cast<cuuint64_t>(kv.page_size), static_cast<cuuint64_t>(kv.num_kv_heads),
                                static_cast<cuuint64_t>(pages)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(token_stride * kBytes),
                                  static_cast<cuuint64_t>(head_stride * kBytes),
                                  static_cast<cuuint64_t>(page_stride * kBytes)};
    const cuuint32_t box[] = {kColumns, static_cast<cuuint32_t>(box_slots), 1, 1};
    const cuuint32_t steps[] = {1, 1, 1, 1};
    const CUresult result = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &map, cute::TMA::to_CUtensorMapDataType<Element>(), 4U, data, &sizes[0], &strides[0], &box[0], &steps[0],
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
  }

  /// Fills in what reads `kv`; the rest is there.
  static cudaError_t encode(Params& params, const KvView& kv) {
    // Boxes of a power of two that divides the page never cross its end, and neither do tiles of 32 n keys.
    params.box_slots = std::gcd(kv.page_size, kMaxBoxSlots);
    cudaError_t status = encode(params.k_boxes, kv.k, kv, kv.k_page, kv.k_token, kv.k_head, params.box_slots);
    if (status != cudaSuccess) return status;
    status = encode(params.v_boxes, kv.v, kv, kv.v_page, kv.v_token, kv.v_head, params.box_slots);
    if (status != cudaSuccess) return status;
    return encode(params.v_slots, kv.v, kv, kv.v_page, kv.v_token, kv.v_head, 1);
  }

  /// Where a box starts; a page of -1 is outside the cache and reads as zeros.
  struct Place {
    std::int32_t page = -1;
    std::int32_t slot = 0;
  };

  template <bool kWindow, class BlockCoord, class Scheduler, class SharedStorage>
  CUTLASS_DEVICE void load(const Params& params, Pipeline pipeline_k, Pipeline pipeline_v, State& write_k,
                           State& write_v, SharedStorage& shared, Scheduler& scheduler,
                           const typename Scheduler::Params& scheduler_params, typename Scheduler::WorkTileInfo& work,
                           const BlockCoord& coord, int work_index) {
    const int tile = cute::get<0>(coord);
    const int kv_head = cute::get<2>(coord);
    const int rows = cute::get<5>(coord);
    const int kv_len = cute::get<6>(coord);
    const int warp = cutlass::canonical_warp_idx_sync() % kWarps;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int box_slots = params.box_slots;
    const int boxes = (kKeys / box_slots - warp + kWarps - 1) / kWarps;  // of this warp, which takes every fourth
    const std::int32_t* const pages = params.kv_indices + params.additional_params.page_indptr[cute::get<7>(coord)];

    // A lane looks up one of its warp's boxes.
    const auto find = [&](int key_tile) {
      Place place;
      const int key = key_tile * kKeys + (lane * kWarps + warp) * box_slots;
      if (key_tile >= 0 && lane < boxes && key < kv_len) {
        std::uint32_t page = 0;
        std::uint32_t slot = 0;
        params.page_size.divmod(static_cast<std::uint32_t>(key), page, slot);
        place = {pages[page], static_cast<std::int32_t>(slot)};
      }
      return place;
    };
    const auto copy = [&](const cute::TmaDescriptor& map, std::uint64_t* barrier, Element* to, const Place& from) {
#pragma unroll
      for (int column = 0; column < kDim / kColumns; ++column) {
        cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     to + column * kKeys * kColumns, column * kColumns, from.slot, kv_head, from.page);
      }
    };
    // `copy_box(barrier, to, place, first key)` by one lane, for each of the warp's boxes.
    const auto load_boxes = [&](Pipeline& pipeline, State& write, Element* stages, const Place& place, int key_tile,
                                const auto& copy_box) {
      pipeline.producer_acquire(write);
      std::uint64_t* const barrier = pipeline.producer_get_barrier(write);
      if (lane == 0) {
        const auto bytes = static_cast<std::uint32_t>(boxes * box_slots * kDim * sizeof(Element));
        cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(barrier, bytes);
      } else {
        cutlass::arch::ClusterBarrier::arrive(barrier);
      }
      for (int i = 0; i < boxes; ++i) {
        const Place box{__shfl_sync(kAllLanes, place.page, i), __shfl_sync(kAllLanes, place.slot, i)};
        const int row = (i * kWarps + warp) * box_slots;
        if (lane == 0) {
          copy_box(barrier, stages + (write.index() * kDim * kKeys + row * kColumns), box, key_tile * kKeys + row);
        }
      }
      ++write;
    };
    const auto load_k = [&](const Place& place, int key_tile) {
      load_boxes(
          pipeline_k, write_k, shared.smem_k.data(), place, key_tile,
          [&](std::uint64_t* barrier, Element* to, const Place& box, int) { copy(params.k_boxes, barrier, to, box); });
    };
    const auto load_v = [&](const Place& place, int key_tile) {
      load_boxes(pipeline_v, write_v, shared.smem_v.data(), place, key_tile,
                 [&](std::uint64_t* barrier, Element* to, const Place& box, int key) {
                   if (box.page < 0 || kv_len - key >= box_slots) return copy(params.v_boxes, barrier, to, box);
                   for (int slot = 0; slot < box_slots; ++slot) {
                     const Place one = key + slot < kv_len ? Place{box.page, box.slot + slot} : Place{};
                     copy(params.v_slots, barrier, to + slot * kColumns, one);
                   }
                 });
    };

    int key_tile = this->get_num_kv_tiles(params, tile, rows, kv_len) - 1;
    int last_tile = 0;
    if constexpr (kWindow) {
      last_tile = flashinfer::get_swa_begin_kv_tile_idx<Base::CTA_Q, kKeys>(params.window_left, tile, rows, kv_len);
    }
    Place here = find(key_tile);
    Place next = find(key_tile - 1);
    load_k(here, key_tile);

    // The queries of the work before are read by now.
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS + Base::NUM_COPY_THREADS,
                                      static_cast<int>(flashinfer::NamedBarriers::kQueryEmpty));
    if (warp == 0 && cute::elect_one_sync()) {
      const auto queries = flashinfer::get_local_tile_tensor(
          params.tma_load_Q.get_tma_tensor(params.layout_Q.shape()), cute::select<0, 2>(typename Base::TileShape_QKD{}),
          cute::get<1>(coord), cute::get<3>(coord), rows)(cute::_, cute::_, tile);
      auto staged = cute::make_tensor(cute::make_smem_ptr(shared.smem_q.data()), typename Base::SmemLayoutQ{});
      const auto slice = params.tma_load_Q.get_slice(cute::_0{});
      shared.barrier_Q.arrive_and_expect_tx(Base::TmaTransactionBytesQ);
      cute::copy(params.tma_load_Q.with(
                     reinterpret_cast<cutlass::arch::ClusterTransactionBarrier::ValueType&>(shared.barrier_Q)),
                 slice.partition_S(queries), slice.partition_D(staged));
    }
    // V's memory also stages the results of the work before.
    shared.barrier_O.wait((work_index + 1) % 2);

    for (; key_tile > last_tile; --key_tile) {
      const Place after = find(key_tile - 2);
      load_k(next, key_tile - 1);
      load_v(here, key_tile);
      here = next;
      next = after;
    }
    scheduler.prefetch_next_work(scheduler_params, work);
    load_v(here, key_tile);
    scheduler.broadcast_next_work(work);
  }
};

}  // namespace fiw::cuda
