// Our own prefill kernel for sm_90a: K and V where they lie, in pages or contiguous.
//
// A work is a tile of packed (token, head-in-group) rows of one request and one KV head, so that the whole group reads
// its keys once. Each block walks a list of works. One warp requests blocks of K, and one of V, by bulk copies of 16
// slots of a page into rings of stages; two more fetch the queries of the next tile; the warpgroups that compute own 64
// rows each. Scores of a block of keys are multiplied ahead of the values of the block before, so that the tensor cores
// work while the exponentials are taken; and named barriers keep the warpgroups out of step, so that one multiplies
// while another does not. Keys come from the last block to the first: the blocks that need a mask come first, and the
// others skip it.
//
// Where there are too few tiles, the keys of one are cut into parts, each a work. Every warp leaves what it has of its
// rows in a slot of scratch, as its registers hold it, and counts itself; the last of a tile's parts adds them up, in
// order, and goes on as if it had done all of them.
//
// What a warpgroup does for one block is a chain about as long as all products of a block, so its length decides: see
// bench/LOG.md for what shortened it.
//
// Slots behind a request's last key may hold anything. Their scores are overwritten, and their values never read: the
// box that holds the end of a request is copied slot by slot, with zeros behind the last one.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/fast_math.h>

#include <algorithm>
#include <array>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cutlass/cuda_host_adapter.hpp>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "cuda/packed.cuh"
#include "cuda/prefill/prefill.h"
#include "cuda/soft_tanh.cuh"

namespace fiw::cuda {

/// D[64 x n] += A[64 x 16] * B[n x 16] of a warpgroup: A and B from shared memory, or A from registers and B
/// transposed.
template <class T, int kN>
struct Wgmma;

#define FIW_WGMMA(type, name, n)                                                                                   \
  template <>                                                                                                      \
  struct Wgmma<type, n> {                                                                                          \
    using Shared =                                                                                                 \
        cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;  \
    using Registers =                                                                                              \
        cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>; \
  };
#define FIW_WGMMA_BOTH(n)             \
  FIW_WGMMA(nv_bfloat16, BF16BF16, n) \
  FIW_WGMMA(half, F16F16, n)
FIW_WGMMA_BOTH(64)
FIW_WGMMA_BOTH(80)
FIW_WGMMA_BOTH(128)
FIW_WGMMA_BOTH(256)
#undef FIW_WGMMA_BOTH
#undef FIW_WGMMA

template <class T, int kN, std::size_t... kI>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, bool add,
                                         std::index_sequence<kI...>) {
  Wgmma<T, kN>::Shared::fma(a, b, d[kI]..., add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <class T, int kN, std::size_t... kI>
__device__ __forceinline__ void multiply(float (&d)[kN / 2], const std::uint32_t* a, std::uint64_t b,
                                         std::index_sequence<kI...>) {
  Wgmma<T, kN>::Registers::fma(a[0], a[1], a[2], a[3], b, d[kI]..., cute::SM90::GMMA::ScaleOut::One);
}

/// Keeps the compiler from moving registers about while products are under way.
template <class T, std::size_t kCount, std::size_t... kI>
__device__ __forceinline__ void pin(T (&values)[kCount], std::index_sequence<kI...>) {
  (cute::warpgroup_fence_operand(values[kI]), ...);
}
template <class T, std::size_t kCount>
__device__ __forceinline__ void pin(T (&values)[kCount]) {
  pin(values, std::make_index_sequence<kCount>());
}

/// One kernel's arguments.
template <class T>
struct PrefillParams {
  CUtensorMap k_boxes;
  CUtensorMap v_boxes;
  CUtensorMap k_slots;  ///< boxes of one slot
  CUtensorMap v_slots;
  const T* q;
  T* out;
  float* lse;
  std::int64_t q_row, q_head, out_row, out_head;
  const std::int32_t* work_indptr;
  const std::int32_t* fields[7];  ///< of works: tile, first row, query tokens, first key, keys, KV head, request
  const std::int32_t* part;       ///< of a work; null: no tile is cut
  const std::int32_t* parts;
  const std::int32_t* slots;  ///< of a work's tile
  std::uint32_t* arrivals;
  float4* partials;
  const std::int32_t* page_indptr;
  const std::int32_t* pages;  ///< null where contiguous
  cutlass::FastDivmod page_size;
  cutlass::FastDivmod group;
  std::int32_t k_step, k_head;  ///< of pages, or tokens, and heads in the last coordinate of the maps
  std::int32_t v_step, v_head;
  std::int32_t num_qo_heads;
  bool causal;
  std::int32_t window_left;
  float sm_scale;
  float soft_cap;
  float v_scale;
  const float* k_head_scale;
  const float* v_head_scale;
  const float* sinks;
};

/// A work as the warps read it.
struct PrefillWork {
  std::int32_t tile, first_row, qo_len, first_key, kv_len, head, request;
  std::int32_t part = 0, parts = 1, slot = 0;
};

/// kKeys of a block; kWarpgroups that compute.
template <class T, int kDim, int kKeys, int kWarpgroups, int kStages, int kQueryBuffers, bool kSoftCap>
struct PrefillInstance {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kCapped = kSoftCap;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kColumns = 128 / sizeof(T);  ///< of a box
  static constexpr int kParts = kDim / kColumns;
  static constexpr int kQueryThreads = 64;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
  static constexpr int kStageBytes = kKeys * kDim * static_cast<int>(sizeof(T));
  static constexpr int kBoxSlots = kPrefillPageSlots;
  static constexpr int kBoxes = kKeys / kBoxSlots;
  static constexpr int kFirstBarrier = 1;
  static constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;
  static constexpr float kLog2E = 1.4426950408889634F;
  static constexpr float kLn2 = 0.6931471805599453F;
  static constexpr float kInf = std::numeric_limits<float>::infinity();

  using Params = PrefillParams<T>;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  // Parts of 128 bytes of a row, swizzled in groups of 8 rows. K and V: a group's parts one after the other; queries:
  // all rows of a part, then the next one.
  struct Shared {
    alignas(1024) T q[kQueryBuffers][kRows * kDim];
    alignas(1024) T k[kStages][kKeys * kDim];
    alignas(1024) T v[kStages][kKeys * kDim];
    std::uint64_t q_full[2], q_empty[2];
    std::uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    std::int32_t words[4][11];  ///< of the tiles under way
  };

  /// Place in a ring, and how often its end was passed.
  struct Place {
    int stage = 0;
    std::uint32_t phase = 0;
    __device__ __forceinline__ void step() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  };

  __device__ __forceinline__ static PrefillWork read_work(const Params& params, int index) {
    PrefillWork work{__ldg(params.fields[0] + index), __ldg(params.fields[1] + index), __ldg(params.fields[2] + index),
                     __ldg(params.fields[3] + index), __ldg(params.fields[4] + index), __ldg(params.fields[5] + index),
                     __ldg(params.fields[6] + index)};
    if (params.part != nullptr) {
      work.part = __ldg(params.part + index);
      work.parts = __ldg(params.parts + index);
      work.slot = __ldg(params.slots + index);
    }
    return work;
  }

  /// The blocks [first, end) that some row of the tile sees, or the work's part of them.
  struct Blocks {
    int first, end;
  };
  __device__ __forceinline__ static Blocks visible(const Params& params, const PrefillWork& work) {
    const int rows = work.qo_len * params.group.divisor;
    const int last_row = min(work.tile * kRows + kRows, rows) - 1;
    const int before = work.kv_len - work.qo_len;
    const int end = params.causal ? min(work.kv_len, before + params.group.div(last_row) + 1) : work.kv_len;
    int first = 0;
    if (params.window_left >= 0) {
      const int position = before + params.group.div(work.tile * kRows);
      if (position > params.window_left) first = (position - params.window_left) / kKeys;
    }
    const Blocks all{first, max(first, (end + kKeys - 1) / kKeys)};
    if (work.parts == 1) return all;
    const int count = all.end - first;
    return {first + count * work.part / work.parts, first + count * (work.part + 1) / work.parts};
  }

  /// Loads all blocks of K, or of V: one warp for each.
  template <bool kValues>
  __device__ __forceinline__ static void load_blocks(const Params& params, T* stages, std::uint64_t* full,
                                                     std::uint64_t* empty) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const CUtensorMap* const boxes = kValues ? &params.v_boxes : &params.k_boxes;
    const CUtensorMap* const slots = kValues ? &params.v_slots : &params.k_slots;
    const int step = kValues ? params.v_step : params.k_step;
    const int end_work = params.work_indptr[blockIdx.x + 1];
    Place at;
    for (int index = params.work_indptr[blockIdx.x]; index < end_work; ++index) {
      const PrefillWork work = read_work(params, index);
      const Blocks blocks = visible(params, work);
      const int begin = params.pages == nullptr ? work.first_key : params.page_indptr[work.request];
      const int head = work.head * (kValues ? params.v_head : params.k_head);
      // Where this lane's box of a block starts; outside of the cache are zeros.
      const auto find = [&](int block, int& group, int& place) {
        const int key = block * kKeys + lane * kBoxSlots;
        group = 0;
        place = -1;
        if (block < 0 || lane >= kBoxes || key >= work.kv_len) return;
        if (params.pages == nullptr) {
          group = key / 8;
          place = begin * step + head;
        } else {
          int entry = 0;
          int slot = 0;
          params.page_size(entry, slot, key);
          group = slot / 8;
          place = __ldg(params.pages + begin + entry) * step + head;
        }
      };
      int group = 0;
      int place = 0;
      find(blocks.end - 1, group, place);
      for (int block = blocks.end - 1; block >= blocks.first; --block) {
        int next_group = 0;
        int next_place = 0;
        find(block - 1, next_group, next_place);
        int box_group[kBoxes];
        int box_place[kBoxes];
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
          box_group[i] = __shfl_sync(kAllLanes, group, i);
          box_place[i] = __shfl_sync(kAllLanes, place, i);
        }
        T* const stage = stages + at.stage * kKeys * kDim;
        const int cut = work.kv_len - block * kKeys;  // first slot behind the end
        const bool whole = cut >= kKeys || cut % kBoxSlots == 0 || (!kValues && params.pages != nullptr);
        Barrier::wait(empty + at.stage, at.phase ^ 1);
        if (lane == 0) {
          TransactionBarrier::arrive_and_expect_tx(full + at.stage, kKeys * kDim * sizeof(T));
#pragma unroll
          for (int i = 0; i < kBoxes; ++i) {
            if (whole || cut / kBoxSlots != i) {
              cute::SM90_TMA_LOAD_5D::copy(boxes, full + at.stage,
                                           static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                           stage + i * kBoxSlots * kDim, 0, 0, 0, box_group[i], box_place[i]);
            }
          }
        }
        __syncwarp();
        if (!whole) {
          const int box = cut / kBoxSlots;
          const int from = __shfl_sync(kAllLanes, group, box);
          const int from_place = __shfl_sync(kAllLanes, place, box);
          for (int i = lane; i < kBoxSlots * kParts; i += 32) {
            const int slot = i / kParts;
            const int part = i % kParts;
            const bool live = box * kBoxSlots + slot < cut;
            cute::SM90_TMA_LOAD_5D::copy(
                slots, full + at.stage, static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                stage + (box * kBoxSlots / 8 + slot / 8) * 8 * kDim + (part * 8 + slot % 8) * kColumns, 0, slot % 8,
                part, from + slot / 8, live ? from_place : -1);
          }
          __syncwarp();
        }
        group = next_group;
        place = next_place;
        at.step();
      }
    }
  }

  __device__ __forceinline__ static void load_queries(const Params& params, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x) % kQueryThreads;
    constexpr int kChunks = kDim * static_cast<int>(sizeof(T)) / 16;  // of a row
    constexpr int kRowsAtOnce = kQueryThreads / kChunks;
    const int chunk = thread % kChunks;
    // From one of a thread's rows to the next.
    int tokens_on = 0;
    int heads_on = 0;
    params.group(tokens_on, heads_on, kRowsAtOnce);
    const std::int64_t stride = tokens_on * params.q_row + heads_on * params.q_head;
    const std::int64_t wrap = params.q_row - params.group.divisor * params.q_head;
    const int end_work = params.work_indptr[blockIdx.x + 1];
    int turn = 0;
    for (int index = params.work_indptr[blockIdx.x]; index < end_work; ++index, ++turn) {
      const PrefillWork work = read_work(params, index);
      const Blocks blocks = visible(params, work);
      const int rows = work.qo_len * params.group.divisor;
      const int buffer = turn % kQueryBuffers;
      Barrier::wait(shared.q_empty + buffer, (turn / kQueryBuffers & 1) ^ 1);
      if (thread == 0) {
        std::int32_t* const words = shared.words[turn & 3];
        words[0] = work.tile * kRows;
        words[1] = rows;
        words[2] = work.first_row;
        words[3] = work.kv_len;
        words[4] = work.qo_len;
        words[5] = work.head;
        words[6] = blocks.first;
        words[7] = blocks.end;
        words[8] = work.part;
        words[9] = work.parts;
        words[10] = work.slot;
      }
      const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared.q[buffer]));
      int packed = work.tile * kRows + thread / kChunks;
      int token = 0;
      int head = 0;
      params.group(token, head, packed);
      const T* from = params.q + (std::int64_t{work.first_row} + token) * params.q_row +
                      (std::int64_t{work.head} * params.group.divisor + head) * params.q_head + chunk * 8;
#pragma unroll 4
      for (int row = thread / kChunks; row < kRows; row += kRowsAtOnce, packed += kRowsAtOnce) {
        const bool live = packed < rows;
        const std::uint32_t to = base + ((chunk / 8 * kRows + row) * 128 + (((chunk % 8) ^ (row % 8)) * 16));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(to), "l"(live ? from : params.q), "r"(live ? 16 : 0)
                     : "memory");
        from += stride;
        head += heads_on;
        if (head >= params.group.divisor) {
          head -= params.group.divisor;
          from += wrap;
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      cutlass::arch::fence_view_async_shared();
      Barrier::arrive(shared.q_full + buffer);
    }
  }

  /// Of a place in shared memory: bytes between parts of a transposed operand, and between groups of 8 rows.
  __device__ __forceinline__ static std::uint64_t descriptor(const void* place, int part_bytes, int group_bytes) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
    constexpr std::uint64_t kSwizzle128 = 1;
    return (address & 0x3FFFF) >> 4 | static_cast<std::uint64_t>(part_bytes >> 4) << 16 |
           static_cast<std::uint64_t>(group_bytes >> 4) << 32 | kSwizzle128 << 62;
  }

  struct Compute {
    const Params& params;
    Shared& shared;
    const int warpgroup;
    const int lane;
    std::uint64_t q_descriptor;
    std::uint64_t k_descriptor;
    std::uint64_t v_descriptor;
    Place k_at{};
    Place v_at{};
    float s[kKeys / 2];
    float o[kDim / 2];
    std::uint32_t p[kKeys / 4];
    float top[2];
    float sum[2];
    float base[2];
    float scale;   // of scores, to powers of 2
    float to_cap;  // of scores, to shares of the cap
    int low[2];
    int high[2];
    int buffer;
    int low_all;
    int high_all;

    __device__ __forceinline__ void await_turn() {
      cutlass::arch::NamedBarrier::sync(256, static_cast<std::uint32_t>(kFirstBarrier + warpgroup));
    }
    __device__ __forceinline__ void pass_turn() {
      cutlass::arch::NamedBarrier::arrive(256,
                                          static_cast<std::uint32_t>(kFirstBarrier + (warpgroup + 1) % kWarpgroups));
    }
    __device__ __forceinline__ static void release(std::uint64_t* barrier, int lane) {
      if (lane == 0) Barrier::arrive(barrier);
    }

    __device__ __forceinline__ void issue_scores() {
      const std::uint64_t a = q_descriptor + static_cast<std::uint32_t>(buffer * (kRows * kDim * sizeof(T) >> 4));
      const std::uint64_t b = k_descriptor + static_cast<std::uint32_t>(k_at.stage * (kStageBytes >> 4));
      pin(s);
      cute::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int inside = step % 4 * 2;
        multiply<T, kKeys>(s, a + (step / 4 * kRows * 128 >> 4) + inside, b + (step / 4 * 1024 >> 4) + inside, step > 0,
                           std::make_index_sequence<kKeys / 2>());
      }
      cute::warpgroup_commit_batch();
    }
    __device__ __forceinline__ void issue_values() {
      const std::uint64_t b = v_descriptor + static_cast<std::uint32_t>(v_at.stage * (kStageBytes >> 4));
      pin(p);
      pin(o);
      cute::warpgroup_arrive();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        multiply<T, kDim>(o, p + 4 * step, b + step * (2048 * kParts >> 4), std::make_index_sequence<kDim / 2>());
      }
      cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void mask(int block) {
      if constexpr (kSoftCap) {
#pragma unroll
        for (float& score : s) score = soft_tanh(score * to_cap);
      }
      const int key = block * kKeys;
      if (key >= low_all && key + kKeys <= high_all) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int from = low[r] - key - lane % 4 * 2;
        const int to = high[r] - key - lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (8 * i + c < from || 8 * i + c >= to) s[4 * i + 2 * r + c] = -kInf;
          }
        }
      }
    }

    /// The largest score of this lane in row r.
    __device__ __forceinline__ float largest(int r) const {
      float m0 = fmaxf(s[2 * r], s[4 + 2 * r]);
      float m1 = fmaxf(s[2 * r + 1], s[4 + 2 * r + 1]);
#pragma unroll
      for (int i = 2; i < kKeys / 8; ++i) {
        m0 = fmaxf(m0, s[4 * i + 2 * r]);
        m1 = fmaxf(m1, s[4 * i + 2 * r + 1]);
      }
      return fmaxf(m0, m1);
    }
    /// Takes a row's largest score, given this lane's, as the new reference; returns what that shrinks older weights
    /// by.
    __device__ __forceinline__ float raise(int r, float m) {
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
      m = fmaxf(m, top[r]);
      const float new_base = m == -kInf ? 0.0F : __fmul_rn(m, scale);
      // Rounded before it is subtracted, as `base` was: exactly 1 where the row's reference stays.
      const float shrink = exp2_fast(__fmul_rn(top[r], scale) - new_base);
      top[r] = m;
      base[r] = new_base;
      return shrink;
    }
    __device__ __forceinline__ void weigh() {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum0 = sum[r];
        float sum1 = 0;
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          s[4 * i + 2 * r] = exp2_fast(fmaf(s[4 * i + 2 * r], scale, -base[r]));
          s[4 * i + 2 * r + 1] = exp2_fast(fmaf(s[4 * i + 2 * r + 1], scale, -base[r]));
          sum0 += s[4 * i + 2 * r];
          sum1 += s[4 * i + 2 * r + 1];
        }
        sum[r] = sum0 + sum1;
      }
      pin(sum);
    }
    __device__ __forceinline__ void soften_first() {
      top[0] = top[1] = -kInf;
      raise(0, largest(0));
      raise(1, largest(1));
      sum[0] = sum[1] = 0;
      weigh();
    }
    /// While values are under way to the output. The reference follows the largest score only where that grew by more
    /// than a factor of 2^8, which the weights still hold.
    __device__ __forceinline__ void soften() {
      const float m0 = largest(0);
      const float m1 = largest(1);
      constexpr float kMostGrowth = 8;
      const bool grown = (m0 - top[0]) * scale > kMostGrowth || (m1 - top[1]) * scale > kMostGrowth;
      if (__any_sync(kAllLanes, grown)) {
        const float shrink0 = raise(0, m0);
        const float shrink1 = raise(1, m1);
        cute::warpgroup_wait<0>();
        pin(o);
        sum[0] *= shrink0;
        sum[1] *= shrink1;
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          o[4 * i] *= shrink0;
          o[4 * i + 1] *= shrink0;
          o[4 * i + 2] *= shrink1;
          o[4 * i + 3] *= shrink1;
        }
      }
      weigh();
    }
    __device__ __forceinline__ void pack_weights() {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1], T());
    }

    __device__ __forceinline__ void release_queries() { release(shared.q_empty + buffer, lane); }

    /// All blocks of a tile; the queries are there, and are released as soon as the last scores are.
    __device__ __forceinline__ void run(int first, int end) {
#pragma unroll
      for (float& value : o) value = 0;
      top[0] = top[1] = -kInf;
      sum[0] = sum[1] = 0;
      if (first == end) {
        release_queries();
        return;
      }
      int block = end - 1;
      Barrier::wait(shared.k_full + k_at.stage, k_at.phase);
      issue_scores();
      cute::warpgroup_wait<0>();
      pin(s);
      release(shared.k_empty + k_at.stage, lane);
      if (block == first) release_queries();
      k_at.step();
      mask(block);
      soften_first();
      pack_weights();
      if (block > first) Barrier::wait(shared.k_full + k_at.stage, k_at.phase);
      for (--block; block >= first; --block) {
        await_turn();
        issue_scores();
        Barrier::wait(shared.v_full + v_at.stage, v_at.phase);
        issue_values();
        pass_turn();
        cute::warpgroup_wait<1>();
        pin(s);
        release(shared.k_empty + k_at.stage, lane);
        k_at.step();
        if (block == first) release_queries();
        mask(block);
        soften();
        // Here, since the assembler would else wait for the values before it takes the exponentials.
        if (block > first) Barrier::wait(shared.k_full + k_at.stage, k_at.phase);
        cute::warpgroup_wait<0>();
        pin(o);
        release(shared.v_empty + v_at.stage, lane);
        v_at.step();
        pack_weights();
      }
      Barrier::wait(shared.v_full + v_at.stage, v_at.phase);
      issue_values();
      cute::warpgroup_wait<0>();
      pin(o);
      release(shared.v_empty + v_at.stage, lane);
      v_at.step();
    }
  };

  /// Of a work of a cut tile: whether this warp is the last to arrive with its rows, and now holds what all parts have.
  __device__ __forceinline__ static bool join(const Params& params, Compute& state, int part, int parts, int slot,
                                              int warp, int lane) {
    constexpr int kVectors = kDim / 8;  // of a lane, and one more
    constexpr int kLanes = 128 * kWarpgroups;
    const int place = state.warpgroup * 128 + warp * 32 + lane;
    const auto at = [&](int of, int vector) {
      return params.partials + (std::int64_t{slot} + of) * (kVectors + 1) * kLanes + vector * kLanes + place;
    };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      __stcg(at(part, i), make_float4(state.o[4 * i], state.o[4 * i + 1], state.o[4 * i + 2], state.o[4 * i + 3]));
    }
    __stcg(at(part, kVectors), make_float4(state.top[0], state.top[1], state.sum[0], state.sum[1]));
    __threadfence();
    __syncwarp();
    std::uint32_t* const arrivals = params.arrivals + slot * (kLanes / 32) + place / 32;
    std::uint32_t before = 0;
    if (lane == 0) before = atomicAdd(arrivals, 1U);
    if (__shfl_sync(kAllLanes, before, 0) != static_cast<std::uint32_t>(parts - 1)) return false;
    __threadfence();
    if (lane == 0) *arrivals = 0;

    state.top[0] = state.top[1] = -kInf;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const float4 rows = __ldcg(at(i, kVectors));
      state.top[0] = fmaxf(state.top[0], rows.x);
      state.top[1] = fmaxf(state.top[1], rows.y);
    }
    state.sum[0] = state.sum[1] = 0;
#pragma unroll
    for (float& value : state.o) value = 0;
    for (int i = 0; i < parts; ++i) {
      const float4 rows = __ldcg(at(i, kVectors));
      // A part in which a row sees no key gives nothing of its values: other rows may have met NaN there.
      const bool seen[2] = {rows.x != -kInf, rows.y != -kInf};
      const float weights[2] = {seen[0] ? exp2f((rows.x - state.top[0]) * state.scale) : 0.0F,
                                seen[1] ? exp2f((rows.y - state.top[1]) * state.scale) : 0.0F};
      state.sum[0] += weights[0] * rows.z;
      state.sum[1] += weights[1] * rows.w;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 values = __ldcg(at(i, v));
        state.o[4 * v] += seen[0] ? weights[0] * values.x : 0.0F;
        state.o[4 * v + 1] += seen[0] ? weights[0] * values.y : 0.0F;
        state.o[4 * v + 2] += seen[1] ? weights[1] * values.z : 0.0F;
        state.o[4 * v + 3] += seen[1] ? weights[1] * values.w : 0.0F;
      }
    }
    return true;
  }

  /// Four registers of each lane of four: lane t gets the t-th of all.
  __device__ __forceinline__ static void turn(std::uint32_t (&a)[4], int lane) {
    const bool odd = lane % 2 != 0;
    const bool upper = lane % 4 >= 2;
    const std::uint32_t r0 = __shfl_xor_sync(kAllLanes, odd ? a[0] : a[1], 1);
    const std::uint32_t r1 = __shfl_xor_sync(kAllLanes, odd ? a[2] : a[3], 1);
    (odd ? a[0] : a[1]) = r0;
    (odd ? a[2] : a[3]) = r1;
    const std::uint32_t r2 = __shfl_xor_sync(kAllLanes, upper ? a[0] : a[2], 2);
    const std::uint32_t r3 = __shfl_xor_sync(kAllLanes, upper ? a[1] : a[3], 2);
    (upper ? a[0] : a[2]) = r2;
    (upper ? a[1] : a[3]) = r3;
  }

  __device__ __forceinline__ static void compute(const Params& params, Shared& shared) {
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128 - 1, 0);
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Compute state{.params = params,
                  .shared = shared,
                  .warpgroup = warpgroup,
                  .lane = lane,
                  .q_descriptor = descriptor(shared.q[0] + warpgroup * 64 * kColumns, 16, 1024),
                  .k_descriptor = descriptor(shared.k[0], 16, 1024 * kParts),
                  .v_descriptor = descriptor(shared.v[0], 1024, 1024 * kParts)};
    if (warpgroup == kWarpgroups - 1) state.pass_turn();

    const int works = __shfl_sync(kAllLanes, params.work_indptr[blockIdx.x + 1] - params.work_indptr[blockIdx.x], 0);
    for (int work = 0; work < works; ++work) {
      const int buffer = work % kQueryBuffers;
      Barrier::wait(shared.q_full + buffer, work / kQueryBuffers & 1);
      state.buffer = buffer;
      // Uniform over the warp, as the compiler shall know.
      const auto word = [&](int i) { return __shfl_sync(kAllLanes, shared.words[work & 3][i], 0); };
      const int first_row = word(2);
      const int rows = word(1);
      const int kv_len = word(3);
      const int before = kv_len - word(4);
      const int head = word(5);
      const int warpgroup_row = word(0) + warpgroup * 64;
      const int row = warpgroup_row + warp * 16 + lane / 4;

      float scale = params.sm_scale;
      if (params.k_head_scale != nullptr) scale *= params.k_head_scale[head];
      state.to_cap = scale / params.soft_cap;
      state.scale = (kSoftCap ? params.soft_cap : scale) * kLog2E;
      const auto limits = [&](int packed, int& low, int& high) {
        const int position = before + params.group.div(min(packed, rows - 1));
        high = params.causal ? min(kv_len, position + 1) : kv_len;
        low = params.window_left >= 0 && position > params.window_left ? position - params.window_left : 0;
      };
      limits(row, state.low[0], state.high[0]);
      limits(row + 8, state.low[1], state.high[1]);
      int unused = 0;
      limits(warpgroup_row, unused, state.high_all);
      limits(warpgroup_row + 63, state.low_all, unused);

      state.run(word(6), word(7));
      if (const int parts = word(9); parts > 1) {
        if (!join(params, state, word(8), parts, word(10), warp, lane)) continue;
      }

#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int packed = row + 8 * r;
        int token = 0;
        int in_group = 0;
        params.group(token, in_group, packed);
        const int qo_head = head * params.group.divisor + in_group;
        float sum = state.sum[r];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        const bool live = packed < rows;
        const bool empty = state.high[r] <= state.low[r];
        const float sink = live && params.sinks != nullptr ? params.sinks[qo_head] * kLog2E : -kInf;
        const float top = __fmul_rn(state.top[r], state.scale);
        const float new_top = fmaxf(top, sink);
        const float shrink = exp2f(top - new_top);
        const float total = sum * shrink + exp2f(sink - new_top);
        float v_scale = params.v_scale;
        if (params.v_head_scale != nullptr) v_scale *= params.v_head_scale[head];
        const float factor = v_scale * shrink / total;
        const std::int64_t out_row = std::int64_t{first_row} + token;
        if (params.lse != nullptr && live && lane % 4 == 0) {
          params.lse[out_row * params.num_qo_heads + qo_head] = empty ? -kInf : (new_top + log2f(total)) * kLn2;
        }
        T* const out = params.out + out_row * params.out_row + qo_head * params.out_head;
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) {
          std::uint32_t a[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = 4 * (4 * i + j) + 2 * r;
            // Of an empty row not even a multiple: other rows of the tile may have met NaN in the values.
            a[j] = empty ? 0 : pack(state.o[at] * factor, state.o[at + 1] * factor, T());
          }
          turn(a, lane);
          if (live) {
            *reinterpret_cast<uint4*>(out + 32 * i + 8 * (lane % 4)) = make_uint4(a[0], a[1], a[2], a[3]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ static void run(const Params& params) {
    extern __shared__ __align__(1024) std::uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kQueryBuffers; ++i) {
        Barrier::init(shared.q_full + i, kQueryThreads);
        Barrier::init(shared.q_empty + i, 4 * kWarpgroups);
      }
      for (int i = 0; i < kStages; ++i) {
        Barrier::init(shared.k_full + i, 1);
        Barrier::init(shared.v_full + i, 1);
        Barrier::init(shared.k_empty + i, 4 * kWarpgroups);
        Barrier::init(shared.v_empty + i, 4 * kWarpgroups);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (warp == 0) {
        load_blocks<false>(params, shared.k[0], shared.k_full, shared.k_empty);
      } else if (warp == 1) {
        load_blocks<true>(params, shared.v[0], shared.v_full, shared.v_empty);
      } else {
        load_queries(params, shared);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      compute(params, shared);
    }
  }
};

template <class Instance>
__global__ __launch_bounds__(Instance::kThreads,
                             1) void prefill_kernel(const __grid_constant__ typename Instance::Params params) {
  Instance::run(params);
}

/// The maps of K or V: elements of a part of a row, slots of a group of 8, parts, groups, and heads of pages or tokens.
template <class T, int kDim, int kBoxSlots>
struct PrefillMaps {
  std::int32_t step = 0;
  std::int32_t head = 0;

  /// `count` pages `step_stride` apart, of `slots` slots each; or as many tokens, which are the slots too.
  cudaError_t encode(CUtensorMap& boxes, CUtensorMap& single, void* data, std::int64_t count, std::int64_t step_stride,
                     std::int64_t slots, std::int64_t token_stride, std::int64_t heads, std::int64_t head_stride) {
    constexpr std::int64_t kBytes = sizeof(T);
    constexpr int kColumns = 128 / sizeof(T);
    // Some drivers encode tensors of less than 128 KB wrongly; nothing behind the last page is ever asked for.
    constexpr std::int64_t kLeastBytes = 131072;
    const std::int64_t unit = std::gcd(step_stride, head_stride);
    step = static_cast<std::int32_t>(step_stride / unit);
    head = static_cast<std::int32_t>(head_stride / unit);
    const std::int64_t places =
        std::max((count - 1) * step + (heads - 1) * head + 1, kLeastBytes / (unit * kBytes) + 1);
    const cuuint64_t sizes[] = {kColumns, 8, kDim / kColumns, static_cast<cuuint64_t>((slots + 7) / 8),
                                static_cast<cuuint64_t>(places)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(token_stride * kBytes), 128,
                                  static_cast<cuuint64_t>(8 * token_stride * kBytes),
                                  static_cast<cuuint64_t>(unit * kBytes)};
    const cuuint32_t box[] = {kColumns, 8, kDim / kColumns, kBoxSlots / 8, 1};
    const cuuint32_t one[] = {kColumns, 1, 1, 1, 1};
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    constexpr auto kType = std::is_same_v<T, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const auto encode_one = [&](CUtensorMap& map, const cuuint32_t* of) {
      return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
          &map, kType, 5U, data, &sizes[0], &strides[0], of, &steps[0], CU_TENSOR_MAP_INTERLEAVE_NONE,
          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    const bool done = encode_one(boxes, &box[0]) == CUDA_SUCCESS && encode_one(single, &one[0]) == CUDA_SUCCESS;
    return done ? cudaSuccess : cudaErrorInvalidValue;
  }
};

template <class Instance>
struct PrefillLaunch {
  using Params = typename Instance::Params;
  using T = typename Instance::Element;

  static cudaError_t launch(const HopperArgs& args, cudaStream_t stream) {
    const AttentionArgs& call = args.call;
    const KvView& kv = call.kv;
    const bool paged = kv.indices != nullptr;
    const std::int64_t count = paged ? kv.num_pages : args.total_kv;
    const std::int64_t slots = paged ? kv.page_size : args.total_kv;
    Params params{};
    PrefillMaps<T, Instance::kHeadDim, Instance::kBoxSlots> k;
    PrefillMaps<T, Instance::kHeadDim, Instance::kBoxSlots> v;
    cudaError_t status = k.encode(params.k_boxes, params.k_slots, kv.k, count, paged ? kv.k_page : kv.k_token, slots,
                                  kv.k_token, kv.num_kv_heads, kv.k_head);
    if (status != cudaSuccess) return status;
    status = v.encode(params.v_boxes, params.v_slots, kv.v, count, paged ? kv.v_page : kv.v_token, slots, kv.v_token,
                      kv.num_kv_heads, kv.v_head);
    if (status != cudaSuccess) return status;
    params.k_step = k.step;
    params.k_head = k.head;
    params.v_step = v.step;
    params.v_head = v.head;
    params.q = static_cast<const T*>(call.q);
    params.out = static_cast<T*>(call.out);
    params.lse = call.lse;
    params.q_row = call.q_row;
    params.q_head = call.q_head;
    params.out_row = args.out_row;
    params.out_head = args.out_head;
    const HopperShape& shape = *args.shape;
    const auto words = [&](std::size_t offset) {
      return reinterpret_cast<const std::int32_t*>(args.schedule + offset);
    };
    params.work_indptr = words(shape.work_indptr);
    const std::size_t fields[] = {shape.qo_tile_indices, shape.qo_indptr,    shape.qo_len,       shape.kv_indptr,
                                  shape.kv_len,          shape.head_indices, shape.batch_indices};
    std::ranges::transform(fields, std::begin(params.fields), words);
    if (shape.slots > 0) {
      params.part = words(shape.part_indices);
      params.parts = words(shape.parts);
      params.slots = words(shape.slot_indices);
      params.arrivals = reinterpret_cast<std::uint32_t*>(const_cast<std::byte*>(args.schedule) + shape.arrivals);
      params.partials = reinterpret_cast<float4*>(args.partials);
    }
    params.page_indptr = kv.indptr;
    params.pages = kv.indices;
    params.page_size = cutlass::FastDivmod(kv.page_size);
    params.group = cutlass::FastDivmod(call.num_qo_heads / kv.num_kv_heads);
    params.num_qo_heads = call.num_qo_heads;
    params.causal = call.causal;
    params.window_left = call.window_left;
    params.sm_scale = call.sm_scale;
    params.soft_cap = call.soft_cap;
    params.v_scale = call.v_scale;
    params.k_head_scale = call.k_head_scale;
    params.v_head_scale = call.v_head_scale;
    params.sinks = call.sinks;

    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(args.num_workers));
    config.blockDim = dim3(Instance::kThreads);
    config.dynamicSmemBytes = sizeof(typename Instance::Shared);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, &prefill_kernel<Instance>, params);
  }

  static PrefillKernel describe() {
    return {.rows = Instance::kRows,
            .soft_cap = Instance::kCapped,
            .function = reinterpret_cast<const void*>(&prefill_kernel<Instance>),
            .shared_bytes = sizeof(typename Instance::Shared),
            .launch = &launch};
  }
};

/// Tall tiles read the keys less often; low ones share out little work among more multiprocessors.
template <class T, int kDim, PrefillVariant kVariant>
std::span<const PrefillKernel> prefill_kernels() {
  constexpr bool kSoftCap = kVariant == PrefillVariant::kSoftCap;
  if constexpr (kDim == 64) {
    static const std::array kernels = {PrefillLaunch<PrefillInstance<T, 64, 128, 3, 3, 2, kSoftCap>>::describe()};
    return kernels;
  } else if constexpr (kDim == 128) {
    static const std::array kernels = {PrefillLaunch<PrefillInstance<T, 128, 128, 2, 2, 2, kSoftCap>>::describe(),
                                       PrefillLaunch<PrefillInstance<T, 128, 80, 3, 3, 2, kSoftCap>>::describe()};
    return kernels;
  } else {
    static const std::array kernels = {PrefillLaunch<PrefillInstance<T, 256, 80, 2, 2, 1, kSoftCap>>::describe()};
    return kernels;
  }
}

}  // namespace fiw::cuda
