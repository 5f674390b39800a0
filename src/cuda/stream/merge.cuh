// How the blocks of a split call bring its partial results together themselves, so that no other kernel need follow.
//
// Every block of a request and KV head counts itself once its partial results are written; the one that finds all
// others counted merges them. They are read in the order of their chunks, not of their ends, and summed up exactly as
// the merge kernel does (cuda/merge/merge.cu): which of the two merges, and which block is last, shows in no bit.
#pragma once

#include "cuda/stream/heads.cuh"
#include "cuda/stream/mma.cuh"
#include "cuda/stream/stream.h"

namespace fiw::cuda {

/// Counts one of `blocks` and returns how many had come before; who is the last sees what the others had written. It
/// leaves zero behind: the count wraps.
__device__ __forceinline__ std::uint32_t arrive(std::uint32_t* arrivals, std::int32_t blocks) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(arrivals), "r"(blocks - 1)
               : "memory");
  return before;
}

/// What merging the only state of a row makes of it.
struct LoneState {
  float weight;  ///< of its values; 0 where it has seen no key
  float lse;

  /// `log_sum` is a base-2 logarithm, `sink` a natural one or null.
  __device__ __forceinline__ LoneState(float log_sum, const float* sink) {
    constexpr float kLog2E = 1.44269504088896340736F;
    constexpr float kLn2 = 0.693147180559945309417F;
    const bool empty = log_sum == -INFINITY;
    weight = empty ? 0.0F : 1.0F;
    if (sink != nullptr && !empty) {
      const float own = log_sum;
      const float sink_log2 = __fmul_rn(*sink, kLog2E);  // rounded, as the merge kernel has it
      const float top = fmaxf(own, sink_log2);
      const float sum = exp2f(own - top) + exp2f(sink_log2 - top);
      weight = exp2f(own - top) * (1.0F / sum);
      log_sum = top + log2f(sum);
    }
    lse = log_sum * kLn2;
  }
};

template <class Q>
__device__ __forceinline__ uint2 merge_lone(uint2 values, float weight, Q) {
  if (weight == 0) return {0, 0};  // behind no weight may be anything
  const float2 low = unpack(values.x, Q{});
  const float2 high = unpack(values.y, Q{});
  // The zero is the merge kernel's empty sum: it makes negative zeros positive.
  return {pack(fmaf(weight, low.x, 0), fmaf(weight, low.y, 0), Q{}),
          pack(fmaf(weight, high.x, 0), fmaf(weight, high.y, 0), Q{})};
}

/// The rows of a request and KV head, as the block sees them that merges.
struct MergeRows {
  std::int32_t kv_head;
  std::int32_t rows;
  std::int32_t first_row;  ///< in the output
  std::int32_t chunk;      ///< the block's own
  std::int32_t chunks;
  const std::int64_t* partial_at;  ///< [rows], in shared memory: where the block's own partial results begin
};

/// Those of a row's kDim values that a lane adds up.
template <class Q, int kDim>
struct LaneValues {
  static constexpr int kPairs = kDim / 64;
  struct alignas(4 * kPairs) Packed {
    std::uint32_t pairs[kPairs];
  };
  float values[2 * kPairs] = {};

  /// What lies behind no weight may be anything.
  __device__ __forceinline__ void add(float weight, const Packed& packed) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const float2 x = unpack(weight != 0 ? packed.pairs[k] : 0, Q{});
      values[2 * k] += weight * x.x;
      values[2 * k + 1] += weight * x.y;
    }
  }
  __device__ __forceinline__ void add(const LaneValues& other) {
#pragma unroll
    for (int k = 0; k < 2 * kPairs; ++k) values[k] += other.values[k];
  }
  __device__ __forceinline__ Packed packed() const {
    Packed packed;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) packed.pairs[k] = pack(values[2 * k], values[2 * k + 1], Q{});
    return packed;
  }
};

/// By a whole block, each warp on its own: it takes every kWarps-th row. All others wait for this block, so what counts
/// is how long a warp waits: it asks for all logarithms and values at once, and reckons the weights of all of its rows
/// side by side, some lanes a row. `room` is the warp's own, kRoomBytes of shared memory; what does not fit there is
/// taken in pieces.
template <class Q, int kDim, int kRows, int kWarps, int kRoomBytes>
class RowMerge {
  static constexpr unsigned kAllLanes = 0xFFFFFFFFU;
  static constexpr float kLog2E = 1.44269504088896340736F;
  static constexpr float kLn2 = 0.693147180559945309417F;
  static constexpr int kSums = 4;              ///< as the merge kernel has warps
  static constexpr int kOwn = kRows / kWarps;  ///< rows of a warp, at most
  static constexpr int kTogether = kOwn / 2;   ///< rows whose values are added up side by side
  static constexpr int kLeastLogRows = kTogether == 1 ? 0 : kTogether == 2 ? 1 : 2;
  static constexpr int kLanesOfRow = 32 / kOwn;  ///< that reckon its weights
  static constexpr int kWeights = 512;           ///< floats; logarithms at first
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kStates = (kRoomBytes - 4 * kWeights) / kRowBytes;
  static constexpr int kCopiers = kRowBytes / 16;    ///< lanes that copy a state's values
  static constexpr int kSideBySide = 32 / kCopiers;  ///< states that a warp copies at once
  static_assert(1 << kLeastLogRows == kTogether && kOwn == 2 * kTogether && kStates >= kOwn * kSums &&
                kWeights / kOwn % kSums == 0);
  using Values = LaneValues<Q, kDim>;
  using Packed = typename Values::Packed;
  struct alignas(4 * kTogether) Weights {
    float of[kTogether];
  };

 public:
  __device__ __forceinline__ RowMerge(std::byte* room, const AttentionArgs& call, const StreamMerge& merge,
                                      const MergeRows& of, const HeadGroup& group, int warp, int lane)
      : call_(call),
        merge_(merge),
        room_(room),
        weights_(reinterpret_cast<float*>(room + kStates * kRowBytes)),
        lane_(lane),
        chunks_(of.chunks),
        padded_((of.chunks + kSums - 1) / kSums * kSums),
        own_((of.rows - warp + kWarps - 1) / kWarps) {
    const int row = warp + min(lane % kOwn, max(own_ - 1, 0)) * kWarps;
    head_ = group.head(of.kv_head, row);
    const std::int64_t out_row = of.first_row + group.token(row);
    out_at_ = out_row * merge.out_row + head_ * merge.out_head;
    lse_at_ = out_row * call.num_qo_heads + head_;
    first_state_ = of.partial_at[row] / kDim - std::int64_t{of.chunk} * call.num_qo_heads;
  }

  __device__ __forceinline__ void run() {
    const bool staged = padded_ * kOwn <= kWeights;
    while (1 << log_rows_ < own_) ++log_rows_;
    while (1 << log_rows_ > kTogether && padded_ << log_rows_ > kStates) --log_rows_;
    const int at_once = 1 << log_rows_;
    const int piece = min(padded_, min(kStates >> log_rows_, kWeights / kOwn) / kSums * kSums);

    if (staged) copy_logarithms();
    commit_copies();
    Values sums[kTogether][kSums];
#pragma unroll 1
    for (int first = 0; first < own_; first += at_once) {
      const int rows = min(at_once, own_ - first);
#pragma unroll 1
      for (int begin = 0; begin < chunks_; begin += piece) {
        copy_values(first, rows, begin, piece);
        if (first + begin == 0) {
          await_copies<1>();
          __syncwarp();
          weigh(staged);
        }
        if (!staged) weigh_piece(begin, piece);
        await_copies<0>();
        __syncwarp();
#pragma unroll 1
        for (int j = 0; j < rows; j += kTogether) {
          if (begin == 0) {
#pragma unroll
            for (int u = 0; u < kTogether * kSums; ++u) sums[u / kSums][u % kSums] = {};
          }
          add_up(sums, j, weights_ + (staged ? begin * kOwn : 0) + first + j, min(piece, padded_ - begin));
          if (begin + piece < chunks_) continue;
#pragma unroll
          for (int r = 0; r < kTogether; ++r) store(sums[r], first + j + r);
        }
        __syncwarp();  // all are done with what is there
      }
    }
  }

 private:
  /// [state][own row], where the weights will be.
  __device__ __forceinline__ void copy_logarithms() const {
    if (lane_ % kOwn >= own_) return;
    const float* from = call_.lse + first_state_ + std::int64_t{lane_ / kOwn} * call_.num_qo_heads;
    auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(weights_ + lane_));
#pragma unroll 1
    for (int i = lane_ / kOwn; i < chunks_; i += kLanesOfRow) {
      copy_4(to, from);
      from += kLanesOfRow * call_.num_qo_heads;
      to += 4 * 32;
    }
  }

  /// [state][row], of `rows` own rows from `first` on and of the states from `begin` on.
  __device__ __forceinline__ void copy_values(int first, int rows, int begin, int piece) const {
    constexpr int kPasses = kOwn > kSideBySide ? kOwn / kSideBySide : 1;  // over the rows of a state
    const int at_once = 1 << log_rows_;
    const int part = lane_ / kCopiers;
    const int j = part & (at_once - 1);
    const int state = part >> log_rows_;
    const int stride = max(kSideBySide >> log_rows_, 1);
    const int states = min(piece, chunks_ - begin);
    const std::int64_t step = std::int64_t{call_.num_qo_heads} * kRowBytes;
    const std::byte* from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int64_t first_state = __shfl_sync(kAllLanes, first_state_, first + j + pass * kSideBySide);
      from[pass] = static_cast<const std::byte*>(call_.out) + first_state * kRowBytes + (begin + state) * step +
                   lane_ % kCopiers * 16;
    }
    auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(room_)) + lane_ % kCopiers * 16 +
              ((state << log_rows_) + j) * kRowBytes;
#pragma unroll kPasses == 1 ? 2 : 1
    for (int i = state; i < states; i += stride) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (j + pass * kSideBySide < rows) copy_16(to + pass * kSideBySide * kRowBytes, from[pass]);
        from[pass] += stride * step;
      }
      to += (stride << log_rows_) * kRowBytes;
    }
    commit_copies();
  }

  /// The largest logarithm and the weights' norm of the lane's row, and its result's logarithm; the weights, where they
  /// fit. The sums are those of a warp whose lanes have every 32nd state each.
  __device__ __forceinline__ void weigh(bool staged) {
    const int first = lane_ / kOwn;
    const int states = lane_ % kOwn < own_ ? chunks_ : 0;
    float* const mine = weights_ + lane_ % kOwn;
    const auto log_of = [&](int i) {
      return staged ? mine[i * kOwn] : call_.lse[first_state_ + std::int64_t{i} * call_.num_qo_heads];
    };
    bool any_nan = false;  // which fmaxf passes over
    top_ = -INFINITY;
#pragma unroll 2
    for (int i = first; i < states; i += kLanesOfRow) {
      const float x = log_of(i);
      any_nan |= isnan(x);
      top_ = fmaxf(top_, x);
    }
#pragma unroll
    for (int offset = kOwn; offset < 32; offset *= 2) top_ = fmaxf(top_, __shfl_xor_sync(kAllLanes, top_, offset));
    unsigned lanes_of_row = 0;
#pragma unroll
    for (int i = 0; i < 32; i += kOwn) lanes_of_row |= 1U << i;
    any_nan = (__ballot_sync(kAllLanes, any_nan) >> lane_ % kOwn & lanes_of_row) != 0;
    const bool empty = top_ == -INFINITY && !any_nan;
    float sink = -INFINITY;
    if (call_.sinks != nullptr) sink = __fmul_rn(call_.sinks[head_], kLog2E);
    top_ = fmaxf(top_, sink);

    float sums[kOwn] = {};
#pragma unroll 1
    for (int base = 0; base < chunks_; base += 32) {
#pragma unroll
      for (int k = 0; k < kOwn; ++k) {
        if (k % 2 == 0 && k > 0 && base + k * kLanesOfRow >= chunks_) break;
        const int i = base + k * kLanesOfRow + first;
        if (i >= states) continue;
        const float term = exp2f(log_of(i) - top_);
        if (staged) mine[i * kOwn] = term;
        sums[k] += term;
      }
    }
#pragma unroll
    for (int half = kOwn / 2; half > 0; half /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    float sum = sums[0];
#pragma unroll
    for (int offset = 16; offset >= kOwn; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    if (call_.sinks != nullptr) sum += exp2f(sink - top_);
    norm_ = empty ? 0.0F : 1.0F / sum;
    if (staged) {
#pragma unroll 2
      for (int i = first; i < padded_; i += kLanesOfRow) {
        mine[i * kOwn] = i < states && !empty ? mine[i * kOwn] * norm_ : 0.0F;
      }
    }
    if (merge_.lse != nullptr && lane_ < own_) merge_.lse[lse_at_] = empty ? -INFINITY : (top_ + log2f(sum)) * kLn2;
  }

  /// The weights of some of the states, where not all fit.
  __device__ __forceinline__ void weigh_piece(int begin, int piece) const {
    const int states = lane_ % kOwn < own_ ? min(piece, chunks_ - begin) : 0;
    const float* const from = call_.lse + first_state_ + std::int64_t{begin} * call_.num_qo_heads;
#pragma unroll 1
    for (int i = lane_ / kOwn; i < piece; i += kLanesOfRow) {
      float& weight = weights_[i * kOwn + lane_ % kOwn];
      weight = 0;
      if (i < states && norm_ != 0) weight = exp2f(from[std::int64_t{i} * call_.num_qo_heads] - top_) * norm_;
    }
  }

  __device__ __forceinline__ void add_up(Values (&sums)[kTogether][kSums], int j, const float* weights,
                                         int states) const {
    const std::byte* values = room_ + j * kRowBytes;
#pragma unroll kTogether == 1 ? 2 : 1
    for (int i = 0; i < states; i += kSums) {
#pragma unroll
      for (int u = 0; u < kSums; ++u) {
        const Weights weight = *reinterpret_cast<const Weights*>(weights + u * kOwn);
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          sums[r][u].add(weight.of[r], reinterpret_cast<const Packed*>(values + r * kRowBytes)[lane_]);
        }
        values += kRowBytes << log_rows_;
      }
      weights += kSums * kOwn;
    }
  }

  __device__ __forceinline__ void store(Values (&sums)[kSums], int j) const {
    const std::int64_t at = __shfl_sync(kAllLanes, out_at_, j);
#pragma unroll
    for (int u = 1; u < kSums; ++u) sums[0].add(sums[u]);
    if (j < own_) reinterpret_cast<Packed*>(static_cast<Q*>(merge_.out) + at)[lane_] = sums[0].packed();
  }

  const AttentionArgs& call_;
  const StreamMerge& merge_;
  std::byte* room_;
  float* weights_;
  int lane_;
  std::int32_t chunks_;
  std::int32_t padded_;  ///< to whole kSums
  int own_;
  int log_rows_ = kLeastLogRows;  ///< of the rows whose states are in the room together
  // of the lane's row
  std::int32_t head_;
  std::int64_t out_at_;
  std::int64_t lse_at_;
  std::int64_t first_state_;  ///< of its first chunk
  float top_ = 0;
  float norm_ = 0;
};

}  // namespace fiw::cuda
