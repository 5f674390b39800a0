// Decode and verify attention as fast as memory gives K and V.
//
// A request's query tokens times the heads of a group are its rows, at most 32. A block takes all rows of one KV head
// over one chunk of keys, so that every byte of K and V is read once. Then reading is all that counts:
//
// - Each warp reads for itself. It takes every kWarps-th tile of 16 or 32 keys through a ring of its own in shared
//   memory, filled by asynchronous copies, and keeps its own running maximum, sums and values. Nothing in the loop
//   waits for another warp; they meet once, at the end of the chunk. Two blocks to a multiprocessor keep 128 KB under
//   way: 4.4 TB/s for a microsecond of latency are 33 KB.
// - Keys are the rows of the matrix products (S^T = K Q^T, O^T = V^T P^T) and queries their columns. So 1 to 8 rows
//   cost one product of 8 columns, where the usual order pads them to 16, and each 8 rows more another one. Weights
//   come out of the first product transposed to what the second one takes; one instruction turns 8 x 8 of them
//   round.
// - fp8 stays fp8 in shared memory and goes to fp16 in registers, one instruction for two elements, exactly. bfloat16
//   queries are brought into fp16's range by a power of two for each row, which loses 2^-39 of a row's largest element.
//   A register of loaded fp8 holds neighbours where products want elements farther apart: Q's elements are put in the
//   same order instead, and those of the results into theirs at the end.
// - Keys past the end of a chunk are filled with zeros, so what lies in unused slots is never looked at. Only tiles of
//   which some row does not see some key take the long way through limits, and all do under soft cap or slopes.
// - Where a request is cut into chunks, the block that ends last merges their results: see merge.cuh.
// - The second-level cache is told that K and V come once: schedules, page tables and partial results stay in it, whose
//   reading is the time that a short call takes to get going.
//
// Addresses are reckoned in 64 bits: any strides, any cache size.
#pragma once

#include <array>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/soft_tanh.cuh"
#include "cuda/stream/heads.cuh"
#include "cuda/stream/merge.cuh"
#include "cuda/stream/mma.cuh"
#include "cuda/stream/stream.h"

namespace fiw::cuda {

template <class Q, class Kv, int kDim, int kRows>
struct StreamConfig {
  static constexpr bool kFp8 = sizeof(Kv) == 1;
  using Element = std::conditional_t<kFp8, half, Kv>;  ///< that products are made of
  static constexpr bool kScaledQueries = !std::is_same_v<Q, Element>;

  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Kv));
  static constexpr int kKeys = kRowBytes <= 128 ? 32 : 16;  ///< of a tile
  static constexpr int kTileBytes = kKeys * kRowBytes;      ///< of its K, and as many of its V
  static constexpr int kWarps = kRowBytes > 256 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRingBytes = 96 * 1024;
  static constexpr int kStages = kRingBytes / (kWarps * 2 * kTileBytes);
  static constexpr int kTiles16 = kKeys / 16;  ///< products' rows in a tile of keys
  static constexpr int kTiles8 = kRows / 8;    ///< products' columns in the rows
  static constexpr int kSteps = kDim / 16;

  /// Queries in registers, where they and the results leave room.
  static constexpr bool kHoldQueries = kDim * kRows <= 128 * 16;

  /// Values of a row when warps add theirs up: padded, so that rows start in different banks.
  static constexpr int kPaddedDim = kDim + 4;
  static_assert(kWarps * kRows * kPaddedDim * 4 <= kRingBytes, "the ring is where the warps add up their values");
  static_assert(kStages >= 2);
};

/// What a row needs to know where keys are looked at one by one.
struct StreamRow {
  std::int32_t first;     ///< key that it sees
  std::int32_t end;       ///< one past the last
  std::int32_t position;  ///< its token's place among the keys
  float slope;
};

template <class Config>
struct StreamShared {
  alignas(1024) std::byte ring[Config::kRingBytes];
  alignas(16) uint2 queries[Config::kSteps][Config::kTiles8][32];  ///< B operands, by lane
  StreamRow rows[8 * Config::kTiles8];
  float query_scale[8 * Config::kTiles8];
  float2 states[Config::kWarps][8 * Config::kTiles8];  ///< each warp's maximum and sum
  float norms[8 * Config::kTiles8];
  std::int64_t out_at[8 * Config::kTiles8];  ///< where the row's results go
  float weights[8 * Config::kTiles8];        ///< see LoneState
  std::int32_t request, chunk;
  bool last;  ///< to end, of the blocks of its request and KV head
};

/// 16-byte chunk `chunk` of row `row` lies at this place in its row, so that 8 rows' same chunks are in 8 banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  return kRowBytes >= 128 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

/// The keys of an item, and its place in the output.
struct StreamSpan {
  std::int32_t first_row, qo_len, kv_len;
  std::int32_t begin, end;
  std::int32_t first_entry;  ///< in the page table
  std::int32_t out_row;
  std::int32_t chunks;  ///< of its request; so many rows lie between those of two tokens

  __device__ StreamSpan(const AttentionArgs& call, std::int32_t request, std::int32_t chunk, std::int32_t chunk_size) {
    const KvView& kv = call.kv;
    first_row = call.qo_indptr[request];
    first_entry = kv.indptr[request];
    const std::int32_t owned = kv.indptr[request + 1] - first_entry;
    const std::int32_t last = kv.last_page_len[request];
    out_row = call.o_indptr[request];
    const std::int32_t out_end = call.o_indptr[request + 1];
    qo_len = call.qo_indptr[request + 1] - first_row;
    kv_len = owned == 0 ? 0 : (owned - 1) * kv.page_size + last;
    const std::int64_t start =
        call.window_left < 0 ? 0 : max(std::int64_t{kv_len} - qo_len - call.window_left, std::int64_t{0});
    const auto limit = [&](std::int64_t key) { return static_cast<std::int32_t>(min(key, std::int64_t{kv_len})); };
    begin = limit(start + (call.split_kv ? std::int64_t{chunk} * chunk_size : 0));
    end = call.split_kv ? limit(start + (std::int64_t{chunk} + 1) * chunk_size) : kv_len;
    chunks = call.split_kv ? (out_end - out_row) / qo_len : 1;
    if (call.split_kv) out_row += chunk;
  }
};

/// A warp's way through its tiles of keys: where each lane's key of the next tile lies, a tile ahead of its copy.
template <class Config, class Kv>
class StreamReader {
 public:
  __device__ StreamReader(const KvView& kv, const StreamSpan& span, std::int32_t kv_head, std::uint32_t ring, int warp,
                          int lane)
      : kv_(kv),
        k_(static_cast<const Kv*>(kv.k) + kv_head * kv.k_head),
        v_(static_cast<const Kv*>(kv.v) + kv_head * kv.v_head),
        entries_(kv.indices + span.first_entry),
        lane_(lane),
        end_(span.end),
        tile_(span.begin + warp * Config::kKeys) {
    const std::int32_t key = tile_ + lane % Config::kKeys;
    page_ = key / kv.page_size;
    slot_ = key - page_ * kv.page_size;
    page_step_ = kStep / kv.page_size;
    slot_step_ = kStep - page_step_ * kv.page_size;
    const int row = lane / kChunks;
    to_ = ring + row * Config::kRowBytes + 16 * swizzle<Config::kRowBytes>(row, lane % kChunks);
    found_key_ = key;
  }

  struct Place {
    std::int32_t page, slot;
  };
  /// Where the lane's key of the next tile lies.
  __device__ __forceinline__ Place find() {
    const Place place{found_key_ < end_ ? entries_[page_] : 0, slot_};
    found_key_ += kStep;
    page_ += page_step_;
    slot_ += slot_step_;
    if (slot_ >= kv_.page_size) {
      slot_ -= kv_.page_size;
      ++page_;
    }
    return place;
  }

  /// Starts copying a tile into a stage of the ring; its keys lie where find() said.
  __device__ __forceinline__ void copy(int stage, const Place& place) {
    if (tile_ < end_) {
      const Kv* const k = k_ + place.page * kv_.k_page + place.slot * kv_.k_token;
      const Kv* const v = v_ + place.page * kv_.v_page + place.slot * kv_.v_token;
      const std::uint32_t to = to_ + stage * (2 * Config::kTileBytes);
#pragma unroll
      for (int i = 0; i < Config::kKeys / kRowsPerCopy; ++i) {
        const int row = i * kRowsPerCopy + lane_ / kChunks;
        const std::uint32_t at =
            (to ^ 16 * swizzle<Config::kRowBytes>(i * kRowsPerCopy, 0)) + i * kRowsPerCopy * Config::kRowBytes;
        const bool live = tile_ + row < end_;
        copy_16(at, row_of(k, row), live);
        copy_16(at + Config::kTileBytes, row_of(v, row), live);
      }
    }
    commit_copies();
    tile_ += kStep;
  }

 private:
  static constexpr int kStep = Config::kWarps * Config::kKeys;
  static constexpr int kChunks = Config::kRowBytes / 16;
  static constexpr int kRowsPerCopy = 32 / kChunks;

  __device__ __forceinline__ const std::byte* row_of(const Kv* mine, int row) const {
    const auto address = __shfl_sync(0xFFFFFFFFU, reinterpret_cast<unsigned long long>(mine), row);
    return reinterpret_cast<const std::byte*>(address) + lane_ % kChunks * 16;
  }

  const KvView& kv_;
  const Kv* k_;
  const Kv* v_;
  const std::int32_t* entries_;
  int lane_;
  std::int32_t end_;
  std::int32_t tile_;  ///< first key of the next tile to copy
  std::int32_t found_key_;
  std::int32_t page_, slot_, page_step_, slot_step_;
  std::uint32_t to_;
};

/// Puts the rows' queries where products find them; rows beyond the request's are zeros. A warp takes whole rows.
template <class Config, class Q>
__device__ __forceinline__ void arrange_queries(StreamShared<Config>& shared, const AttentionArgs& call,
                                                const StreamSpan& span, std::int32_t kv_head, const HeadGroup& group,
                                                int warp, int lane) {
  constexpr int kRows = 8 * Config::kTiles8;
  constexpr int kPasses = kRows / Config::kWarps;
  constexpr int kPairs = Config::kSteps / 4;  // a lane's, of a row
  const std::int32_t rows = span.qo_len * group.size();
  std::uint32_t pairs[kPasses][kPairs];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * Config::kWarps + warp;
    const std::int64_t at = (std::int64_t{span.first_row} + group.token(row)) * call.q_row +
                            std::int64_t{group.head(kv_head, row)} * call.q_head;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[pass][i] =
          row < rows ? *reinterpret_cast<const std::uint32_t*>(static_cast<const Q*>(call.q) + at + 2 * (i * 32 + lane))
                     : 0;
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * Config::kWarps + warp;
    if constexpr (Config::kScaledQueries) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 x = unpack(pairs[pass][i], Q{});
        most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, offset));
      // The largest element goes to 2^14 .. 2^15; zeros, next to zero and infinity stay where they are.
      const int exponent = (__float_as_int(most) >> 23) - 127;
      const bool scaled = exponent >= -113 && exponent <= 127;
      const float down = scaled ? __int_as_float((127 + 14 - exponent) << 23) : 1.0F;
      if (lane == 0) shared.query_scale[row] = scaled ? __int_as_float((127 - 14 + exponent) << 23) : 1.0F;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 x = unpack(pairs[pass][i], Q{});
        pairs[pass][i] = pack(x.x * down, x.y * down, typename Config::Element{});
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = i * 32 + lane;  // of the row; 8 make a step
      const int in_step = pair % 8;
      const int t = Config::kFp8 ? in_step / 2 : in_step % 4;
      const int half_of_step = Config::kFp8 ? in_step % 2 : in_step / 4;
      auto* const target =
          reinterpret_cast<std::uint32_t*>(&shared.queries[pair / 8][row / 8][row % 8 * 4 + t]) + half_of_step;
      *target = pairs[pass][i];
    }
  }
}

/// A warp's running softmax over its tiles. Lane (g, t) holds columns 2t and 2t + 1 of each 8 rows.
template <class Config, class Kv>
class StreamWarp {
  using Element = typename Config::Element;
  static constexpr int kTiles16 = Config::kTiles16;
  static constexpr int kTiles8 = Config::kTiles8;
  static constexpr int kSteps = Config::kSteps;
  static constexpr int kRowBytes = Config::kRowBytes;

 public:
  __device__ StreamWarp(const StreamShared<Config>& shared, const AttentionArgs& call, const StreamSpan& span,
                        float scale, int lane)
      : shared_(shared), soft_cap_(call.soft_cap), slopes_(call.alibi_slopes != nullptr), lane_(lane) {
    const int row = lane % 16;
    keys_at_ = row * kRowBytes + 16 * swizzle<kRowBytes>(row, lane / 16);
    const int value_row = lane / 16 * 8 + lane % 8;
    values_at_ = Config::kFp8 ? keys_at_ : value_row * kRowBytes + 16 * swizzle<kRowBytes>(value_row, lane / 8 % 2);
    const std::int32_t position = span.kv_len - span.qo_len;  // of the first token
    seen_by_all_end_ = call.causal ? min(span.end, position + 1) : span.end;
    seen_by_all_begin_ = call.window_left < 0 ? 0 : max(0, span.kv_len - 1 - call.window_left);
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
      for (int c = 0; c < 2; ++c) {
        top[n][c] = -INFINITY;
        sum[n][c] = 0;
        scale_[n][c] = Config::kScaledQueries ? scale * shared.query_scale[8 * n + lane % 4 * 2 + c] : scale;
      }
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      for (int n = 0; n < kTiles8; ++n) {
        for (float& x : values[m][n]) x = 0;
      }
    }
    if constexpr (Config::kHoldQueries) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        for (int n = 0; n < kTiles8; ++n) queries_[s][n] = shared.queries[s][n][lane];
      }
    }
  }

  /// Takes in the tile at `address` in shared memory, whose first key is `first`.
  __device__ __forceinline__ void add(std::uint32_t address, std::int32_t first) {
    float scores[kTiles16][kTiles8][4] = {};
    score(scores, address + keys_at_);
#pragma unroll
    for (int k = 0; k < kTiles16; ++k) {
      for (int n = 0; n < kTiles8; ++n) {
        for (int c = 0; c < 4; ++c) scores[k][n][c] *= scale_[n][c % 2];
      }
    }
    if (first < seen_by_all_begin_ || first + Config::kKeys > seen_by_all_end_ || soft_cap_ > 0 || slopes_) {
      look_closely(scores, first);
    }
    raise_top(scores);
    std::uint32_t weights[kTiles16][kTiles8][2];
#pragma unroll
    for (int k = 0; k < kTiles16; ++k) {
      for (int n = 0; n < kTiles8; ++n) {
        const float base[2] = {top[n][0] == -INFINITY ? 0.0F : top[n][0], top[n][1] == -INFINITY ? 0.0F : top[n][1]};
        float p[4];
        for (int c = 0; c < 4; ++c) {
          p[c] = exp2_fast(scores[k][n][c] - base[c % 2]);
          sum[n][c % 2] += p[c];
        }
        weights[k][n][0] = transpose(pack(p[0], p[1], Element{}));
        weights[k][n][1] = transpose(pack(p[2], p[3], Element{}));
      }
    }
    add_values(weights, address + Config::kTileBytes + values_at_);
  }

  float top[kTiles8][2];  ///< base-2 logarithms
  float sum[kTiles8][2];  ///< of this lane's keys
  float values[kSteps][kTiles8][4];

 private:
  __device__ __forceinline__ void multiply_queries(float (&scores)[kTiles8][4], const std::uint32_t (&keys)[4], int s) {
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
      const uint2 q = Config::kHoldQueries ? queries_[s][n] : shared_.queries[s][n][lane_];
      const std::uint32_t b[2] = {q.x, q.y};
      multiply_add(scores[n], keys, b, Element{});
    }
  }

  __device__ __forceinline__ void score(float (&scores)[kTiles16][kTiles8][4], std::uint32_t keys) {
#pragma unroll
    for (int chunk = 0; chunk < kRowBytes / 32; ++chunk) {
#pragma unroll
      for (int k = 0; k < kTiles16; ++k) {
        std::uint32_t r[4];
        load_matrices(r, (keys ^ 32 * chunk) + k * 16 * kRowBytes);
        if constexpr (Config::kFp8) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const std::uint32_t a[4] = {widen(r[2 * s], Kv{}), widen(r[2 * s + 1], Kv{}), widen(r[2 * s] >> 16, Kv{}),
                                        widen(r[2 * s + 1] >> 16, Kv{})};
            multiply_queries(scores[k], a, 2 * chunk + s);
          }
        } else {
          multiply_queries(scores[k], r, chunk);
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(const std::uint32_t (&weights)[kTiles16][kTiles8][2],
                                             std::uint32_t values_address) {
#pragma unroll
    for (int chunk = 0; chunk < kRowBytes / 32; ++chunk) {
#pragma unroll
      for (int k = 0; k < kTiles16; ++k) {
        std::uint32_t r[4];
        load_transposed(r, (values_address ^ 32 * chunk) + k * 16 * kRowBytes);
        if constexpr (Config::kFp8) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            // Two keys' elements 2g and 2g + 1: those of one element side by side.
            const std::uint32_t low = __byte_perm(r[2 * s], 0, 0x3120);
            const std::uint32_t high = __byte_perm(r[2 * s + 1], 0, 0x3120);
            const std::uint32_t a[4] = {widen(low, Kv{}), widen(low >> 16, Kv{}), widen(high, Kv{}),
                                        widen(high >> 16, Kv{})};
#pragma unroll
            for (int n = 0; n < kTiles8; ++n) multiply_add(values[2 * chunk + s][n], a, weights[k][n], Element{});
          }
        } else {
#pragma unroll
          for (int n = 0; n < kTiles8; ++n) multiply_add(values[chunk][n], r, weights[k][n], Element{});
        }
      }
    }
  }

  /// Limits, slopes and soft cap, key by key.
  __device__ __forceinline__ void look_closely(float (&scores)[kTiles16][kTiles8][4], std::int32_t first) const {
    constexpr float kLog2E = 1.44269504088896340736F;
    constexpr float kLn2 = 0.693147180559945309417F;
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const StreamRow row = shared_.rows[8 * n + lane_ % 4 * 2 + c % 2];
#pragma unroll
        for (int k = 0; k < kTiles16; ++k) {
          const std::int32_t key = first + 16 * k + lane_ / 4 + c / 2 * 8;
          float x = scores[k][n][c];
          if (slopes_) x += kLog2E * row.slope * static_cast<float>(key - row.position);
          if (soft_cap_ > 0) x = soft_cap_ * kLog2E * soft_tanh(x * kLn2 / soft_cap_);
          scores[k][n][c] = key >= row.first && key < row.end ? x : -INFINITY;
        }
      }
    }
  }

  /// The maximum with this tile, and what was summed up by the one before it brought in line.
  __device__ __forceinline__ void raise_top(const float (&scores)[kTiles16][kTiles8][4]) {
    float next[kTiles8][2];
    bool rises = false;
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = top[n][c];
#pragma unroll
        for (int k = 0; k < kTiles16; ++k) most = fmaxf(most, fmaxf(scores[k][n][c], scores[k][n][c + 2]));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFU, most, offset));
        }
        rises |= most > top[n][c];
        next[n][c] = most;
      }
    }
    if (!__any_sync(0xFFFFFFFFU, rises)) return;
#pragma unroll
    for (int n = 0; n < kTiles8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shrink = top[n][c] == next[n][c] ? 1.0F : exp2_fast(top[n][c] - next[n][c]);
        top[n][c] = next[n][c];
        sum[n][c] *= shrink;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          values[m][n][c] *= shrink;
          values[m][n][c + 2] *= shrink;
        }
      }
    }
  }

  const StreamShared<Config>& shared_;
  float soft_cap_;
  bool slopes_;
  int lane_;
  std::uint32_t keys_at_, values_at_;
  std::int32_t seen_by_all_begin_, seen_by_all_end_;
  float scale_[kTiles8][2];
  uint2 queries_[kSteps][kTiles8];
};

/// Brings the warps' states together and writes the rows' results. All threads of the block take part.
template <class Config, class Q, class Kv>
__device__ __forceinline__ void finish(StreamShared<Config>& shared, const AttentionArgs& call,
                                       const StreamMerge& merge, const StreamSpan& span, std::int32_t kv_head,
                                       const HeadGroup& group, const StreamWarp<Config, Kv>& mine, int warp, int lane) {
  constexpr float kLog2E = 1.44269504088896340736F;
  constexpr float kLn2 = 0.693147180559945309417F;
  constexpr int kRows = 8 * Config::kTiles8;
  constexpr int kDim = 16 * Config::kSteps;
#pragma unroll
  for (int n = 0; n < Config::kTiles8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = mine.sum[n][c];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, offset);
      if (lane < 4) shared.states[warp][8 * n + lane * 2 + c] = {mine.top[n][c], sum};
    }
  }
  await_copies<0>();
  __syncthreads();  // the states are there, and no warp reads keys any more: the ring is free

  auto* const values = reinterpret_cast<float(*)[kRows][Config::kPaddedDim]>(shared.ring);
#pragma unroll
  for (int n = 0; n < Config::kTiles8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * n + lane % 4 * 2 + c;
      float top = -INFINITY;
      for (int w = 0; w < Config::kWarps; ++w) top = fmaxf(top, shared.states[w][row].x);
      const float share = mine.top[n][c] == top ? 1.0F : exp2_fast(mine.top[n][c] - top);
#pragma unroll
      for (int m = 0; m < Config::kSteps; ++m) {
        // Where the products' rows g and g + 8 come from: see add_values().
        const int d = 16 * m + (Config::kFp8 ? lane / 4 * 2 : lane / 4);
        values[warp][row][d] = mine.values[m][n][c] * share;
        values[warp][row][d + (Config::kFp8 ? 1 : 8)] = mine.values[m][n][c + 2] * share;
      }
    }
  }

  // A request of one chunk: what merging would make of its partial result goes straight to the output.
  const bool alone = merge.arrivals != nullptr && span.chunks == 1;
  const std::int32_t rows = span.qo_len * group.size();
  const int thread = warp * 32 + lane;
  if (thread < rows) {
    const int row = thread;
    float top = -INFINITY;
    for (int w = 0; w < Config::kWarps; ++w) top = fmaxf(top, shared.states[w][row].x);
    float sum = 0;
    for (int w = 0; w < Config::kWarps; ++w) {
      const float2 state = shared.states[w][row];
      sum += state.x == top ? state.y : state.y * exp2_fast(state.x - top);
    }
    const std::int32_t head = group.head(kv_head, row);
    float norm = 0;
    float log_sum = -INFINITY;
    if (top != -INFINITY || isnan(sum)) {  // fmaxf passes over NaN, the sum does not
      float shrink = 1.0F;
      if (!call.split_kv && call.sinks != nullptr) {
        const float sink = call.sinks[head] * kLog2E;
        const float with_sink = fmaxf(top, sink);
        shrink = exp2f(top - with_sink);
        sum = sum * shrink + exp2f(sink - with_sink);
        top = with_sink;
      }
      norm = shrink / sum * call.v_scale * (call.v_head_scale == nullptr ? 1.0F : call.v_head_scale[kv_head]);
      log_sum = top + log2f(sum);
    }
    shared.norms[row] = norm;
    if (alone) {
      const LoneState state(log_sum, call.sinks == nullptr ? nullptr : call.sinks + head);
      const std::int64_t out_row = span.first_row + group.token(row);
      shared.weights[row] = state.weight;
      shared.out_at[row] = out_row * merge.out_row + std::int64_t{head} * merge.out_head;
      if (merge.lse != nullptr) merge.lse[out_row * call.num_qo_heads + head] = state.lse;
    } else {
      const std::int64_t out_row = span.out_row + std::int64_t{group.token(row)} * span.chunks;
      const std::int64_t at = out_row * call.num_qo_heads + head;
      shared.out_at[row] = at * kDim;
      if (call.lse != nullptr) call.lse[at] = call.split_kv ? log_sum : log_sum * kLn2;
    }
  }
  __syncthreads();

  constexpr int kVector = 4;  // elements that a thread writes at once
  for (int i = thread; i < rows * (kDim / kVector); i += Config::kThreads) {
    const int row = i / (kDim / kVector);
    const int d = i % (kDim / kVector) * kVector;
    float4 total{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(&values[w][row][d]);
      total.x += x.x;
      total.y += x.y;
      total.z += x.z;
      total.w += x.w;
    }
    const float norm = shared.norms[row];
    uint2 result = {pack(total.x * norm, total.y * norm, Q{}), pack(total.z * norm, total.w * norm, Q{})};
    if (alone) result = merge_lone(result, shared.weights[row], Q{});
    *reinterpret_cast<uint2*>(static_cast<Q*>(alone ? merge.out : call.out) + shared.out_at[row] + d) = result;
  }
}

template <class Config, class Q, class Kv>
__global__ void __launch_bounds__(Config::kThreads, 2)
    stream_kernel(const __grid_constant__ AttentionArgs call, const __grid_constant__ StreamMerge merge) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<StreamShared<Config>*>(memory);
  await_previous_kernel();

  // The heads of one item run side by side: their keys are neighbours in memory.
  const auto item = static_cast<std::int32_t>(blockIdx.x) / call.kv.num_kv_heads;
  const auto kv_head = static_cast<std::int32_t>(blockIdx.x) - item * call.kv.num_kv_heads;
  const bool valid = call.block_valid == nullptr || call.block_valid[item] != 0;
  const std::int32_t request = call.request_indices[item];  // of padding: 0
  const std::int32_t chunk = call.kv_tile_indices[item];
  const std::int32_t chunk_size = *call.kv_chunk_size;
  if (!valid) return;
  const StreamSpan span(call, request, chunk, chunk_size);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const HeadGroup group(call);
  constexpr int kStages = Config::kStages;
  const std::uint32_t ring =
      static_cast<std::uint32_t>(__cvta_generic_to_shared(shared.ring)) + warp * kStages * 2 * Config::kTileBytes;
  StreamReader<Config, Kv> reader(call.kv, span, kv_head, ring, warp, lane);
  using Place = typename StreamReader<Config, Kv>::Place;
  Place next[kStages];
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) next[stage] = reader.find();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) reader.copy(stage, next[stage]);
  Place place = next[kStages - 1];

  constexpr float kLog2E = 1.44269504088896340736F;
  arrange_queries<Config, Q>(shared, call, span, kv_head, group, warp, lane);
  if (const int row = static_cast<int>(threadIdx.x); row < 8 * Config::kTiles8) {
    const std::int32_t token = group.token(row);
    const std::int32_t position = span.kv_len - span.qo_len + token;
    const bool used = token < span.qo_len;
    shared.rows[row] = {
        .first = call.window_left < 0 ? 0 : max(0, position - min(call.window_left, span.kv_len)),
        .end = !used         ? 0
               : call.causal ? min(span.end, position + 1)
                             : span.end,
        .position = position,
        .slope = call.alibi_slopes != nullptr && used ? call.alibi_slopes[group.head(kv_head, row)] : 0.0F};
  }
  if (threadIdx.x == 0) {  // for the end: registers are short
    shared.request = request;
    shared.chunk = chunk;
  }
  __syncthreads();

  const float k_head_scale = call.k_head_scale == nullptr ? 1.0F : call.k_head_scale[kv_head];
  StreamWarp<Config, Kv> mine(shared, call, span, call.sm_scale * k_head_scale * kLog2E, lane);
  int stage = 0;
  int free_stage = kStages - 1;
  for (std::int32_t first = span.begin + warp * Config::kKeys; first < span.end;
       first += Config::kWarps * Config::kKeys) {
    await_copies<kStages - 2>();
    __syncwarp();  // all lanes' copies of this tile are there, and all lanes are done with the tile before
    reader.copy(free_stage, place);
    place = reader.find();
    mine.add(ring + stage * (2 * Config::kTileBytes), first);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
  }
  finish<Config, Q>(shared, call, merge, span, kv_head, group, mine, warp, lane);

  if (merge.arrivals == nullptr || span.chunks == 1) return;
  __syncthreads();
  std::uint32_t arrived = 0;
  if (threadIdx.x == 0) {
    arrived = arrive(merge.arrivals + std::int64_t{shared.request} * call.kv.num_kv_heads + kv_head, span.chunks);
  }
  // What can be reckoned while that is under way.
  constexpr int kRoomBytes = Config::kRingBytes / Config::kWarps;
  RowMerge<Q, 16 * Config::kSteps, 8 * Config::kTiles8, Config::kWarps, kRoomBytes> rows(
      shared.ring + warp * kRoomBytes, call, merge,
      {.kv_head = kv_head,
       .rows = span.qo_len * group.size(),
       .first_row = span.first_row,
       .chunk = shared.chunk,
       .chunks = span.chunks,
       .partial_at = shared.out_at},
      group, warp, lane);
  if (threadIdx.x == 0) shared.last = arrived + 1 == static_cast<std::uint32_t>(span.chunks);
  __syncthreads();
  if (shared.last) rows.run();
}

template <class Q, class Kv, int kDim, int kRows>
struct StreamInstance {
  using Config = StreamConfig<Q, Kv, kDim, kRows>;
  static constexpr std::size_t kSharedBytes = sizeof(StreamShared<Config>);

  static cudaError_t launch(const AttentionArgs& args, const StreamMerge& merge, bool ahead, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(args.items) * static_cast<unsigned>(args.kv.num_kv_heads);
    return launch_ahead(&stream_kernel<Config, Q, Kv>, blocks, Config::kThreads, kSharedBytes, stream, ahead, args,
                        merge);
  }

  static StreamKernel describe() {
    return {.rows = kRows,
            .function = reinterpret_cast<const void*>(&stream_kernel<Config, Q, Kv>),
            .shared_bytes = kSharedBytes,
            .threads = Config::kThreads,
            .launch = &launch};
  }
};

/// All row counts that registers hold: a row's values are kDim / 32 of a thread's.
template <class Q, class Kv, int kDim>
std::span<const StreamKernel> stream_kernels() {
  if constexpr (kDim <= 128) {
    static const std::array kernels = {StreamInstance<Q, Kv, kDim, 8>::describe(),
                                       StreamInstance<Q, Kv, kDim, 16>::describe(),
                                       StreamInstance<Q, Kv, kDim, 32>::describe()};
    return kernels;
  } else {
    static const std::array kernels = {StreamInstance<Q, Kv, kDim, 8>::describe(),
                                       StreamInstance<Q, Kv, kDim, 16>::describe()};
    return kernels;
  }
}

}  // namespace fiw::cuda
