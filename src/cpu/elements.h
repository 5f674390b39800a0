// Element types as C++ types, so that kernels are templates over them, and the one switch from DType to type.
#pragma once

#include <cstdint>

#include "fiw/types.h"

namespace fiw::cpu {

/// How a narrow float of `kBits` bits is laid out below its sign.
template <class RawType, int kMantissaBits, int kExponentBias>
struct Format {
  using Raw = RawType;
  static constexpr int kBits = 8 * sizeof(Raw);
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = kExponentBias;
};
struct Float32 {
  using Raw = float;
};
struct BFloat16 {
  using Raw = std::uint16_t;
};
struct Float16 : Format<std::uint16_t, 10, 15> {};
struct E4M3 : Format<std::uint8_t, 3, 7> {};
struct E5M2 : Format<std::uint8_t, 2, 15> {};

/// Calls `use(Element{})` with the type of a query or output and returns what it returns.
template <class Use>
auto with_wide_element(DType dtype, const Use& use) {
  if (dtype == DType::kFloat16) return use(Float16{});
  if (dtype == DType::kBFloat16) return use(BFloat16{});
  return use(Float32{});
}

/// As above with the type of a KV cache.
template <class Use>
auto with_element(DType dtype, const Use& use) {
  if (dtype == DType::kFloat8E4M3) return use(E4M3{});
  if (dtype == DType::kFloat8E5M2) return use(E5M2{});
  return with_wide_element(dtype, use);
}

}  // namespace fiw::cpu
