// fp8 as bfloat16, which holds every fp8 value: the few-row kernel multiplies one narrow type instead of three, and
// each element is converted once for all rows. Bytes are looked up, so that neither subnormals nor NaN take steps of
// their own.
#if defined(FIW_CPU_TRANSLATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FIW_CPU_TRANSLATE_INL_H_
#undef FIW_CPU_TRANSLATE_INL_H_
#else
#define FIW_CPU_TRANSLATE_INL_H_
#endif

#include <cstdint>

#include "cpu/elements.h"
#include "cpu/fp8_tables.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
/// Lanes(d) elements, of which there are whole blocks of 16.
template <class Element, class D>
HWY_INLINE void translate(D d, const std::uint8_t* from, std::uint16_t* to) {
  using Tables = Fp8Tables<Element>;
  const hn::Repartition<std::uint16_t, D> pairs;
  const auto code = hn::LoadU(d, from);
  const auto inner = hn::And(code, hn::Set(d, Tables::kInnerMask));
  // Bits that come from the neighbouring byte are masked off.
  const auto outer = hn::And(hn::BitCast(d, hn::ShiftRight<Tables::kInnerBits>(hn::BitCast(pairs, code))),
                             hn::Set(d, Tables::kLastOuter));
  const auto first = hn::Eq(outer, hn::Zero(d));
  const auto last = hn::Eq(outer, hn::Set(d, Tables::kLastOuter));
  const auto look_up = [&](const std::uint8_t(&table)[16], auto index)
                           HWY_ATTR { return hn::TableLookupBytes(hn::LoadDup128(d, table), index); };
  const auto moved = hn::BitCast(d, hn::ShiftLeft<8 - Tables::kInnerBits>(hn::BitCast(pairs, inner)));
  const auto low = hn::IfThenElse(first, look_up(Tables::kValues.first_low, inner), moved);
  auto high = hn::IfThenElse(first, look_up(Tables::kValues.first_high, inner), look_up(Tables::kValues.high, outer));
  high = hn::IfThenElse(last, look_up(Tables::kValues.last_high, inner), high);
  high = hn::Or(high, hn::And(code, hn::Set(d, std::uint8_t{0x80})));
  const auto lower = hn::BitCast(pairs, hn::InterleaveLower(d, low, high));
  const auto upper = hn::BitCast(pairs, hn::InterleaveUpper(d, low, high));
  if constexpr (hn::MaxLanes(D()) > 16) {
    hn::StoreU(hn::ConcatLowerLower(pairs, upper, lower), pairs, to);
    hn::StoreU(hn::ConcatUpperUpper(pairs, upper, lower), pairs, to + hn::MaxLanes(pairs));
  } else {
    hn::StoreU(lower, pairs, to);
    hn::StoreU(upper, pairs, to + hn::MaxLanes(pairs));
  }
}
#endif

template <class Element>
HWY_INLINE void translate_row(const std::uint8_t* HWY_RESTRICT from, std::int32_t count,
                              std::uint16_t* HWY_RESTRICT to) {
  std::int32_t c = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::CappedTag<std::uint8_t, 32> wide;
  const hn::Full128<std::uint8_t> block;
  constexpr auto kWide = static_cast<std::int32_t>(hn::MaxLanes(wide));
  for (; c + kWide <= count; c += kWide) translate<Element>(wide, from + c, to + c);
  for (; c + 16 <= count; c += 16) translate<Element>(block, from + c, to + c);
#endif
  for (; c < count; ++c) to[c] = Fp8Tables<Element>::kValues.all[from[c]];
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
