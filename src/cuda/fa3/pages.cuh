// FlashInfer's FA3 mainloop over pages, with a producer of our own.
#pragma once

#include <flashinfer/attention/hopper/sparse_mainloop.cuh>

namespace fiw::cuda {

/// Loads a tile's keys from their pages, 16 bytes a thread at a time, and zeros behind a request's last key.
///
/// FlashInfer's own producer reckons the places of V by the strides of K, and ends every tile with the values of the
/// first keys, also where a window leaves those out. Here K and V have strides of their own, and each key's values come
/// from where the key is. `Extras` holds `page_indptr` [batch + 1].
template <class Extras, class Traits, bool kCausal>
struct HopperPages : flashinfer::SparseCollectiveMainloop<Extras, Traits, kCausal> {
  using Base = flashinfer::SparseCollectiveMainloop<Extras, Traits, kCausal>;
  using Params = typename Base::Params;
  using Pipeline = typename Base::MainloopPipeline;
  using State = typename Base::PipelineState;
  using Element = typename Base::DTypeKV;

  static constexpr int kThreads = Base::NUM_COPY_THREADS;
  static constexpr int kVector = 16 / sizeof(Element);
  static constexpr int kVectors = Traits::HEAD_DIM_QK / kVector;  ///< threads that share a row
  static constexpr int kRows = kThreads / kVectors;               ///< rows that all threads load at once
  static constexpr int kPasses = Base::CTA_KV / kRows;
  static_assert(kThreads % kVectors == 0 && 32 % kVectors == 0 && kPasses <= kVectors);

  /// Where a key lies. The threads that share a row look up one key each of those that they will load together.
  struct Place {
    std::int32_t page = 0;
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
    const auto thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kVectors;
    const int first = thread / kVectors;
    const std::int32_t* const pages = params.kv_indices + params.additional_params.page_indptr[cute::get<7>(coord)];

    const auto find = [&](int key_tile) {
      Place place;
      const int key = key_tile * Base::CTA_KV + lane * kRows + first;
      if (key_tile >= 0 && lane < kPasses && key < kv_len) {
        std::uint32_t page = 0;
        std::uint32_t slot = 0;
        params.page_size.divmod(static_cast<std::uint32_t>(key), page, slot);
        place = {pages[page], static_cast<std::int32_t>(slot)};
      }
      return place;
    };
    const auto load_rows = [&](Pipeline& pipeline, State& write, const auto& staged, const Element* from,
                               std::int64_t page_stride, std::int64_t token_stride, const Place& place, int key_tile) {
      const std::int64_t offset = place.page * page_stride + place.slot * token_stride;
      const int valid = kv_len - key_tile * Base::CTA_KV - first;
      pipeline.producer_acquire(write);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const std::int64_t row = __shfl_sync(0xFFFFFFFFU, offset, pass, kVectors);
        cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(
            &staged(pass * kRows + first, lane * kVector, write.index()), from + row, pass * kRows < valid);
      }
      pipeline.producer_commit(write, cutlass::arch::cpasync_barrier_arrive);
      ++write;
    };
    const auto load_k = [&](const Place& place, int key_tile) {
      load_rows(pipeline_k, write_k,
                cute::make_tensor(cute::make_smem_ptr(shared.smem_k.data()), typename Base::SmemLayoutK{}),
                params.K_ptr + kv_head * cute::get<2>(params.layout_K.stride()) + lane * kVector, params.k_page_stride,
                cute::get<0>(params.layout_K.stride()), place, key_tile);
    };
    const auto load_v = [&](const Place& place, int key_tile) {
      load_rows(pipeline_v, write_v,
                cute::make_tensor(cute::make_smem_ptr(shared.smem_v.data()), typename Base::SmemLayoutV{}),
                params.V_ptr + kv_head * cute::get<2>(params.layout_V.stride()) + lane * kVector, params.v_page_stride,
                cute::get<0>(params.layout_V.stride()), place, key_tile);
    };

    int key_tile = this->get_num_kv_tiles(params, tile, rows, kv_len) - 1;
    int last_tile = 0;
    if constexpr (kWindow) {
      last_tile =
          flashinfer::get_swa_begin_kv_tile_idx<Base::CTA_Q, Base::CTA_KV>(params.window_left, tile, rows, kv_len);
    }
    Place here = find(key_tile);
    Place next = find(key_tile - 1);
    load_k(here, key_tile);

    // The queries of the work before are read by now.
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS + kThreads,
                                      static_cast<int>(flashinfer::NamedBarriers::kQueryEmpty));
    if (thread < 32 && cute::elect_one_sync()) {
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
