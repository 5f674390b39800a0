// The one integer mixer behind everything pseudo-random here, so that results follow from seeds alone.
#pragma once

#include <cstdint>

namespace fiw::cli {

/// A bijection of 64-bit integers whose output bits each depend on every input bit.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

/// Folds several numbers into one, order mattering.
template <class... Rest>
constexpr std::uint64_t mix(std::uint64_t first, std::uint64_t second, Rest... rest) noexcept {
  return mix(mix(first) ^ second, static_cast<std::uint64_t>(rest)...);
}

/// The upper bits of a mixed number as a double in [0, 1).
constexpr double unit_interval(std::uint64_t x) noexcept { return static_cast<double>(x >> 11) * 0x1p-53; }

}  // namespace fiw::cli
