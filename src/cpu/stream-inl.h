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

/// Rows that share each load of K and V.
inline constexpr std::int32_t kTileRows = 4;

#if HWY_TARGET != HWY_SCALAR
/// Four sums from the 128-bit blocks of a vector.
template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> add_blocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    (void)d;
    return v;
  } else {
    const hn::Half<D> half;
    return add_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

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
  const hn::CappedTag<float, 4> d4;
  hn::StoreU(add_blocks(d, hn::Add(hn::BitCast(d, low), hn::BitCast(d, high))), d4, sums);
#endif
}

/// Keys in flight at once, so that enough sums are independent of each other.
template <int kRows>
inline constexpr int kKeysAtOnce = kRows == 4 ? 2 : 4;

/// Logits of kRows rows with keys first .. first + kKeysAtOnce - 1; `k` points at each of those keys.
template <class Element, int kRows, class D>
HWY_INLINE void dot_keys(D d, const float* HWY_RESTRICT q, std::int32_t dim,
                         const typename Element::Raw* const (&k)[kKeysAtOnce<kRows>], float* HWY_RESTRICT logits,
                         std::int32_t stride) {
  constexpr int kKeys = kKeysAtOnce<kRows>;
  hn::Vec<D> sums[kRows * kKeys];
  HWY_UNROLL(8)
  for (int i = 0; i < kRows * kKeys; ++i) sums[i] = hn::Zero(d);
  for (std::int32_t c = 0; c < dim; c += static_cast<std::int32_t>(hn::Lanes(d))) {
    HWY_UNROLL(4)
    for (int t = 0; t < kKeys; ++t) {
      const auto key = load<Element>(d, k[t] + c);
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) {
        sums[r * kKeys + t] = hn::MulAdd(key, hn::LoadU(d, q + r * dim + c), sums[r * kKeys + t]);
      }
    }
  }
  alignas(16) float totals[kRows * kKeys];
  HWY_UNROLL(4)
  for (int i = 0; i < kRows * kKeys; i += 4) {
    sum_lanes(d, sums[i], sums[i + 1], sums[i + 2], sums[i + 3], totals + i);
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) std::memcpy(logits + r * stride, totals + r * kKeys, kKeys * sizeof(float));
}

/// acc = acc * decay + sum over keys of weight * value, for kVectors vectors of elements.
template <class Element, int kRows, int kVectors, class D>
HWY_INLINE void add_values(D d, const float* HWY_RESTRICT weights, std::int32_t stride, std::int32_t count,
                           const typename Element::Raw* v, const std::int64_t* HWY_RESTRICT offsets,
                           const float* HWY_RESTRICT decay, float* HWY_RESTRICT acc, std::int32_t dim) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  hn::Vec<D> sums[kRows * kVectors];
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, decay[r]);
    HWY_UNROLL(8)
    for (int c = 0; c < kVectors; ++c) {
      sums[r * kVectors + c] = hn::Mul(hn::LoadU(d, acc + r * dim + c * kLanes), factor);
    }
  }
  for (std::int32_t t = 0; t < count; ++t) {
    const auto* from = v + offsets[t];
    hn::Vec<D> values[kVectors];
    HWY_UNROLL(8)
    for (int c = 0; c < kVectors; ++c) values[c] = load<Element>(d, from + c * kLanes);
    HWY_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
      const auto weight = hn::Set(d, weights[r * stride + t]);
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

/// As add_values for whole rows of `dim` elements.
template <class Element, int kRows, class D>
HWY_NOINLINE void add_value_rows(D d, const float* weights, std::int32_t stride, std::int32_t count,
                                 const typename Element::Raw* v, const std::int64_t* offsets, const float* decay,
                                 float* acc, std::int32_t dim) {
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  constexpr std::int32_t kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
  std::int32_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) {
    add_values<Element, kRows, kVectors>(d, weights, stride, count, v + c, offsets, decay, acc + c, dim);
  }
  for (; c < dim; c += kLanes) {
    add_values<Element, kRows, 1>(d, weights, stride, count, v + c, offsets, decay, acc + c, dim);
  }
}

/// Turns a row's logits into weights in place; keys `count` .. up to whole vectors are padding. Returns by how much the
/// row's earlier sums shrink.
template <class D>
HWY_INLINE float weigh_row(D d, float* HWY_RESTRICT logits, std::int32_t count, float& top, float& sum) {
  const auto lanes = static_cast<std::int32_t>(hn::Lanes(d));
  for (std::int32_t t = count; t % lanes != 0; ++t) logits[t] = kNegInf;
  auto highest = hn::Set(d, top);
  for (std::int32_t t = 0; t < count; t += lanes) highest = hn::Max(highest, hn::Load(d, logits + t));
  const float new_top = hn::GetLane(hn::MaxOfLanes(d, highest));
  const auto base = hn::Set(d, new_top == kNegInf ? 0.0F : new_top);
  auto sums = hn::Zero(d);
  for (std::int32_t t = 0; t < count; t += lanes) {
    const auto weights = exp2_nonpositive(d, hn::Sub(hn::Load(d, logits + t), base));
    hn::Store(weights, d, logits + t);
    sums = hn::Add(sums, weights);
  }
  const float decay = hn::GetLane(exp2_nonpositive(d, hn::Sub(hn::Set(d, top), base)));
  sum = hn::GetLane(hn::MulAdd(hn::Set(d, sum), hn::Set(d, decay), hn::SumOfLanes(d, sums)));
  top = new_top;
  return decay;
}

/// ALiBi and the soft cap, for one row.
template <class D>
HWY_INLINE void shape_logits(D d, const Job& job, std::int32_t qo_head, std::int32_t distance, std::int32_t count,
                             float* HWY_RESTRICT logits) {
  const bool alibi = job.extras.alibi_slopes != nullptr;
  if (!alibi && !job.capped()) return;
  const auto slope = hn::Set(d, alibi ? job.slope(qo_head) : 0.0F);
  for (std::int32_t t = 0; t < count; t += static_cast<std::int32_t>(hn::Lanes(d))) {
    auto s = hn::Load(d, logits + t);
    if (alibi) s = hn::MulAdd(slope, hn::Iota(d, static_cast<float>(distance + t)), s);
    if (job.capped()) s = hn::Mul(tanh(d, s), hn::Set(d, job.cap_unit()));
    hn::Store(s, d, logits + t);
  }
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
template <class Raw>
struct Block {
  std::int32_t first = 0;
  std::int32_t count = 0;
  const std::int64_t* k_offsets = nullptr;
  const std::int64_t* v_offsets = nullptr;
  const std::int64_t* next_k_offsets = nullptr;  ///< keys to fetch meanwhile
  const std::int64_t* next_v_offsets = nullptr;
  std::int32_t next_count = 0;

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

  static void prefetch(const Raw* row, std::int32_t dim) {
    const auto* bytes = reinterpret_cast<const char*>(row);
    for (std::size_t b = 0; b < static_cast<std::size_t>(dim) * sizeof(Raw); b += 64) __builtin_prefetch(bytes + b, 0, 2);
  }

  /// Rows first_row .. first_row + kRows - 1 of one KV head over one block.
  template <int kRows, class D>
  HWY_NOINLINE void tile(D d, const Block<Raw>& block, std::int32_t kv_head, std::int32_t first_row) const {
    constexpr int kKeys = kKeysAtOnce<kRows>;
    const std::int32_t dim_qk = job.params.head_dim_qk;
    const std::int32_t dim_vo = job.params.head_dim_vo;
    const std::int32_t slot = kv_head * rows + first_row;
    const float* q = at<float>(layout.q) + std::int64_t{slot} * dim_qk;
    float* acc = at<float>(layout.acc) + std::int64_t{slot} * dim_vo;
    float* top = at<float>(layout.top) + slot;
    float* sum = at<float>(layout.sum) + slot;
    float* logits = at<float>(layout.logits);
    const Raw* k = head(job.k, kv_head);
    const Raw* v = head(job.v, kv_head);

    for (std::int32_t t = 0; t < block.count; t += kKeys) {
      const Raw* keys[kKeys];
      for (int i = 0; i < kKeys; ++i) keys[i] = k + block.k_offsets[std::min(t + i, block.count - 1)];
      dot_keys<Element, kRows>(d, q, dim_qk, keys, logits + t, layout.block);
      if (first_row == 0) {
        for (std::int32_t i = t; i < std::min(t + kKeys, block.next_count); ++i) {
          prefetch(k + block.next_k_offsets[i], dim_qk);
          prefetch(v + block.next_v_offsets[i], dim_vo);
        }
      }
    }

    const std::uint64_t* visible = at<std::uint64_t>(layout.visible);
    std::uint64_t seen_by_all = block.all();
    float decay[kRows];
    for (int r = 0; r < kRows; ++r) {
      float* row = logits + r * layout.block;
      const std::int32_t p = (first_row + r) / job.group;
      const std::int32_t qo_head = kv_head * job.group + (first_row + r) % job.group;
      shape_logits(d, job, qo_head, block.first - request.q_pos(p), block.count, row);
      for (std::uint64_t hidden = block.all() & ~visible[p]; hidden != 0; hidden &= hidden - 1) {
        row[std::countr_zero(hidden)] = kNegInf;
      }
      seen_by_all &= visible[p];
      decay[r] = weigh_row(d, row, block.count, top[r], sum[r]);
    }
    if (seen_by_all == block.all()) {
      add_value_rows<Element, kRows>(d, logits, layout.block, block.count, v, block.v_offsets, decay, acc, dim_vo);
      return;
    }
    // A hidden value may be NaN or infinite, so it must not even be multiplied by 0: row by row, run by run.
    for (int r = 0; r < kRows; ++r) {
      for (std::uint64_t bits = block.all() & visible[(first_row + r) / job.group]; bits != 0;) {
        const int begin = std::countr_zero(bits);
        const int count = std::countr_one(bits >> begin);
        add_value_rows<Element, 1>(d, logits + r * layout.block + begin, layout.block, count, v,
                                   block.v_offsets + begin, &decay[r], acc + std::int64_t{r} * dim_vo, dim_vo);
        decay[r] = 1.0F;
        bits = begin + count == 64 ? 0 : bits & ~std::uint64_t{0} << (begin + count);
      }
    }
  }

  template <class D>
  void block(D d, const Block<Raw>& block) const {
    for (std::int32_t p = 0; p < request.qo_len; ++p) {
      at<std::uint64_t>(layout.visible)[p] = visible_bits(job, request, p, block.first, block.count);
    }
    for (std::int32_t h = 0; h < job.params.num_kv_heads; ++h) {
      std::int32_t row = 0;
      for (; row + kTileRows <= rows; row += kTileRows) tile<4>(d, block, h, row);
      switch (rows - row) {
        case 1:
          tile<1>(d, block, h, row);
          break;
        case 2:
          tile<2>(d, block, h, row);
          break;
        case 3:
          tile<3>(d, block, h, row);
          break;
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
          const std::int64_t slot = std::int64_t{kv_head} * rows + p * job.group + h % job.group;
          widen_row<Query>(d, from, dim, job.q_scale(kv_head), at<float>(layout.q) + slot * dim);
        }
      }
    });
  }

  template <class D>
  void run(D d, std::int32_t chunk) const {
    const std::int64_t slots = std::int64_t{job.params.num_kv_heads} * rows;
    load_queries(d);
    std::fill_n(at<float>(layout.acc), slots * job.params.head_dim_vo, 0.0F);
    std::fill_n(at<float>(layout.top), slots, kNegInf);
    std::fill_n(at<float>(layout.sum), slots, 0.0F);

    const KeyRange keys = job.chunk(request, 0, request.qo_len - 1, chunk);
    std::int64_t* offsets = at<std::int64_t>(layout.offsets);
    std::int64_t* next_offsets = offsets + 2 * layout.block;
    Block<Raw> next{.first = keys.begin, .count = std::min(keys.end - keys.begin, layout.block)};
    if (next.count > 0) job.token_offsets(request, next.first, next.count, offsets, offsets + layout.block);
    while (next.count > 0) {
      Block<Raw> now = next;
      now.k_offsets = offsets;
      now.v_offsets = offsets + layout.block;
      next.first = now.first + now.count;
      next.count = std::min(keys.end - next.first, layout.block);
      if (next.count > 0) {
        job.token_offsets(request, next.first, next.count, next_offsets, next_offsets + layout.block);
        now.next_k_offsets = next_offsets;
        now.next_v_offsets = next_offsets + layout.block;
        now.next_count = next.count;
      }
      block(d, now);
      std::swap(offsets, next_offsets);
    }

    for (std::int64_t slot = 0; slot < slots; ++slot) {
      const auto kv_head = static_cast<std::int32_t>(slot / rows);
      const auto row = static_cast<std::int32_t>(slot % rows);
      finish_row(d, job, request, row / job.group, kv_head * job.group + row % job.group, chunk,
                 at<float>(layout.acc) + slot * job.params.head_dim_vo, at<float>(layout.top)[slot],
                 at<float>(layout.sum)[slot]);
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
