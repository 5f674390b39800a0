// The parameter blocks that FlashInfer's kernels read members of, with our own options beside them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <flashinfer/page.cuh>

#include "cuda/fa2/tile.h"

namespace fiw::cuda {

template <class Q, class Kv>
struct CommonParams {
  using DTypeQ = Q;
  using DTypeKV = Kv;
  using DTypeO = Q;
  using IdType = std::int32_t;

  Q* q;
  Q* o;
  float* lse;
  std::uint32_t num_qo_heads;
  std::uint32_t q_stride_n;
  std::uint32_t q_stride_h;

  IdType* q_indptr;
  IdType* request_indices;
  IdType* qo_tile_indices;
  IdType* kv_tile_indices;
  IdType* o_indptr;
  IdType* kv_chunk_size_ptr;
  bool* block_valid_mask;
  std::uint32_t padded_batch_size;
  bool partition_kv;
  flashinfer::uint_fastdiv group_size;

  bool causal;
  std::int32_t skip_window;
  std::int32_t window_left;
  float sm_scale;
  float soft_cap;
  float v_scale;
  const float* k_head_scale;
  const float* v_head_scale;
  const float* sinks;
  const float* alibi_slopes;
  const std::uint8_t* mask;
  const std::int32_t* mask_indptr;

  // Scale factors of block-scaled caches, which are not served here.
  static constexpr std::uint32_t k_sf_stride_page = 0, k_sf_stride_n = 0, k_sf_stride_h = 0;
  static constexpr std::uint32_t v_sf_stride_page = 0, v_sf_stride_n = 0, v_sf_stride_h = 0;

  explicit CommonParams(const AttentionArgs& args)
      : q(static_cast<Q*>(args.q)),
        o(static_cast<Q*>(args.out)),
        lse(args.lse),
        num_qo_heads(static_cast<std::uint32_t>(args.num_qo_heads)),
        q_stride_n(static_cast<std::uint32_t>(args.q_row)),
        q_stride_h(static_cast<std::uint32_t>(args.q_head)),
        q_indptr(const_cast<IdType*>(args.qo_indptr)),
        request_indices(const_cast<IdType*>(args.request_indices)),
        qo_tile_indices(const_cast<IdType*>(args.qo_tile_indices)),
        kv_tile_indices(const_cast<IdType*>(args.kv_tile_indices)),
        o_indptr(const_cast<IdType*>(args.o_indptr)),
        kv_chunk_size_ptr(const_cast<IdType*>(args.kv_chunk_size)),
        block_valid_mask(reinterpret_cast<bool*>(const_cast<std::uint8_t*>(args.block_valid))),
        padded_batch_size(static_cast<std::uint32_t>(args.items)),
        partition_kv(args.split_kv),
        group_size(static_cast<std::uint32_t>(args.num_qo_heads / args.kv.num_kv_heads)),
        causal(args.causal),
        skip_window(args.skip_window),
        window_left(args.window_left),
        sm_scale(args.sm_scale),
        soft_cap(args.soft_cap),
        v_scale(args.v_scale),
        k_head_scale(args.k_head_scale),
        v_head_scale(args.v_head_scale),
        sinks(args.sinks),
        alibi_slopes(args.alibi_slopes),
        mask(args.mask),
        mask_indptr(args.mask_indptr) {}
};

template <class Q, class Kv>
struct PagedParams : CommonParams<Q, Kv> {
  flashinfer::paged_kv_t<Kv, std::int32_t> paged_kv;

  explicit PagedParams(const AttentionArgs& args) : CommonParams<Q, Kv>(args) {
    const KvView& kv = args.kv;
    paged_kv.page_size = flashinfer::uint_fastdiv(static_cast<std::uint32_t>(kv.page_size));
    paged_kv.num_heads = static_cast<std::uint32_t>(kv.num_kv_heads);
    paged_kv.batch_size = static_cast<std::uint32_t>(args.batch);
    paged_kv.stride_page = static_cast<std::uint32_t>(kv.k_page);
    paged_kv.stride_n = static_cast<std::uint32_t>(kv.k_token);
    paged_kv.stride_h = static_cast<std::uint32_t>(kv.k_head);
    paged_kv.v_stride_page = static_cast<std::uint32_t>(kv.v_page);
    paged_kv.v_stride_n = static_cast<std::uint32_t>(kv.v_token);
    paged_kv.v_stride_h = static_cast<std::uint32_t>(kv.v_head);
    paged_kv.k_data = static_cast<Kv*>(kv.k);
    paged_kv.v_data = static_cast<Kv*>(kv.v);
    paged_kv.indices = const_cast<std::int32_t*>(kv.indices);
    paged_kv.indptr = const_cast<std::int32_t*>(kv.indptr);
    paged_kv.last_page_len = const_cast<std::int32_t*>(kv.last_page_len);
  }

  __device__ std::uint32_t kv_len(std::uint32_t request) const { return paged_kv.get_length(request); }
};

template <class Q, class Kv>
struct RaggedParams : CommonParams<Q, Kv> {
  Kv* k;
  Kv* v;
  std::int32_t* kv_indptr;
  std::uint32_t k_stride_n, k_stride_h, v_stride_n, v_stride_h;

  explicit RaggedParams(const AttentionArgs& args)
      : CommonParams<Q, Kv>(args),
        k(static_cast<Kv*>(args.kv.k)),
        v(static_cast<Kv*>(args.kv.v)),
        kv_indptr(const_cast<std::int32_t*>(args.kv.indptr)),
        k_stride_n(static_cast<std::uint32_t>(args.kv.k_token)),
        k_stride_h(static_cast<std::uint32_t>(args.kv.k_head)),
        v_stride_n(static_cast<std::uint32_t>(args.kv.v_token)),
        v_stride_h(static_cast<std::uint32_t>(args.kv.v_head)) {}

  __device__ std::uint32_t kv_len(std::uint32_t request) const {
    return static_cast<std::uint32_t>(kv_indptr[request + 1] - kv_indptr[request]);
  }
};

}  // namespace fiw::cuda
