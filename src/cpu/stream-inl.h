// The few-row kernel: streams one chunk of one request's keys once, for all heads, block by block.
#if defined(FIW_CPU_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FIW_CPU_STREAM_INL_H_
#undef FIW_CPU_STREAM_INL_H_
#else
#define FIW_CPU_STREAM_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/finish-inl.h"
#include "cpu/job.h"
#include "cpu/kernels.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

// A tile is 1, 2 or 4 rows of one KV head, which share each load of K and V. Its logits lie key by key, so lane i of a
// vector of them belongs to row i % rows; what is kept for each row is kept four lanes wide in that pattern.

#if HWY_TARGET == HWY_SCALAR
inline constexpr std::int32_t kTileRows = 1;
#else
inline constexpr std::int32_t kTileRows = 4;
#endif

using Four = hn::CappedTag<float, 4>;

/// Combines the lanes of each row; all lanes of a row then hold the result.
template <int kRows, class D, class Combine>
HWY_INLINE hn::Vec<Four> fold_rows(D d, hn::Vec<D> v, const Combine& combine) {
#if HWY_TARGET == HWY_SCALAR
  (void)d;
  (void)combine;
  return v;
#else
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return fold_rows<kRows>(half, combine(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), combine);
  } else {
    (void)d;
    if constexpr (kRows <= 2) v = combine(v, hn::Shuffle1032(v));
    if constexpr (kRows == 1) v = combine(v, hn::Shuffle2301(v));
    return v;
  }
#endif
}

/// The pattern of four lanes in all blocks of a vector.
template <class D>
HWY_INLINE hn::Vec<D> spread_rows(D d, const float* HWY_RESTRICT rows) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Load(d, rows);
#else
  return hn::LoadDup128(d, rows);
#endif
}

/// The sums of the lanes of four vectors, always in the same order of additions.
template <class D>
HWY_INLINE void sum_lanes(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c, hn::Vec<D> e, float* HWY_RESTRICT sums) {
#if HWY_TARGET == HWY_SCALAR
  hn::Store(a, d, sums);
  hn::Store(b, d, sums + 1);
  hn::Store(c, d, sums + 2);
  hn::Store(e, d, sums + 3);
#else
  const hn::Repartition<double, D> dd;
  const auto ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const auto ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto low = hn::InterleaveLower(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const auto high = hn::InterleaveUpper(dd, hn::BitCast(dd, ab), hn::BitCast(dd, ce));
  const auto total =
      fold_rows<4>(d, hn::Add(hn::BitCast(d, low), hn::BitCast(d, high)), [](auto x, auto y) { return hn::Add(x, y); });
  hn::StoreU(total, Four(), sums);
#endif
}

/// Keys in flight at once: as many sums as 16 registers allow.
template <int kRows>
inline constexpr int kKeysAtOnce = kRows == 4   ? 3
                                   : kRows == 2 ? 4
                                                : 8;

/// Bytes that a request to memory brings.
inline constexpr std::int32_t kLineBytes = 64;

template <class Raw>
HWY_INLINE void prefetch(const Raw* from) {
  __builtin_prefetch(from, 0, 2);
}

/// Logits of kRows rows with the keys that `k` points at, key by key. Meanwhile the rows that `ahead` points at are
/// fetched.
template <class Element, int kRows, class D>
HWY_INLINE void dot_keys(D d, const float* HWY_RESTRICT q, std::int32_t dim,
                         const typename Element::Raw* const (&k)[kKeysAtOnce<kRows>],
                         const typename Element::Raw* const* HWY_RESTRICT ahead, float* HWY_RESTRICT logits) {
  constexpr int kKeys = kKeysAtOnce<kRows>;
  constexpr std::int32_t kLine = kLineBytes / static_cast<std::int32_t>(sizeof(typename Element::Raw));
  hn::Vec<D> sums[kKeys * kRows];
  HWY_UNROLL(12)
  for (int i = 0; i < kKeys * kRows; ++i) sums[i] = hn::Zero(d);
  for (std::int32_t line = 0; line < dim; line += kLine) {
    HWY_UNROLL(8)
    for (int t = 0; t < kKeys; ++t) prefetch(ahead[t] + line);
    const std::int32_t end = std::min(line + kLine, dim);
    for (std::int32_t c = line; c < end; c += static_cast<std::int32_t>(hn::Lanes(d))) {
      if constexpr (kRows == 4) {
        hn::Vec<D> keys[kKeys];
        HWY_UNROLL(8)
        for (int t = 0; t < kKeys; ++t) keys[t] = load<Element>(d, k[t] + c);
        HWY_UNROLL(4)
        for (int r = 0; r < kRows; ++r) {
          const auto row = hn::LoadU(d, q + r * dim + c);
          HWY_UNROLL(8)
          for (int t = 0; t < kKeys; ++t) sums[t * kRows + r] = hn::MulAdd(keys[t], row, sums[t * kRows + r]);
        }
      } else {
        hn::Vec<D> rows[kRows];
        HWY_UNROLL(4)
        for (int r = 0; r < kRows; ++r) rows[r] = hn::LoadU(d, q + r * dim + c);
        HWY_UNROLL(8)
        for (int t = 0; t < kKeys; ++t) {
          const auto key = load<Element>(d, k[t] + c);
          HWY_UNROLL(4)
          for (int r = 0; r < kRows; ++r) sums[t * kRows + r] = hn::MulAdd(key, rows[r], sums[t * kRows + r]);
        }
      }
    }
  }
  HWY_UNROLL(4)
  for (int i = 0; i < kKeys * kRows; i += 4) {
    sum_lanes(d, sums[i], sums[i + 1], sums[i + 2], sums[i + 3], logits + i);
  }
}

/// acc = acc * decay + sum over keys of weight * value, for kVectors vectors of elements that start at element `first`.
/// With kFetch, the lines at that element of the rows that `ahead` points at are fetched.
template <class Element, int kRows, int kVectors, bool kFetch, class D>
HWY_INLINE void add_values(D d, const float* HWY_RESTRICT weights, std::int32_t stride, std::int32_t count,
                           const typename Element::Raw* v, const std::int64_t* HWY_RESTRICT offsets,
                           const float* HWY_RESTRICT decay, float* HWY_RESTRICT acc, std::int32_t dim,
                           std::int32_t first, const typename Element::Raw* const* HWY_RESTRICT ahead) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  constexpr std::int32_t kLine = kLineBytes / static_cast<std::int32_t>(sizeof(typename Element::Raw));
  // Strips narrower than a line share it: each fetches it for some of the keys.
  constexpr std::int32_t kWidth = kVectors * kLanes;
  constexpr std::int32_t kShare = std::max(kLine / kWidth, 1);
  [[maybe_unused]] const std::int32_t share = first / kWidth % kShare;
  v += first;
  acc += first;
  hn::Vec<D> sums[kRows * kVectors];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, decay[r]);
    HWY_UNROLL(8)
    for (int c = 0; c < kVectors; ++c) {
      sums[r * kVectors + c] = hn::Mul(hn::LoadU(d, acc + r * dim + c * kLanes), factor);
    }
  }
  for (std::int32_t t = 0; t < count; ++t, weights += stride) {
    const auto* from = v + offsets[t];
    if constexpr (kFetch) {
      HWY_UNROLL(8)
      for (std::int32_t line = 0; line < kWidth; line += kLine) {
        if (t % kShare == share) prefetch(ahead[t] + first + line);
      }
    }
    hn::Vec<D> values[kVectors];
    HWY_UNROLL(8)
    for (int c = 0; c < kVectors; ++c) values[c] = load<Element>(d, from + c * kLanes);
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      const auto weight = hn::Set(d, weights[r]);
      HWY_UNROLL(8)
      for (int c = 0; c < kVectors; ++c) {
        sums[r * kVectors + c] = hn::MulAdd(values[c], weight, sums[r * kVectors + c]);
      }
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int c = 0; c < kVectors; ++c) hn::StoreU(sums[r * kVectors + c], d, acc + r * dim + c * kLanes);
  }
}

/// As add_values for whole rows of `dim` elements; `ahead` null: nothing is fetched.
template <class Element, int kRows, class D>
HWY_NOINLINE void add_value_rows(D d, const float* weights, std::int32_t stride, std::int32_t count,
                                 const typename Element::Raw* v, const std::int64_t* offsets, const float* decay,
                                 float* acc, std::int32_t dim, const typename Element::Raw* const* ahead) {
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
  const auto add = [&](auto vectors, std::int32_t c) {
    if (ahead != nullptr) {
      add_values<Element, kRows, vectors(), true>(d, weights, stride, count, v, offsets, decay, acc, dim, c, ahead);
    } else {
      add_values<Element, kRows, vectors(), false>(d, weights, stride, count, v, offsets, decay, acc, dim, c, ahead);
    }
  };
  std::int32_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) add(std::integral_constant<int, kVectors>(), c);
  for (; c < dim; c += kLanes) add(std::integral_constant<int, 1>(), c);
}

/// Turns a tile's logits into weights in place; `top`, `sum` and `decay` hold four lanes in the rows' pattern. `decay`
/// becomes the factor by which the rows' earlier sums shrink. A NaN may get lost on the way to `top`, never to `sum`.
template <int kRows, class D>
HWY_INLINE void weigh_rows(D d, float* HWY_RESTRICT logits, std::int32_t count, float* HWY_RESTRICT top,
                           float* HWY_RESTRICT sum, float* HWY_RESTRICT decay) {
  const Four four;
  const auto lanes = static_cast<std::int32_t>(hn::Lanes(d));
  const std::int32_t total = count * kRows;
  for (std::int32_t i = total; i % lanes != 0; ++i) logits[i] = kNegInf;
  auto highest = spread_rows(d, top);
  for (std::int32_t i = 0; i < total; i += lanes) highest = hn::Max(highest, hn::Load(d, logits + i));
  const auto new_top = fold_rows<kRows>(d, highest, [](auto x, auto y) { return hn::Max(x, y); });
  alignas(64) float base[4];
  const auto rows_base = hn::IfThenZeroElse(hn::Eq(new_top, hn::Set(four, kNegInf)), new_top);
  hn::Store(rows_base, four, base);
  const auto spread_base = spread_rows(d, base);
  auto sums = hn::Zero(d);
  for (std::int32_t i = 0; i < total; i += lanes) {
    const auto weights = exp2_nonpositive(d, hn::Sub(hn::Load(d, logits + i), spread_base));
    hn::Store(weights, d, logits + i);
    sums = hn::Add(sums, weights);
  }
  const auto new_sum = fold_rows<kRows>(d, sums, [](auto x, auto y) { return hn::Add(x, y); });
  const auto factor = exp2_nonpositive(four, hn::Sub(hn::Load(four, top), rows_base));
  hn::Store(factor, four, decay);
  hn::Store(hn::MulAdd(hn::Load(four, sum), factor, new_sum), four, sum);
  hn::Store(new_top, four, top);
}

/// One bit a key of `first` .. `first + count - 1` that query token p sees.
inline std::uint64_t visible_bits(const Job& job, const Request& request, std::int32_t p, std::int32_t first,
                                  std::int32_t count) {
  const KeyRange keys = job.visible(request, p);
  std::uint64_t bits = 0;
  for (std::int32_t t = std::max(keys.begin - first, 0); t < std::min(keys.end - first, count); ++t) {
    if (job.extras.mask == nullptr || !job.masked(request, p, first + t)) bits |= std::uint64_t{1} << t;
  }
  return bits;
}

/// One block of keys of one chunk.
struct Block {
  std::int32_t first = 0;
  std::int32_t count = 0;
  const std::int64_t* k_offsets = nullptr;
  const std::int64_t* v_offsets = nullptr;

  std::uint64_t all() const { return ~std::uint64_t{0} >> (64 - count); }
};

template <class Element>
struct Stream {
  using Raw = typename Element::Raw;

  const Job& job;
  Request request;
  StreamScratch layout;
  std::byte* scratch;
  std::int32_t rows;  ///< packed rows a KV head

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(scratch + offset);
  }
  const Raw* head(const TokenArray& array, std::int32_t kv_head) const {
    return static_cast<const Raw*>(array.data) + kv_head * array.stride.head;
  }
  std::int32_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  std::int64_t row_slot(std::int32_t kv_head, std::int32_t row) const {
    return std::int64_t{kv_head} * StreamScratch::padded(rows) + row;
  }
  /// Of a row's tile, among the four-lane arrays.
  std::int64_t tile_slot(std::int32_t kv_head, std::int32_t row) const {
    return (std::int64_t{kv_head} * tiles() + row / kTileRows) * 4;
  }

  /// Rows first_row .. first_row + kRows - 1 of one KV head over one block.
  template <int kRows, class D>
  HWY_NOINLINE void tile(D d, const Block& block, std::int32_t kv_head, std::int32_t first_row) const {
    constexpr int kKeys = kKeysAtOnce<kRows>;
    const std::int32_t dim_qk = job.params.head_dim_qk;
    const std::int32_t dim_vo = job.params.head_dim_vo;
    const float* q = at<float>(layout.q) + row_slot(kv_head, first_row) * dim_qk;
    float* acc = at<float>(layout.acc) + row_slot(kv_head, first_row) * dim_vo;
    float* logits = at<float>(layout.logits);
    const Raw* k = head(job.k, kv_head);
    const Raw* v = head(job.v, kv_head);

    // Each head's turn fetches its share of the next block, once.
    const bool fetch = first_row == 0;
    const Raw* const* k_ahead = at<const Raw*>(layout.k_ahead) + std::int64_t{kv_head} * block.count;
    const Raw* const* v_ahead = at<const Raw*>(layout.v_ahead) + std::int64_t{kv_head} * block.count;
    for (std::int32_t t = 0; t < block.count; t += kKeys) {
      const Raw* keys[kKeys];
      HWY_UNROLL(8)
      for (int i = 0; i < kKeys; ++i) keys[i] = k + block.k_offsets[std::min(t + i, block.count - 1)];
      dot_keys<Element, kRows>(d, q, dim_qk, keys, fetch ? k_ahead + t : keys, logits + t * kRows);
    }

    const std::uint64_t* visible = at<std::uint64_t>(layout.visible);
    const std::int32_t live = std::min(kRows, rows - first_row);
    const bool seen_by_all = shape_logits<kRows>(d, block, kv_head, first_row, live, logits);
    alignas(64) float decay[4];
    const std::int64_t lanes = tile_slot(kv_head, first_row);
    weigh_rows<kRows>(d, logits, block.count, at<float>(layout.top) + lanes, at<float>(layout.sum) + lanes, decay);
    if (seen_by_all) {
      add_value_rows<Element, kRows>(d, logits, kRows, block.count, v, block.v_offsets, decay, acc, dim_vo,
                                     fetch ? v_ahead : nullptr);
      return;
    }
    // A hidden value may be NaN or infinite, so it must not even be multiplied by 0: row by row, run by run.
    for (int r = 0; r < live; ++r) {
      for (std::uint64_t bits = block.all() & visible[(first_row + r) / job.group]; bits != 0;) {
        const int begin = std::countr_zero(bits);
        const int count = std::countr_one(bits >> begin);
        add_value_rows<Element, 1>(d, logits + begin * kRows + r, kRows, count, v, block.v_offsets + begin, &decay[r],
                                   acc + std::int64_t{r} * dim_vo, dim_vo, nullptr);
        decay[r] = 1.0F;
        bits = begin + count == 64 ? 0 : bits & ~std::uint64_t{0} << (begin + count);
      }
    }
  }

  /// ALiBi, the soft cap, and minus infinity for what a row does not see. Returns whether all rows see all keys.
  template <int kRows, class D>
  bool shape_logits(D d, const Block& block, std::int32_t kv_head, std::int32_t first_row, std::int32_t live,
                    float* HWY_RESTRICT logits) const {
    if (job.extras.alibi_slopes != nullptr) {
      for (int r = 0; r < live; ++r) {
        const float slope = job.slope(kv_head * job.group + (first_row + r) % job.group);
        const std::int32_t distance = block.first - request.q_pos((first_row + r) / job.group);
        for (std::int32_t t = 0; t < block.count; ++t) {
          logits[t * kRows + r] += slope * static_cast<float>(distance + t);
        }
      }
    }
    if (job.capped()) {
      for (std::int32_t i = 0; i < block.count * kRows; i += static_cast<std::int32_t>(hn::Lanes(d))) {
        hn::Store(soft_cap(d, hn::Load(d, logits + i), job.params.logits_soft_cap), d, logits + i);
      }
    }
    bool seen_by_all = true;
    for (int r = 0; r < live; ++r) {
      std::uint64_t hidden = block.all() & ~at<std::uint64_t>(layout.visible)[(first_row + r) / job.group];
      seen_by_all = seen_by_all && hidden == 0;
      for (; hidden != 0; hidden &= hidden - 1) logits[std::countr_zero(hidden) * kRows + r] = kNegInf;
    }
    return seen_by_all;
  }

  /// Lists the rows of the next block in the order in which they lie in memory, as many as this block has and a few
  /// more; what the next block lacks is filled up with a row that is cached.
  void plan_fetch(const TokenArray& array, const Block& block, std::int32_t next_count, const std::int64_t* offsets,
                  const Raw** ahead) const {
    const std::int32_t heads = job.params.num_kv_heads;
    const Raw** const end = ahead + std::int64_t{heads} * block.count + StreamScratch::kSpareKeys;
    if (array.stride.token >= array.stride.head) {
      for (std::int32_t t = 0; t < next_count; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) *ahead++ = head(array, h) + offsets[t];
      }
    } else {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t t = 0; t < next_count; ++t) *ahead++ = head(array, h) + offsets[t];
      }
    }
    std::fill(ahead, end, at<const Raw>(layout.logits));
  }

  template <class D>
  void add_block(D d, const Block& block, const Block& next) const {
    const std::int32_t heads = job.params.num_kv_heads;
    plan_fetch(job.k, block, next.count, next.k_offsets, at<const Raw*>(layout.k_ahead));
    plan_fetch(job.v, block, next.count, next.v_offsets, at<const Raw*>(layout.v_ahead));
    for (std::int32_t p = 0; p < request.qo_len; ++p) {
      at<std::uint64_t>(layout.visible)[p] = visible_bits(job, request, p, block.first, block.count);
    }
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t row = 0; row < rows; row += kTileRows) {
        const std::int32_t left = rows - row;
        if (kTileRows == 1 || left == 1) {
          tile<1>(d, block, h, row);
        } else if (left == 2) {
          tile<2>(d, block, h, row);
        } else {
          tile<4>(d, block, h, row);
        }
      }
    }
  }

  template <class D>
  void load_queries(D d) const {
    const std::int32_t dim = job.params.head_dim_qk;
    with_wide_element(job.q.dtype, [&](auto element) {
      using Query = decltype(element);
      for (std::int32_t h = 0; h < job.params.num_qo_heads; ++h) {
        const std::int32_t kv_head = h / job.group;
        for (std::int32_t p = 0; p < request.qo_len; ++p) {
          const auto* from = static_cast<const typename Query::Raw*>(job.q.data) +
                             (request.qo_begin + p) * job.q.row_stride + h * job.q.head_stride;
          const std::int64_t slot = row_slot(kv_head, p * job.group + h % job.group);
          widen_row<Query>(d, from, dim, job.q_scale(kv_head), at<float>(layout.q) + slot * dim);
        }
      }
    });
    // The fourth row of a tile of three is computed and dropped.
    for (std::int32_t h = 0; h < job.params.num_kv_heads; ++h) {
      for (std::int32_t row = rows; row < StreamScratch::padded(rows); ++row) {
        std::fill_n(at<float>(layout.q) + row_slot(h, row) * dim, dim, 0.0F);
      }
    }
  }

  template <class D>
  void run(D d, std::int32_t chunk) const {
    const std::int32_t heads = job.params.num_kv_heads;
    load_queries(d);
    std::fill_n(at<float>(layout.acc), row_slot(heads, 0) * job.params.head_dim_vo, 0.0F);
    std::fill_n(at<float>(layout.top), tile_slot(heads, 0), kNegInf);
    std::fill_n(at<float>(layout.sum), tile_slot(heads, 0), 0.0F);

    const KeyRange keys = job.chunk(request, 0, request.qo_len - 1, chunk);
    std::int64_t* offsets = at<std::int64_t>(layout.offsets);
    std::int64_t* spare = offsets + 2 * layout.block;
    const auto enter = [&](std::int32_t first) {
      std::swap(offsets, spare);
      const std::int32_t count = std::min(keys.end - first, layout.block);
      if (count > 0) job.token_offsets(request, first, count, offsets, offsets + layout.block);
      return Block{first, count, offsets, offsets + layout.block};
    };
    for (Block block = enter(keys.begin); block.count > 0;) {
      const Block next = enter(block.first + block.count);
      add_block(d, block, next);
      block = next;
    }

    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t row = 0; row < rows; ++row) {
        const std::int64_t lane = tile_slot(h, row) + row % kTileRows;
        finish_row(d, job, request, row / job.group, h * job.group + row % job.group, chunk, keys,
                   at<float>(layout.acc) + row_slot(h, row) * job.params.head_dim_vo, at<float>(layout.top)[lane],
                   at<float>(layout.sum)[lane]);
      }
    }
  }
};

template <class Element>
void stream_item(const Job& job, std::int64_t item, std::byte* scratch) {
  const Request request = job.request(job.schedule.request_indices[item]);
  if (request.qo_len == 0) return;
  const Stream<Element> stream{job, request, StreamScratch(job.params, job.kv_dtype, request.qo_len), scratch,
                               request.qo_len * job.group};
  const std::int32_t chunk = job.schedule.kv_tile_indices[item];
  if (job.params.head_dim_qk % hn::MaxLanes(Wide()) == 0 && job.params.head_dim_vo % hn::MaxLanes(Wide()) == 0) {
    stream.run(Wide(), chunk);
  } else {
    stream.run(Narrow(), chunk);
  }
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
