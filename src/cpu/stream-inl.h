// The few-row kernel: streams one chunk of one request's keys and values once, for all heads, in the order in which
// they lie in memory, block by block.
#if defined(FIW_CPU_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FIW_CPU_STREAM_INL_H_
#undef FIW_CPU_STREAM_INL_H_
#else
#define FIW_CPU_STREAM_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/fetch.h"
#include "cpu/finish-inl.h"
#include "cpu/job.h"
#include "cpu/kernels.h"
#include "cpu/simd-inl.h"
#include "cpu/translate-inl.h"

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

/// Calls f(std::integral_constant<int, i>) for i in 0 .. kCount - 1. An array indexed so from the start is kept in
/// registers; of one that a loop indexes, unrolled later, g++ keeps a copy in memory up to date.
template <int kCount, class F>
HWY_INLINE void for_constants(const F& f) {
  [&]<int... kI>(std::integer_sequence<int, kI...>) FIW_INLINE_LAMBDA { (f(std::integral_constant<int, kI>()), ...); }
  (std::make_integer_sequence<int, kCount>());
}

/// Keys in flight at once: as many sums as 16 registers allow.
template <int kRows>
inline constexpr int kKeysAtOnce = kRows == 4   ? 3
                                   : kRows == 2 ? 4
                                                : 8;

/// How far ahead of its use memory is requested.
inline constexpr std::int32_t kFetchBytes = 32 << 10;

/// Elements of a line.
template <class Element>
inline constexpr std::int32_t kLine = kLineBytes / static_cast<std::int32_t>(sizeof(typename Element::Raw));

/// Logits of kRows rows, in pair order (see load_half), with the keys that `k` points at, key by key. Meanwhile as many
/// lines are fetched as these keys have.
template <class Element, int kRows, class D>
HWY_INLINE void dot_keys(D d, const float* HWY_RESTRICT q, std::int32_t dim,
                         const typename Element::Raw* const (&k)[kKeysAtOnce<kRows>], Fetch& fetch,
                         float* HWY_RESTRICT logits) {
  constexpr int kKeys = kKeysAtOnce<kRows>;
  constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
  constexpr std::int32_t kStep = std::max(kLine<Element>, 2 * kLanes);
  hn::Vec<D> sums[kKeys * kRows];
  for_constants<kKeys * kRows>([&](auto i) FIW_INLINE_LAMBDA { sums[i()] = hn::Zero(d); });
  const auto add = [&](const hn::Vec<D>(&keys)[kKeys], std::int32_t c) FIW_INLINE_LAMBDA {
    for_constants<kRows>([&](auto r) FIW_INLINE_LAMBDA {
      const auto row = hn::LoadU(d, q + r() * dim + c);
      for_constants<kKeys>([&](auto t) FIW_INLINE_LAMBDA {
        constexpr int kSum = t() * kRows + r();
        sums[kSum] = hn::MulAdd(keys[t()], row, sums[kSum]);
      });
    });
  };
  const auto add_pair = [&](std::int32_t c) FIW_INLINE_LAMBDA {
    hn::Vec<D> keys[kKeys];
    for_constants<kKeys>([&](auto t) FIW_INLINE_LAMBDA { keys[t()] = load_half<Element, 0>(d, k[t()] + c); });
    add(keys, c);
    for_constants<kKeys>([&](auto t) FIW_INLINE_LAMBDA { keys[t()] = load_half<Element, 1>(d, k[t()] + c); });
    add(keys, c + kLanes);
  };
  Lines ahead = fetch.take((dim + kLine<Element> - 1) / kLine<Element> * kKeys);
  std::int32_t c = 0;
  for (; c + kStep <= dim; c += kStep) {
    for_constants<kStep / (2 * kLanes)>([&](auto i) FIW_INLINE_LAMBDA { add_pair(c + i() * 2 * kLanes); });
    for_constants<kStep / kLine<Element> * kKeys>([&](auto) FIW_INLINE_LAMBDA { ahead(); });
  }
  if (c < dim) {
    for_constants<kKeys>([&](auto) FIW_INLINE_LAMBDA { ahead(); });
    for (; c + 2 * kLanes <= dim; c += 2 * kLanes) add_pair(c);
    if (c < dim) {
      hn::Vec<D> keys[kKeys];
      for_constants<kKeys>([&](auto t) FIW_INLINE_LAMBDA { keys[t()] = load<Element>(d, k[t()] + c); });
      add(keys, c);
    }
  }
  for_constants<kKeys * kRows / 4>([&](auto i) FIW_INLINE_LAMBDA {
    constexpr int kAt = 4 * i();
    sum_lanes(d, sums[kAt], sums[kAt + 1], sums[kAt + 2], sums[kAt + 3], logits + kAt);
  });
}

/// acc += sum over keys of weight * value, for kVectors vectors in pair order that start at element `first`. Meanwhile
/// as many lines are fetched as these values fill.
template <class Element, int kRows, int kStride, int kVectors, class D>
HWY_INLINE void add_values(D d, const float* HWY_RESTRICT weights, std::int32_t count, const typename Element::Raw* v,
                           const std::int64_t* HWY_RESTRICT offsets, float* HWY_RESTRICT acc, std::int32_t dim,
                           std::int32_t first, Fetch& fetch) {
  constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
  constexpr std::int32_t kWidth = kVectors * kLanes;
  constexpr std::int32_t kTurn = std::max(kLine<Element> / kWidth, 4);  // keys that fill whole lines
  v += first;
  acc += first;
  hn::Vec<D> sums[kRows * kVectors];
  const auto for_sums = [&](const auto& f) FIW_INLINE_LAMBDA {
    for_constants<kRows * kVectors>(
        [&](auto i) FIW_INLINE_LAMBDA { f(sums[i()], acc + i() / kVectors * dim + i() % kVectors * kLanes); });
  };
  for_sums([&](auto& sum, const float* from) FIW_INLINE_LAMBDA { sum = hn::LoadU(d, from); });
  const auto add = [&](std::int32_t t) FIW_INLINE_LAMBDA {
    const auto* from = v + offsets[t];
    hn::Vec<D> values[kVectors];
    if constexpr (kVectors == 1) {
      values[0] = load<Element>(d, from);
    } else {
      for_constants<kVectors>(
          [&](auto c) FIW_INLINE_LAMBDA { values[c()] = load_half<Element, c() % 2>(d, from + c() / 2 * 2 * kLanes); });
    }
    for_constants<kRows>([&](auto r) FIW_INLINE_LAMBDA {
      const auto weight = hn::Set(d, weights[t * kStride + r()]);
      for_constants<kVectors>([&](auto c) FIW_INLINE_LAMBDA {
        constexpr int kSum = r() * kVectors + c();
        sums[kSum] = hn::MulAdd(values[c()], weight, sums[kSum]);
      });
    });
  };
  Lines ahead = fetch.take(count / kTurn * (kTurn * kWidth / kLine<Element>));
  std::int32_t t = 0;
  for (; t + kTurn <= count; t += kTurn) {
    for_constants<kTurn>([&](auto i) FIW_INLINE_LAMBDA { add(t + i()); });
    for_constants<kTurn * kWidth / kLine<Element>>([&](auto) FIW_INLINE_LAMBDA { ahead(); });
  }
  for (; t < count; ++t) add(t);
  for_sums([&](auto sum, float* to) FIW_INLINE_LAMBDA { hn::StoreU(sum, d, to); });
}

/// As add_values for whole rows of `dim` elements.
template <class Element, int kRows, int kStride, class D>
HWY_NOINLINE void add_value_rows(D d, const float* weights, std::int32_t count, const typename Element::Raw* v,
                                 const std::int64_t* offsets, float* acc, std::int32_t dim, Fetch& fetch) {
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
  const auto add = [&](auto vectors, std::int32_t c) {
    add_values<Element, kRows, kStride, vectors()>(d, weights, count, v, offsets, acc, dim, c, fetch);
  };
  std::int32_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) add(std::integral_constant<int, kVectors>(), c);
  if constexpr (kVectors > 2) {
    for (; c + 2 * kLanes <= dim; c += 2 * kLanes) add(std::integral_constant<int, 2>(), c);
  }
  if (c < dim) add(std::integral_constant<int, 1>(), c);
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

/// What rows of a type are multiplied as.
template <class Element>
inline constexpr bool kTranslated = sizeof(typename Element::Raw) == 1;
template <class Element>
using Multiplied = std::conditional_t<kTranslated<Element>, BFloat16, Element>;

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
  using Factor = Multiplied<Element>;
  /// Rows of K or V of one head.
  struct Rows {
    const typename Factor::Raw* data;
    const std::int64_t* offsets;
  };

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
  /// Whether the heads of a token lie together, not the tokens of a head.
  static bool by_token(const TokenArray& array) { return array.stride.token >= array.stride.head; }
  std::int32_t tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  std::int64_t row_slot(std::int32_t kv_head, std::int32_t row) const {
    return std::int64_t{kv_head} * StreamScratch::padded(rows) + row;
  }
  /// Of a row's tile, among the four-lane arrays.
  std::int64_t tile_slot(std::int32_t kv_head, std::int32_t row) const {
    return (std::int64_t{kv_head} * tiles() + row / kTileRows) * 4;
  }

  /// Of a tile's logits, which later are its weights: kRows of them a key.
  float* logits(std::int32_t kv_head, std::int32_t row) const {
    return at<float>(layout.logits) + row_slot(kv_head, row) * StreamScratch::kLogits;
  }
  /// Whether a tile's values have been added apart from the others'.
  bool& added(std::int32_t kv_head, std::int32_t row) const {
    return at<bool>(layout.added)[tile_slot(kv_head, row) / 4];
  }

  /// At most kStep rows, ready to be multiplied until the next call. Meanwhile as many lines are fetched as are read.
  HWY_INLINE Rows rows_of(const TokenArray& array, std::int32_t kv_head, const std::int64_t* offsets,
                          std::int32_t count, std::int32_t dim, Fetch& fetch) const {
    const Raw* from = head(array, kv_head);
    if constexpr (kTranslated<Element>) {
      auto* to = at<typename Factor::Raw>(layout.rows);
      auto* to_offsets = at<std::int64_t>(layout.row_offsets);
      for (std::int32_t i = 0; i < count; ++i) {
        to_offsets[i] = std::int64_t{i} * dim;
        translate_row<Element>(from + offsets[i], dim, to + to_offsets[i]);
        for (std::int32_t c = 0; c < dim; c += kLine<Element>) fetch();
      }
      return {to, to_offsets};
    } else {
      return {from, offsets};
    }
  }
  /// Of a tile whose rows come from rows_of: one tile of each head does the fetching, unless rows_of has done it.
  static bool fetches(std::int32_t row) { return row == 0 && !kTranslated<Element>; }

  /// Calls f(std::integral_constant<int, rows>, first row) for each tile of a KV head.
  template <class F>
  HWY_INLINE void for_each_tile(const F& f) const {
    for (std::int32_t row = 0; row < rows; row += kTileRows) {
      const std::int32_t left = rows - row;
      if (kTileRows == 1 || left == 1) {
        f(std::integral_constant<int, 1>(), row);
      } else if (left == 2) {
        f(std::integral_constant<int, 2>(), row);
      } else {
        f(std::integral_constant<int, 4>(), row);
      }
    }
  }

  /// Calls f(KV head, first key) for `step` keys at a time, in the order in which `array` lies in memory.
  template <class F>
  HWY_INLINE void walk(const TokenArray& array, std::int32_t count, std::int32_t step, const F& f) const {
    const std::int32_t heads = job.params.num_kv_heads;
    if (by_token(array)) {
      for (std::int32_t t = 0; t < count; t += step) {
        for (std::int32_t h = 0; h < heads; ++h) f(h, t);
      }
    } else {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t t = 0; t < count; t += step) f(h, t);
      }
    }
  }

  /// The logits of all tiles.
  template <class D>
  HWY_NOINLINE void dot_block(D d, const Block& block, Fetch& fetch) const {
    const std::int32_t dim = job.params.head_dim_qk;
    // A multiple of what every tile takes at once.
    const std::int32_t step = rows == 1                              ? kKeysAtOnce<1>
                              : rows == 2                            ? kKeysAtOnce<2>
                              : StreamScratch::padded(rows) % 4 == 0 ? 12
                                                                     : StreamScratch::kStep;
    Fetch idle(cached());
    walk(job.k, block.count, step, [&](std::int32_t h, std::int32_t first) {
      const std::int32_t count = std::min(step, block.count - first);
      const Rows k = rows_of(job.k, h, block.k_offsets + first, count, dim, fetch);
      for_each_tile([&](auto tile_rows, std::int32_t row) {
        constexpr int kRows = tile_rows();
        constexpr int kKeys = kKeysAtOnce<kRows>;
        const float* q = at<float>(layout.q) + row_slot(h, row) * dim;
        for (std::int32_t t = 0; t < count; t += kKeys) {
          const typename Factor::Raw* keys[kKeys];
          HWY_UNROLL(8)
          for (int i = 0; i < kKeys; ++i) keys[i] = k.data + k.offsets[std::min(t + i, count - 1)];
          dot_keys<Factor, kRows>(d, q, dim, keys, fetches(row) ? fetch : idle, logits(h, row) + (first + t) * kRows);
        }
      });
    });
  }

  /// Turns logits into weights, and adds the values of the tiles whose rows see different keys.
  template <class D>
  HWY_NOINLINE void weigh_block(D d, const Block& block, Fetch& fetch) const {
    const std::int32_t dim = job.params.head_dim_vo;
    for (std::int32_t h = 0; h < job.params.num_kv_heads; ++h) {
      for_each_tile([&](auto tile_rows, std::int32_t row) {
        constexpr int kRows = tile_rows();
        const std::int32_t live = std::min(kRows, rows - row);
        float* weights = logits(h, row);
        float* acc = at<float>(layout.acc) + row_slot(h, row) * dim;
        const std::int64_t lanes = tile_slot(h, row);
        alignas(64) float decay[4];
        added(h, row) = !shape_logits<kRows>(d, block, h, row, live, weights);
        weigh_rows<kRows>(d, weights, block.count, at<float>(layout.top) + lanes, at<float>(layout.sum) + lanes, decay);
        for (int r = 0; r < live; ++r) {
          if (decay[r] != 1.0F) widen_row<Float32>(d, acc + r * dim, dim, decay[r], acc + r * dim);
        }
        if (added(h, row)) {
          add_seen_values<kRows>(d, block, h, row, live, weights, acc);
          // The fetching that goes with a head's values.
          const std::int64_t lines = std::int64_t{block.count} * dim / kLine<Element>;
          for (std::int64_t i = 0; fetches(row) && i < lines; ++i) fetch();
        }
      });
    }
  }

  /// A hidden value may be NaN or infinite, so it must not even be multiplied by 0: row by row, run by run.
  template <int kStride, class D>
  void add_seen_values(D d, const Block& block, std::int32_t kv_head, std::int32_t first_row, std::int32_t live,
                       const float* weights, float* acc) const {
    const std::int32_t dim = job.params.head_dim_vo;
    Fetch idle(cached());
    for (int r = 0; r < live; ++r) {
      std::uint64_t bits = block.all() & at<std::uint64_t>(layout.visible)[(first_row + r) / job.group];
      while (bits != 0) {
        const int begin = std::countr_zero(bits);
        const int count = std::min<int>(std::countr_one(bits >> begin), StreamScratch::kStep);
        const Rows v = rows_of(job.v, kv_head, block.v_offsets + begin, count, dim, idle);
        add_value_rows<Factor, 1, kStride>(d, weights + begin * kStride + r, count, v.data, v.offsets,
                                           acc + std::int64_t{r} * dim, dim, idle);
        bits = begin + count == 64 ? 0 : bits & ~std::uint64_t{0} << (begin + count);
      }
    }
  }

  /// The weighted values of the other tiles.
  template <class D>
  HWY_NOINLINE void add_block_values(D d, const Block& block, Fetch& fetch) const {
    // The first-level cache is to keep these rows of V for all strips, though they be a power of two apart.
    const std::int32_t step = by_token(job.v) ? 12 : StreamScratch::kStep;
    const std::int32_t dim = job.params.head_dim_vo;
    Fetch idle(cached());
    walk(job.v, block.count, step, [&](std::int32_t h, std::int32_t t) {
      const std::int32_t count = std::min(step, block.count - t);
      const Rows v = rows_of(job.v, h, block.v_offsets + t, count, dim, fetch);
      for_each_tile([&](auto tile_rows, std::int32_t row) {
        constexpr int kRows = tile_rows();
        if (added(h, row)) return;
        add_value_rows<Factor, kRows, kRows>(d, logits(h, row) + t * kRows, count, v.data, v.offsets,
                                             at<float>(layout.acc) + row_slot(h, row) * dim, dim,
                                             fetches(row) ? fetch : idle);
      });
    });
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

  const std::byte* cached() const { return at<const std::byte>(layout.logits); }

  /// Appends to `runs` where rows of `dim` elements of a block lie, in the order of addresses; returns their end.
  MemoryRun* list_runs(const TokenArray& array, std::int32_t dim, std::int32_t count, const std::int64_t* offsets,
                       MemoryRun* runs) const {
    const std::int32_t heads = job.params.num_kv_heads;
    MemoryRun* const begin = runs;
    const auto append = [&](const Raw* from, std::int64_t elements) {
      const auto* bytes = reinterpret_cast<const std::byte*>(from);
      const auto* end = reinterpret_cast<const std::byte*>(from + elements);
      if (runs != begin && runs[-1].end == bytes) {
        runs[-1].end = end;
      } else {
        *runs++ = {bytes, end};
      }
    };
    if (array.stride.head == dim) {
      for (std::int32_t t = 0; t < count; ++t) append(head(array, 0) + offsets[t], std::int64_t{heads} * dim);
    } else if (by_token(array)) {
      for (std::int32_t t = 0; t < count; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) append(head(array, h) + offsets[t], dim);
      }
    } else {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t t = 0; t < count; ++t) append(head(array, h) + offsets[t], dim);
      }
    }
    return runs;
  }

  /// Appends what a block reads, K then V, to what is left to fetch of the `most` runs before it. Returns how many runs
  /// the block has.
  std::ptrdiff_t extend(FetchList& list, const Block& block, std::ptrdiff_t most, std::size_t place) const {
    auto* const runs = at<MemoryRun>(place);
    MemoryRun* const first = list.move_rest(most, runs);
    MemoryRun* end = list_runs(job.k, job.params.head_dim_qk, block.count, block.k_offsets, first);
    end = list_runs(job.v, job.params.head_dim_vo, block.count, block.v_offsets, end);
    list.assign(runs, end);
    return end - first;
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
          float* to = at<float>(layout.q) + slot * dim;
          widen_row<Query>(d, from, dim, job.q_scale(kv_head), to);
          reorder_pairs<Factor, false>(d, dim, to);
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
    std::int64_t* spare = offsets + 2 * StreamScratch::kBlock;
    const auto enter = [&](std::int32_t first) {
      std::swap(offsets, spare);
      const std::int32_t count = std::min(keys.end - first, StreamScratch::kBlock);
      if (count > 0) job.token_offsets(request, first, count, offsets, offsets + StreamScratch::kBlock);
      return Block{first, count, offsets, offsets + StreamScratch::kBlock};
    };
    FetchList list(cached());
    std::size_t ahead = layout.ahead;
    std::size_t spare_ahead = layout.spare_ahead;
    Block block = enter(keys.begin);
    std::ptrdiff_t runs = extend(list, block, 0, ahead);
    Fetch fetch(list);
    for (std::int32_t i = 0; i < kFetchBytes / kLineBytes; ++i) fetch();
    while (block.count > 0) {
      const Block next = enter(block.first + block.count);
      std::swap(ahead, spare_ahead);
      runs = extend(list, next, runs, ahead);
      fetch.resume();
      for (std::int32_t p = 0; p < request.qo_len; ++p) {
        at<std::uint64_t>(layout.visible)[p] = visible_bits(job, request, p, block.first, block.count);
      }
      dot_block(d, block, fetch);
      weigh_block(d, block, fetch);
      add_block_values(d, block, fetch);
      block = next;
    }

    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t row = 0; row < rows; ++row) {
        const std::int64_t lane = tile_slot(h, row) + row % kTileRows;
        float* acc = at<float>(layout.acc) + row_slot(h, row) * job.params.head_dim_vo;
        reorder_pairs<Factor, true>(d, job.params.head_dim_vo, acc);
        finish_row(d, job, request, row / job.group, h * job.group + row % job.group, chunk, keys, acc,
                   at<float>(layout.top)[lane], at<float>(layout.sum)[lane]);
      }
    }
  }
};

template <class Element>
void stream_item(const Job& job, std::int64_t item, std::byte* scratch) {
  const Request request = job.request(job.schedule.request_indices[item]);
  if (request.qo_len == 0) return;
  const Stream<Element> stream{job, request, StreamScratch(job.params, request.qo_len), scratch,
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
