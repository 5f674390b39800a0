// SIMD building blocks shared by the kernels: element loads and stores, exponentials, rows of floats.
//
// Included once a target by files that Highway compiles several times, hence the toggling guard.
#if defined(FIW_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FIW_CPU_SIMD_INL_H_
#undef FIW_CPU_SIMD_INL_H_
#else
#define FIW_CPU_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/elements.h"
#include "hwy/highway.h"

/// Of a lambda in an inner loop, which must not become a call. Sanitizers multiply what is inlined, so they see calls.
#ifndef FIW_INLINE_LAMBDA
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || HWY_IS_ASAN || HWY_IS_TSAN
#define FIW_INLINE_LAMBDA HWY_ATTR
#else
#define FIW_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace fiw::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// On these targets Highway converts fp16 in one instruction; elsewhere its emulation loses NaN and infinity.
#undef FIW_NATIVE_HALF
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define FIW_NATIVE_HALF 1
#else
#define FIW_NATIVE_HALF 0
#endif

/// Head dims are multiples of 8, so vectors of up to 8 floats never need a tail; 16 serve dims that allow them.
using Wide = hn::CappedTag<float, 16>;
using Narrow = hn::CappedTag<float, 8>;

/// Values of narrow codes that sit in 32-bit lanes.
template <class Element, class D, class VU>
HWY_INLINE hn::Vec<D> decode(D d, VU code) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  constexpr bool kIeee = !std::is_same_v<Element, E4M3>;
  constexpr std::uint32_t kMagnitude = (1U << (Element::kBits - 1)) - 1U;
  constexpr std::uint32_t kSpecial = kIeee ? kMagnitude + 1U - (1U << Element::kMantissa) : kMagnitude;

  const auto magnitude = hn::And(code, hn::Set(du, kMagnitude));
  const auto sign = hn::ShiftLeft<32 - Element::kBits>(hn::Xor(code, magnitude));
  const auto wide = hn::ShiftLeft<23 - Element::kMantissa>(magnitude);
  const auto normal = hn::Add(wide, hn::Set(du, std::uint32_t{127 - Element::kBias} << 23));
  // A subnormal is read with the smallest normal exponent, less the leading one that it lacks.
  const auto least = hn::Set(du, std::uint32_t{128 - Element::kBias} << 23);
  const auto subnormal = hn::BitCast(du, hn::Sub(hn::BitCast(d, hn::Add(wide, least)), hn::BitCast(d, least)));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 1 << Element::kMantissa)));
  const auto is_special = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, std::int32_t{kSpecial} - 1)));
  const auto finite = hn::IfThenElse(is_subnormal, subnormal, normal);
  const auto special = hn::IfThenElseZero(is_special, hn::Set(du, kIeee ? 0x7F800000U : 0x7FC00000U));
  return hn::BitCast(d, hn::Or(hn::Or(finite, special), sign));
}

/// Lanes(d) elements as floats.
template <class Element, class D>
HWY_INLINE hn::Vec<D> load(D d, const typename Element::Raw* from) {
  const hn::RebindToUnsigned<D> du;
  if constexpr (std::is_same_v<Element, Float32>) {
    return hn::LoadU(d, from);
  } else if constexpr (std::is_same_v<Element, BFloat16>) {
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(hn::Rebind<std::uint16_t, D>(), from))));
  } else {
    const hn::Rebind<typename Element::Raw, D> dn;
#if FIW_NATIVE_HALF
    const hn::Rebind<std::uint16_t, D> dh;
    const hn::Rebind<hwy::float16_t, D> df16;
    if constexpr (std::is_same_v<Element, Float16>) {
      return hn::PromoteTo(d, hn::BitCast(df16, hn::LoadU(dn, from)));
    } else if constexpr (std::is_same_v<Element, E5M2>) {  // the upper half of an fp16
      const auto half = hn::ShiftLeft<8>(hn::PromoteTo(dh, hn::LoadU(dn, from)));
      return hn::PromoteTo(d, hn::BitCast(df16, half));
    } else {  // the magnitude, shifted to where fp16 has its fields, reads as 2^-8 of its value
      const hn::Rebind<std::int16_t, D> dh_signed;
      const hn::Rebind<std::int8_t, D> dn_signed;
      const auto code = hn::PromoteTo(dh_signed, hn::BitCast(dn_signed, hn::LoadU(dn, from)));
      const auto half = hn::AndNot(hn::Set(dh, 0x4000), hn::BitCast(dh, hn::ShiftLeft<7>(code)));
      const auto all_ones = hn::Set(dh, 0x3F80);
      const auto nan = hn::VecFromMask(dh, hn::Eq(hn::And(half, all_ones), all_ones));
      const auto exact = hn::Or(half, hn::And(nan, hn::Set(dh, 0x7E00)));
      return hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, exact)), hn::Set(d, 256.0F));
    }
#else
    return decode<Element>(d, hn::PromoteTo(du, hn::LoadU(dn, from)));
#endif
  }
}

/// Whether vectors are filled with the even, then the odd elements of twice as many, which are had without moving
/// lanes.
template <class Element>
inline constexpr bool kSplitsPairs = HWY_TARGET != HWY_SCALAR&& std::is_same_v<Element, BFloat16>;

/// Half of 2 * Lanes(d) elements in pair order: as they lie, unless pairs are split.
template <class Element, int kHalf, class D>
HWY_INLINE hn::Vec<D> load_half(D d, const typename Element::Raw* from) {
  if constexpr (kSplitsPairs<Element>) {
    const hn::RebindToUnsigned<D> du;
    const auto both = hn::BitCast(du, hn::LoadU(hn::Repartition<std::uint16_t, D>(), from));
    return hn::BitCast(d, kHalf == 0 ? hn::ShiftLeft<16>(both) : hn::And(both, hn::Set(du, 0xFFFF0000U)));
  } else {
    return load<Element>(d, from + kHalf * static_cast<int>(hn::MaxLanes(D())));
  }
}

/// Brings a row from the order of its elements to pair order, or back.
template <class Element, bool kBack, class D>
void reorder_pairs(D /*d*/, std::int32_t count, float* row) {
  if constexpr (kSplitsPairs<Element>) {
    constexpr auto kLanes = static_cast<std::int32_t>(hn::MaxLanes(D()));
    for (std::int32_t c = 0; c + 2 * kLanes <= count; c += 2 * kLanes) {
      float from[2 * kLanes];
      std::copy_n(row + c, 2 * kLanes, from);
      for (std::int32_t i = 0; i < kLanes; ++i) {
        for (std::int32_t odd = 0; odd < 2; ++odd) {
          if constexpr (kBack) {
            row[c + 2 * i + odd] = from[odd * kLanes + i];
          } else {
            row[c + odd * kLanes + i] = from[2 * i + odd];
          }
        }
      }
    }
  }
}

/// What becomes of values that a narrow type cannot hold.
enum class Overflow { kInfinity, kSaturate };

/// Rounds to nearest even into codes in 32-bit lanes; NaN stays NaN. fp8 always saturates.
template <class Element, Overflow kOverflow, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> encode(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, value);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFU));
  const auto is_nan = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7F800000)));
  const auto one = hn::Set(du, 1U);
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const auto odd = hn::And(hn::ShiftRight<16>(bits), one);
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFU)), odd));
    return hn::IfThenElse(is_nan, hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40U)), rounded);
  } else {
    constexpr int kDropped = 23 - Element::kMantissa;
    constexpr std::uint32_t kMagnitude = (1U << (Element::kBits - 1)) - 1U;
    constexpr bool kE4M3 = std::is_same_v<Element, E4M3>;
    constexpr std::uint32_t kInfinity = kMagnitude + 1U - (1U << Element::kMantissa);
    constexpr std::uint32_t kLargest = kE4M3                                                     ? kMagnitude - 1U
                                       : Element::kBits == 8 || kOverflow == Overflow::kSaturate ? kInfinity - 1U
                                                                                                 : kInfinity;
    constexpr std::uint32_t kNan =
        kE4M3 || Element::kBits == 8 ? kMagnitude : kInfinity | 1U << (Element::kMantissa - 1);
    constexpr std::uint32_t kLeastNormal = std::uint32_t{128 - Element::kBias} << 23;
    // Adding a float whose last bit weighs as much as the smallest subnormal rounds to a whole number of those.
    constexpr std::uint32_t kShifter = std::uint32_t{127 + 24 - Element::kBias - Element::kMantissa} << 23;

    const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), one);
    const auto sum = hn::Add(hn::Add(magnitude, hn::Set(du, (1U << (kDropped - 1)) - 1U)), odd);
    const auto normal =
        hn::Sub(hn::ShiftRight<kDropped>(sum), hn::Set(du, std::uint32_t{127 - Element::kBias} << Element::kMantissa));
    const auto shifter = hn::Set(du, kShifter);
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, shifter))), shifter);
    const auto is_subnormal =
        hn::RebindMask(du, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<std::int32_t>(kLeastNormal))));
    const auto code = hn::BitCast(di, hn::IfThenElse(is_subnormal, subnormal, normal));
    const auto capped = hn::BitCast(du, hn::Min(code, hn::Set(di, static_cast<std::int32_t>(kLargest))));
    const auto sign = hn::ShiftRight<32 - Element::kBits>(hn::Xor(bits, magnitude));
    return hn::IfThenElse(is_nan, hn::Set(du, kNan), hn::Or(capped, sign));
  }
}

template <class Element, Overflow kOverflow = Overflow::kInfinity, class D>
HWY_INLINE void store(D d, hn::Vec<D> value, typename Element::Raw* to) {
  if constexpr (std::is_same_v<Element, Float32>) {
    hn::StoreU(value, d, to);
  } else {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<typename Element::Raw, D> dn;
    hn::StoreU(hn::DemoteTo(dn, hn::BitCast(di, encode<Element, kOverflow>(d, value))), dn, to);
  }
}

/// 2^x = scale * (1 + rest), for -126 <= x <= 0; `rest` is as exact as 2^x - 1 where x is near 0.
template <class V>
struct PowerOfTwo {
  V scale;
  V rest;
};

template <class D>
HWY_INLINE PowerOfTwo<hn::Vec<D>> exp2_parts(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du;
  // In x + shifter the last bit weighs 1, so the low bits are round(x) + 127: an exponent field once shifted up.
  const auto shifter = hn::Set(d, 12582912.0F + 127.0F);
  const auto shifted = hn::Add(x, shifter);
  const auto fraction = hn::Sub(x, hn::Sub(shifted, shifter));
  auto power = hn::Set(d, 1.338130212e-03F);
  power = hn::MulAdd(power, fraction, hn::Set(d, 9.666368365e-03F));
  power = hn::MulAdd(power, fraction, hn::Set(d, 5.550381169e-02F));
  power = hn::MulAdd(power, fraction, hn::Set(d, 2.402234972e-01F));
  power = hn::MulAdd(power, fraction, hn::Set(d, 6.931471825e-01F));
  return {hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted))), hn::Mul(power, fraction)};
}

/// 2^x for x <= 0. Results below the smallest normal number are 0; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> exp2_nonpositive(D d, hn::Vec<D> x) {
  const auto power = exp2_parts(d, x);
  const auto result = hn::MulAdd(power.rest, power.scale, power.scale);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0F)), result);
}

/// Off by less than 1e-6 of the result, tiny ones too.
template <class D>
HWY_INLINE hn::Vec<D> tanh(D d, hn::Vec<D> x) {
  const auto least = hn::Set(d, -126.0F);
  const auto exponent = hn::Mul(hn::Abs(x), hn::Set(d, -2.885390082F));
  const auto power = exp2_parts(d, hn::IfThenElse(hn::Lt(exponent, least), least, exponent));  // NaN passes
  // (1 - e) / (1 + e) for e = 2^exponent.
  const auto difference = hn::NegMulAdd(power.rest, power.scale, hn::Sub(hn::Set(d, 1.0F), power.scale));
  return hn::CopySign(hn::Div(difference, hn::Sub(hn::Set(d, 2.0F), difference)), x);
}

/// cap * tanh(logit / cap), in base 2.
template <class D>
HWY_INLINE hn::Vec<D> soft_cap(D d, hn::Vec<D> logit, float cap) {
  const auto limit = hn::Set(d, cap);
  // A product of the constants, or 1 / cap, may leave the range of floats.
  return hn::Mul(hn::Mul(tanh(d, hn::Div(logit, limit)), limit), hn::Set(d, 1.442695041F));
}

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

/// `count` elements times `scale` as floats; `count` is a multiple of 8.
template <class Element, class D>
HWY_INLINE void widen_row(D d, const typename Element::Raw* from, std::int32_t count, float scale, float* to) {
  const auto factor = hn::Set(d, scale);
  for (std::int32_t c = 0; c < count; c += static_cast<std::int32_t>(hn::Lanes(d))) {
    hn::StoreU(hn::Mul(load<Element>(d, from + c), factor), d, to + c);
  }
}

template <class Element, class D>
HWY_INLINE void narrow_row(D d, const float* from, std::int32_t count, float scale, typename Element::Raw* to) {
  const auto factor = hn::Set(d, scale);
  for (std::int32_t c = 0; c < count; c += static_cast<std::int32_t>(hn::Lanes(d))) {
    store<Element>(d, hn::Mul(hn::LoadU(d, from + c), factor), to + c);
  }
}

}  // namespace fiw::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
