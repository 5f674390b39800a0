// Scalar conversions between float and the narrow element types: the one definition of rounding and saturation that the
// reference, the kernels' tails and the tests agree on. Rounding is to nearest even; NaN stays NaN.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "fiw/types.h"

namespace fiw {
namespace detail {

/// Rounds |value| to `kMantissa` fraction bits with exponent bias `kBias`; codes past `max_code` become `max_code`, so
/// passing the code of infinity gives IEEE overflow and passing the largest finite code saturates. `value` is not NaN.
template <int kMantissa, int kBias>
constexpr std::uint32_t encode_magnitude(float value, std::uint32_t max_code) noexcept {
  constexpr int kDropped = 23 - kMantissa;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  // Below the smallest normal exponent the significand is shifted further right and its leading one becomes explicit.
  const bool normal = exponent >= 1 - kBias;
  const int shift = normal ? kDropped : kDropped + 1 - kBias - exponent;
  if (shift > 25) return 0;  // below half of the smallest subnormal
  const std::uint32_t significand = normal ? bits : (bits & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t rounded = (significand + (1U << (shift - 1)) - 1U + ((significand >> shift) & 1U)) >> shift;
  const std::uint32_t rebias = normal ? static_cast<std::uint32_t>(127 - kBias) << kMantissa : 0U;
  return std::min(rounded - rebias, max_code);
}

/// The value of a finite code without its sign.
template <int kMantissa, int kBias>
constexpr float decode_magnitude(std::uint32_t code) noexcept {
  const std::uint32_t fraction = code & ((1U << kMantissa) - 1U);
  if (code >> kMantissa == 0U) {
    constexpr float kUnit = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissa) << 23);
    return static_cast<float>(fraction) * kUnit;
  }
  return std::bit_cast<float>((code << (23 - kMantissa)) + (static_cast<std::uint32_t>(127 - kBias) << 23));
}

constexpr std::uint32_t sign_bit(float value) noexcept { return std::bit_cast<std::uint32_t>(value) >> 31; }
constexpr float with_sign(float magnitude, bool negative) noexcept { return negative ? -magnitude : magnitude; }
constexpr bool is_nan(float value) noexcept {
  return (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) > 0x7F800000U;
}
inline constexpr float kNan = std::bit_cast<float>(0x7FC00000U);
inline constexpr float kInfinity = std::bit_cast<float>(0x7F800000U);

template <class Code>
Code load_code(const void* base, std::int64_t index) noexcept {
  Code code;
  std::memcpy(&code, static_cast<const Code*>(base) + index, sizeof(Code));
  return code;
}

template <class Code>
void store_code(void* base, std::int64_t index, Code code) noexcept {
  std::memcpy(static_cast<Code*>(base) + index, &code, sizeof(Code));
}

}  // namespace detail

constexpr float bf16_to_float(std::uint16_t code) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

constexpr std::uint16_t float_to_bf16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (detail::is_nan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

constexpr float fp16_to_float(std::uint16_t code) noexcept {
  const std::uint32_t magnitude = code & 0x7FFFU;
  const bool negative = (code & 0x8000U) != 0U;
  if (magnitude > 0x7C00U) return detail::kNan;
  return detail::with_sign(magnitude == 0x7C00U ? detail::kInfinity : detail::decode_magnitude<10, 15>(magnitude),
                           negative);
}

/// IEEE: what is too large becomes infinity.
constexpr std::uint16_t float_to_fp16(float value) noexcept {
  if (detail::is_nan(value)) return 0x7E00U;
  return static_cast<std::uint16_t>(detail::encode_magnitude<10, 15>(value, 0x7C00U) | detail::sign_bit(value) << 15);
}

/// What is too large, infinity too, becomes +-65504.
constexpr std::uint16_t float_to_fp16_saturated(float value) noexcept {
  if (detail::is_nan(value)) return 0x7E00U;
  return static_cast<std::uint16_t>(detail::encode_magnitude<10, 15>(value, 0x7BFFU) | detail::sign_bit(value) << 15);
}

constexpr float e4m3_to_float(std::uint8_t code) noexcept {
  const std::uint32_t magnitude = code & 0x7FU;
  if (magnitude == 0x7FU) return detail::kNan;
  return detail::with_sign(detail::decode_magnitude<3, 7>(magnitude), (code & 0x80U) != 0U);
}

/// What is too large, infinity too, becomes +-448.
constexpr std::uint8_t float_to_e4m3(float value) noexcept {
  if (detail::is_nan(value)) return 0x7FU;
  return static_cast<std::uint8_t>(detail::encode_magnitude<3, 7>(value, 0x7EU) | detail::sign_bit(value) << 7);
}

constexpr float e5m2_to_float(std::uint8_t code) noexcept {
  const std::uint32_t magnitude = code & 0x7FU;
  const bool negative = (code & 0x80U) != 0U;
  if (magnitude > 0x7CU) return detail::kNan;
  return detail::with_sign(magnitude == 0x7CU ? detail::kInfinity : detail::decode_magnitude<2, 15>(magnitude),
                           negative);
}

/// What is too large, infinity too, becomes +-57344.
constexpr std::uint8_t float_to_e5m2(float value) noexcept {
  if (detail::is_nan(value)) return 0x7FU;
  return static_cast<std::uint8_t>(detail::encode_magnitude<2, 15>(value, 0x7BU) | detail::sign_bit(value) << 7);
}

/// Element `index` of an array of `dtype`.
inline float load_float(const void* base, DType dtype, std::int64_t index) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return detail::load_code<float>(base, index);
    case DType::kFloat16:
      return fp16_to_float(detail::load_code<std::uint16_t>(base, index));
    case DType::kBFloat16:
      return bf16_to_float(detail::load_code<std::uint16_t>(base, index));
    case DType::kFloat8E4M3:
      return e4m3_to_float(detail::load_code<std::uint8_t>(base, index));
    case DType::kFloat8E5M2:
      return e5m2_to_float(detail::load_code<std::uint8_t>(base, index));
  }
  return detail::kNan;
}

/// Rounds `value` into element `index`; fp16 and bf16 overflow to infinity, fp8 saturates.
inline void store_float(void* base, DType dtype, std::int64_t index, float value) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return detail::store_code(base, index, value);
    case DType::kFloat16:
      return detail::store_code(base, index, float_to_fp16(value));
    case DType::kBFloat16:
      return detail::store_code(base, index, float_to_bf16(value));
    case DType::kFloat8E4M3:
      return detail::store_code(base, index, float_to_e4m3(value));
    case DType::kFloat8E5M2:
      return detail::store_code(base, index, float_to_e5m2(value));
  }
}

/// As store_float, but fp16 saturates too: how tokens are written into a KV cache.
inline void store_saturated(void* base, DType dtype, std::int64_t index, float value) noexcept {
  if (dtype == DType::kFloat16) return detail::store_code(base, index, float_to_fp16_saturated(value));
  store_float(base, dtype, index, value);
}

}  // namespace fiw
