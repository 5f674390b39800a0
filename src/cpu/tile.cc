// The many-row kernel: a tile of query rows against blocks of keys, as two small matrix products around a softmax.
//
// Rows lie along vector lanes everywhere: logits, weights, maxima and outputs are all stored transposed. So the softmax
// needs no sums across lanes, keys and values are broadcast from plain rows, and no dimension needs a vector tail.
// clang-format off: Highway needs this order
#include "cpu/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// clang-format on

#include <algorithm>

#include "cpu/fetch.h"
#include "cpu/finish-inl.h"
#include "cpu/job.h"
#include "cpu/kernels.h"
#include "cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

inline constexpr Wide kWide;
inline constexpr std::int32_t kLanes = static_cast<std::int32_t>(hn::MaxLanes(Wide()));
using Floats = hn::Vec<Wide>;

/// Keys are padded to whole groups of these, which all micro-kernels divide.
inline constexpr std::int32_t kKeyGroup = 8;

/// Scalars (keys or value elements) that a micro-kernel of kVectors vectors of rows handles at once: as many
/// accumulators as 16 registers allow.
template <int kVectors>
inline constexpr int kScalars = kVectors == 1 ? 8 : 4;

/// logits[key][row] = <q[row], k[key]> for keys begin .. end - 1 (whole groups).
template <int kVectors>
HWY_NOINLINE void multiply_keys(const float* HWY_RESTRICT q, const float* HWY_RESTRICT k, std::int32_t dim,
                                std::int32_t begin, std::int32_t end, float* HWY_RESTRICT logits) {
  constexpr int kKeys = kScalars<kVectors>;
  constexpr int kWidth = kVectors * kLanes;
  for (std::int32_t t = begin; t < end; t += kKeys) {
    Floats sums[kKeys * kVectors];
    HWY_UNROLL(16)
    for (int i = 0; i < kKeys * kVectors; ++i) sums[i] = hn::Zero(kWide);
    const float* key = k + std::int64_t{t} * dim;
    const float* column = q;
    for (std::int32_t c = 0; c < dim; ++c, ++key, column += kWidth) {
      Floats rows[kVectors];
      HWY_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) rows[v] = hn::Load(kWide, column + v * kLanes);
      HWY_UNROLL(8)
      for (int i = 0; i < kKeys; ++i) {
        const auto scalar = hn::Set(kWide, key[std::int64_t{i} * dim]);
        HWY_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) {
          sums[i * kVectors + v] = hn::MulAdd(rows[v], scalar, sums[i * kVectors + v]);
        }
      }
    }
    HWY_UNROLL(16)
    for (int i = 0; i < kKeys * kVectors; ++i) {
      hn::Store(sums[i], kWide, logits + std::int64_t{t} * kWidth + i * kLanes);
    }
  }
}

/// acc[element][row] = acc * decay[row] + sum over keys of weights[key][row] * v[key][element]. With `visible`, hidden
/// keys are left out rather than multiplied by 0.
template <int kVectors, bool kExact>
HWY_NOINLINE void multiply_values(const float* HWY_RESTRICT weights, const float* HWY_RESTRICT v, std::int32_t block,
                                  std::int32_t dim, std::int32_t begin, std::int32_t end,
                                  const float* HWY_RESTRICT decay, const std::uint32_t* HWY_RESTRICT visible,
                                  float* HWY_RESTRICT acc) {
  constexpr int kElements = kScalars<kVectors>;
  constexpr int kWidth = kVectors * kLanes;
  for (std::int32_t e = 0; e < dim; e += kElements) {
    float* out = acc + std::int64_t{e} * kWidth;
    Floats sums[kElements * kVectors];
    HWY_UNROLL(8)
    for (int i = 0; i < kElements; ++i) {
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) {
        const auto factor = hn::Load(kWide, decay + n * kLanes);
        sums[i * kVectors + n] = hn::Mul(hn::Load(kWide, out + i * kWidth + n * kLanes), factor);
      }
    }
    const float* quad = v + std::int64_t{e} * block + std::int64_t{begin} * 4;
    const float* row = weights + std::int64_t{begin} * kWidth;
    for (std::int32_t t = begin; t < end; ++t, quad += 4, row += kWidth) {
      Floats rows[kVectors];
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) rows[n] = hn::Load(kWide, row + n * kLanes);
      HWY_UNROLL(8)
      for (int i = 0; i < kElements; ++i) {
        const auto scalar = hn::Set(kWide, quad[i / 4 * 4 * std::int64_t{block} + i % 4]);
        HWY_UNROLL(4)
        for (int n = 0; n < kVectors; ++n) {
          auto& sum = sums[i * kVectors + n];
          if constexpr (kExact) {
            const hn::RebindToUnsigned<Wide> du;
            const auto seen = hn::BitCast(kWide, hn::Load(du, visible + std::int64_t{t} * kWidth + n * kLanes));
            sum = hn::IfThenElse(hn::MaskFromVec(seen), hn::MulAdd(rows[n], scalar, sum), sum);
          } else {
            sum = hn::MulAdd(rows[n], scalar, sum);
          }
        }
      }
    }
    HWY_UNROLL(16)
    for (int i = 0; i < kElements * kVectors; ++i) hn::Store(sums[i], kWide, out + i * kLanes);
  }
}

/// Stores elements 0 .. 3 at `to` and 4 .. 7, where the vector has them, `stride` behind.
inline void store_quads(hn::Vec<Narrow> elements, float* to, std::int64_t stride) {
#if HWY_MAX_BYTES >= 32
  const hn::Half<Narrow> half;
  hn::StoreU(hn::LowerHalf(half, elements), half, to);
  hn::StoreU(hn::UpperHalf(half, elements), half, to + stride);
#else
  static_cast<void>(stride);
  hn::StoreU(elements, Narrow(), to);
#endif
}

/// Per-row values of a tile, one lane a row.
struct Lanes {
  float* top;    ///< highest logit so far
  float* sum;    ///< sum of weights
  float* decay;  ///< by how much earlier sums shrink, of the block at hand
  float* slope;  ///< ALiBi
  std::int32_t* q_pos;

  explicit Lanes(float* base)
      : top(base),
        sum(base + kCpuTileRows),
        decay(base + 2 * kCpuTileRows),
        slope(base + 3 * kCpuTileRows),
        q_pos(reinterpret_cast<std::int32_t*>(base + 4 * kCpuTileRows)) {}
};

/// ALiBi, the soft cap, and minus infinity for what a row does not see, for one vector of rows.
inline void shape_logits(const Job& job, const Lanes& lanes, std::int32_t lane, std::int32_t first_key,
                         std::int32_t begin, std::int32_t end, std::int32_t width, const std::uint32_t* visible,
                         float* HWY_RESTRICT logits) {
  const hn::RebindToUnsigned<Wide> du;
  const hn::RebindToSigned<Wide> di;
  const bool alibi = job.extras.alibi_slopes != nullptr;
  const auto slope = hn::Load(kWide, lanes.slope + lane);
  // Distances are short where positions may be more than floats can tell apart.
  const auto distance = hn::Sub(hn::Set(di, first_key), hn::Load(di, lanes.q_pos + lane));
  for (std::int32_t t = begin; t < end; ++t) {
    auto s = hn::Load(kWide, logits + std::int64_t{t} * width);
    if (alibi) s = hn::MulAdd(slope, hn::ConvertTo(kWide, hn::Add(distance, hn::Set(di, t))), s);
    if (job.capped()) s = soft_cap(kWide, s, job.params.logits_soft_cap);
    if (visible != nullptr) {
      const auto seen = hn::BitCast(kWide, hn::Load(du, visible + std::int64_t{t} * width));
      s = hn::IfThenElse(hn::MaskFromVec(seen), s, hn::Set(kWide, kNegInf));
    }
    hn::Store(s, kWide, logits + std::int64_t{t} * width);
  }
}

/// Turns logits into weights for one vector of rows. A NaN may get lost on the way to `top`, never to `sum`.
inline void weigh_rows(const Lanes& lanes, std::int32_t lane, std::int32_t begin, std::int32_t end, std::int32_t width,
                       float* HWY_RESTRICT logits) {
  const auto top = hn::Load(kWide, lanes.top + lane);
  auto highest = top;
  for (std::int32_t t = begin; t < end; ++t) {
    highest = hn::Max(highest, hn::Load(kWide, logits + std::int64_t{t} * width));
  }
  const auto base = hn::IfThenZeroElse(hn::Eq(highest, hn::Set(kWide, kNegInf)), highest);
  auto sums = hn::Zero(kWide);
  for (std::int32_t t = begin; t < end; ++t) {
    const auto weights = exp2_nonpositive(kWide, hn::Sub(hn::Load(kWide, logits + std::int64_t{t} * width), base));
    hn::Store(weights, kWide, logits + std::int64_t{t} * width);
    sums = hn::Add(sums, weights);
  }
  const auto decay = exp2_nonpositive(kWide, hn::Sub(top, base));
  hn::Store(decay, kWide, lanes.decay + lane);
  hn::Store(hn::MulAdd(hn::Load(kWide, lanes.sum + lane), decay, sums), kWide, lanes.sum + lane);
  hn::Store(highest, kWide, lanes.top + lane);
}

template <class Element>
struct Tile {
  using Raw = typename Element::Raw;

  const Job& job;
  Request request;
  std::int32_t kv_head;
  std::int64_t first_row;  ///< of the tile, packed
  std::int32_t rows;
  TileScratch layout;
  std::byte* scratch;

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(scratch + offset);
  }
  std::int32_t token(std::int32_t row) const { return static_cast<std::int32_t>((first_row + row) / job.group); }
  std::int32_t qo_head(std::int32_t row) const {
    return kv_head * job.group + static_cast<std::int32_t>((first_row + row) % job.group);
  }
  std::int32_t lanes_used() const { return (rows + kLanes - 1) / kLanes * kLanes; }
  /// Rows of the panel that starts at a row, with its padding.
  std::int32_t width(std::int32_t row) const { return std::min(3 * kLanes, lanes_used() - row); }

  void load_queries() const {
    const std::int32_t dim = job.params.head_dim_qk;
    const float scale = job.q_scale(kv_head);
    float* buffer = at<float>(layout.row);
    for (std::int32_t panel = 0; panel < lanes_used(); panel += 3 * kLanes) {
      const std::int32_t columns = width(panel);
      float* q = at<float>(layout.q) + std::int64_t{panel} * dim;
      for (std::int32_t lane = 0; lane < columns; ++lane) {
        if (panel + lane < rows) {
          load_query(panel + lane, scale, buffer);
        } else {
          std::fill_n(buffer, dim, 0.0F);
        }
        for (std::int32_t c = 0; c < dim; ++c) q[std::int64_t{c} * columns + lane] = buffer[c];
      }
    }
  }

  void load_query(std::int32_t row, float scale, float* to) const {
    with_wide_element(job.q.dtype, [&](auto element) {
      using Query = decltype(element);
      const auto* from = static_cast<const typename Query::Raw*>(job.q.data) +
                         (request.qo_begin + token(row)) * job.q.row_stride + qo_head(row) * job.q.head_stride;
      widen_row<Query>(Narrow(), from, job.params.head_dim_qk, scale, to);
    });
  }

  void start_lanes() const {
    const Lanes lanes(at<float>(layout.lanes));
    for (std::int32_t row = 0; row < lanes_used(); ++row) {
      const bool live = row < rows;
      lanes.top[row] = kNegInf;
      lanes.sum[row] = 0.0F;
      lanes.q_pos[row] = live ? request.q_pos(token(row)) : 0;
      lanes.slope[row] = live && job.extras.alibi_slopes != nullptr ? job.slope(qo_head(row)) : 0.0F;
    }
    std::fill_n(at<float>(layout.acc), std::int64_t{lanes_used()} * job.params.head_dim_vo, 0.0F);
  }

  /// Keys first .. first + count - 1 as floats, padded with zeros to whole groups; the `following` keys after them are
  /// on their way when it returns. Returns whether all values are finite.
  bool load_block(std::int32_t first, std::int32_t count, std::int32_t following) const {
    const std::int32_t dim_qk = job.params.head_dim_qk;
    const std::int32_t dim_vo = job.params.head_dim_vo;
    std::int64_t* k_offsets = at<std::int64_t>(layout.offsets);
    std::int64_t* v_offsets = k_offsets + layout.block + kTileKeysAhead;
    job.token_offsets(request, first, count + following, k_offsets, v_offsets);
    const auto* k = static_cast<const Raw*>(job.k.data) + kv_head * job.k.stride.head;
    const auto* v = static_cast<const Raw*>(job.v.data) + kv_head * job.v.stride.head;
    // Keys of one head lie apart, where the processor expects none.
    const auto request_row = [](const Raw* row, std::int32_t dim) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(row);
      const auto size = static_cast<std::int32_t>(dim * sizeof(Raw));
      for (std::int32_t line = 0; line < size; line += kLineBytes) __builtin_prefetch(bytes + line, 0, 2);
    };
    constexpr auto kStep = static_cast<std::int32_t>(hn::MaxLanes(Narrow()));
    auto poison = hn::Zero(Narrow());  // stays 0 while everything is finite
    for (std::int32_t t = 0; t < count; ++t) {
      if (t + kTileKeysAhead < count + following) {
        request_row(k + k_offsets[t + kTileKeysAhead], dim_qk);
        request_row(v + v_offsets[t + kTileKeysAhead], dim_vo);
      }
      float* key = at<float>(layout.k) + std::int64_t{t} * dim_qk;
      for (std::int32_t c = 0; c < dim_qk; c += kStep) {
        hn::StoreU(load<Element>(Narrow(), k + k_offsets[t] + c), Narrow(), key + c);
      }
      float* value = at<float>(layout.v) + std::int64_t{t} * 4;
      for (std::int32_t c = 0; c < dim_vo; c += kStep) {
        const auto elements = load<Element>(Narrow(), v + v_offsets[t] + c);
        poison = hn::MulAdd(elements, hn::Zero(Narrow()), poison);
        store_quads(elements, value + std::int64_t{c / 4} * 4 * layout.block + c % 4, std::int64_t{4} * layout.block);
      }
    }
    for (std::int32_t t = count; t % kKeyGroup != 0; ++t) {
      std::fill_n(at<float>(layout.k) + std::int64_t{t} * dim_qk, dim_qk, 0.0F);
      for (std::int32_t c = 0; c < dim_vo; ++c) {
        at<float>(layout.v)[std::int64_t{c / 4} * 4 * layout.block + std::int64_t{t} * 4 + c % 4] = 0.0F;
      }
    }
    return hn::AllTrue(Narrow(), hn::Eq(poison, hn::Zero(Narrow())));
  }

  /// Fills the visibility of a panel's rows for keys begin .. end - 1 of a block.
  void fill_visible(std::int32_t panel, std::int32_t first, std::int32_t begin, std::int32_t end) const {
    const std::int32_t columns = width(panel);
    auto* visible = at<std::uint32_t>(layout.visible);
    for (std::int32_t lane = 0; lane < columns; ++lane) {
      const std::int32_t p = token(std::min(panel + lane, rows - 1));
      const KeyRange keys = job.visible(request, p);
      for (std::int32_t t = begin; t < end; ++t) {
        const std::int32_t key = first + t;
        const bool seen =
            key >= keys.begin && key < keys.end && (job.extras.mask == nullptr || !job.masked(request, p, key));
        visible[std::int64_t{t} * columns + lane] = seen ? ~std::uint32_t{0} : 0U;
      }
    }
  }

  bool any_masked(std::int32_t first_token, std::int32_t last_token, std::int32_t begin, std::int32_t end) const {
    if (job.extras.mask == nullptr) return false;
    for (std::int32_t p = first_token; p <= last_token; ++p) {
      for (std::int32_t key = begin; key < end; ++key) {
        if (job.masked(request, p, key)) return true;
      }
    }
    return false;
  }

  /// One panel of rows over the block of `count` keys from `first`.
  template <int kVectors>
  void multiply_panel(std::int32_t panel, std::int32_t first, std::int32_t count, bool finite) const {
    const std::int32_t first_token = token(panel);
    const std::int32_t last_token = token(std::min(panel + kVectors * kLanes, rows) - 1);
    const KeyRange earliest = job.visible(request, first_token);
    const KeyRange latest = job.visible(request, last_token);
    std::int32_t begin = std::max(earliest.begin - first, 0);
    std::int32_t end = std::min(latest.end - first, count);
    if (begin >= end) return;
    begin = begin / kKeyGroup * kKeyGroup;
    end = (end + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
    const bool ragged_edge = end > count || first + begin < latest.begin || first + end > earliest.end;
    const bool hidden = ragged_edge || any_masked(first_token, last_token, first + begin, first + end);

    const Lanes lanes(at<float>(layout.lanes));
    float* weights = at<float>(layout.weights);
    const std::uint32_t* visible = nullptr;
    if (hidden) {
      fill_visible(panel, first, begin, std::min(end, count));
      visible = at<std::uint32_t>(layout.visible);
      auto* padding = at<std::uint32_t>(layout.visible) + std::int64_t{count} * kVectors * kLanes;
      if (end > count) std::fill_n(padding, std::int64_t{end - count} * kVectors * kLanes, 0U);
    }
    multiply_keys<kVectors>(at<float>(layout.q) + std::int64_t{panel} * job.params.head_dim_qk, at<float>(layout.k),
                            job.params.head_dim_qk, begin, end, weights);
    for (std::int32_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
      if (hidden || job.capped() || job.extras.alibi_slopes != nullptr) {
        shape_logits(job, lanes, panel + lane, first, begin, end, kVectors * kLanes, hidden ? visible + lane : nullptr,
                     weights + lane);
      }
      weigh_rows(lanes, panel + lane, begin, end, kVectors * kLanes, weights + lane);
    }
    // A hidden value may be NaN or infinite; only then are hidden keys left out one by one.
    const auto multiply = hidden && !finite ? &multiply_values<kVectors, true> : &multiply_values<kVectors, false>;
    multiply(weights, at<float>(layout.v), layout.block, job.params.head_dim_vo, begin, end, lanes.decay + panel,
             visible, at<float>(layout.acc) + std::int64_t{panel} * job.params.head_dim_vo);
  }

  void finish(std::int32_t chunk, const KeyRange& keys) const {
    const std::int32_t dim = job.params.head_dim_vo;
    const Lanes lanes(at<float>(layout.lanes));
    float* buffer = at<float>(layout.row);
    for (std::int32_t panel = 0; panel < rows; panel += 3 * kLanes) {
      const std::int32_t columns = width(panel);
      const float* acc = at<float>(layout.acc) + std::int64_t{panel} * dim;
      for (std::int32_t row = panel; row < std::min(panel + columns, rows); ++row) {
        for (std::int32_t c = 0; c < dim; ++c) buffer[c] = acc[std::int64_t{c} * columns + row - panel];
        finish_row(Narrow(), job, request, token(row), qo_head(row), chunk, keys, buffer, lanes.top[row],
                   lanes.sum[row]);
      }
    }
  }

  void run(std::int32_t chunk) const {
    load_queries();
    start_lanes();
    const KeyRange keys = job.chunk(request, token(0), token(rows - 1), chunk);
    std::int32_t count = 0;
    for (std::int32_t first = keys.begin; first < keys.end; first += count) {
      count = std::min(layout.block, keys.end - first);
      const bool finite = load_block(first, count, std::min(kTileKeysAhead, keys.end - first - count));
      for (std::int32_t panel = 0; panel < rows; panel += 3 * kLanes) {
        switch (width(panel) / kLanes) {
          case 1:
            multiply_panel<1>(panel, first, count, finite);
            break;
          case 2:
            multiply_panel<2>(panel, first, count, finite);
            break;
          default:
            multiply_panel<3>(panel, first, count, finite);
            break;
        }
      }
    }
    finish(chunk, keys);
  }
};

template <class Element>
void tile_unit(const Job& job, std::int64_t unit, std::byte* scratch) {
  const std::int64_t item = unit / job.params.num_kv_heads;
  const auto kv_head = static_cast<std::int32_t>(unit % job.params.num_kv_heads);
  const Request request = job.request(job.schedule.request_indices[item]);
  const std::int64_t first_row = std::int64_t{job.schedule.qo_tile_indices[item]} * job.schedule.tile_rows;
  const std::int64_t left = std::int64_t{request.qo_len} * job.group - first_row;
  if (left <= 0) return;
  const auto rows = static_cast<std::int32_t>(std::min<std::int64_t>(job.schedule.tile_rows, left));
  const Tile<Element> tile{job, request, kv_head, first_row, rows, TileScratch(job.params), scratch};
  tile.run(job.schedule.kv_tile_indices[item]);
}

UnitKernel choose_tile(DType kv_dtype) {
  return with_element(kv_dtype, [](auto element) -> UnitKernel { return &tile_unit<decltype(element)>; });
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fiw::cpu {

HWY_EXPORT(choose_tile);

UnitKernel tile_kernel(DType kv_dtype) { return HWY_DYNAMIC_DISPATCH(choose_tile)(kv_dtype); }

}  // namespace fiw::cpu
#endif
