// Every fp8 value as bfloat16, whole and by the bytes that make it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/elements.h"

namespace fiw::cpu {

/// The bfloat16 of an fp8 code without its sign.
template <class Element>
constexpr std::uint32_t bfloat16_of(std::uint32_t magnitude) {
  constexpr int kMantissa = Element::kMantissa;
  constexpr std::uint32_t kOne = 1U << kMantissa;
  const std::uint32_t exponent = magnitude >> kMantissa;
  std::uint32_t mantissa = magnitude & (kOne - 1);
  if (std::is_same_v<Element, E4M3> && magnitude == 0x7F) return 0x7FC0;
  if (std::is_same_v<Element, E5M2> && exponent == 31) return 0x7F80 | mantissa << (7 - kMantissa);
  std::uint32_t biased = exponent + 127 - Element::kBias;
  if (exponent == 0) {  // subnormal: bfloat16 has a normal number for it
    if (mantissa == 0) return 0;
    for (++biased; (mantissa & kOne) == 0; mantissa <<= 1) --biased;
    mantissa &= kOne - 1;
  }
  return biased << 7 | mantissa << (7 - kMantissa);
}

/// The code's inner bits are its mantissa and the last bit of its exponent, the outer ones those above. The difference
/// between the exponents' biases is even, so the inner bits, moved, are the low byte, and the outer bits alone decide
/// about the high byte; except in the first group, where subnormals are, and the last, where NaN is.
template <class Element>
struct Fp8Tables {
  static constexpr int kInnerBits = Element::kMantissa + 1;
  static constexpr std::uint8_t kInnerMask = (1U << kInnerBits) - 1U;
  static constexpr std::uint8_t kLastOuter = 0x7FU >> kInnerBits;
  static_assert((127 - Element::kBias) % 2 == 0);

  std::uint8_t high[16] = {};        ///< by outer bits
  std::uint8_t first_high[16] = {};  ///< by inner bits, where the outer ones are 0
  std::uint8_t first_low[16] = {};
  std::uint8_t last_high[16] = {};  ///< by inner bits, where the outer ones are all set
  std::uint16_t all[256] = {};      ///< by code

  constexpr Fp8Tables() {
    for (std::uint32_t outer = 0; outer <= kLastOuter; ++outer) {
      high[outer] = static_cast<std::uint8_t>(bfloat16_of<Element>(outer << kInnerBits) >> 8);
    }
    for (std::uint32_t inner = 0; inner <= kInnerMask; ++inner) {
      first_high[inner] = static_cast<std::uint8_t>(bfloat16_of<Element>(inner) >> 8);
      first_low[inner] = static_cast<std::uint8_t>(bfloat16_of<Element>(inner));
      last_high[inner] = static_cast<std::uint8_t>(bfloat16_of<Element>(kLastOuter << kInnerBits | inner) >> 8);
    }
    for (std::uint32_t code = 0; code < 256; ++code) {
      all[code] = static_cast<std::uint16_t>(bfloat16_of<Element>(code & 0x7F) | (code & 0x80) << 8);
    }
  }

  static const Fp8Tables kValues;
};

template <class Element>
inline constexpr Fp8Tables<Element> Fp8Tables<Element>::kValues{};

}  // namespace fiw::cpu
