// Hashing of small integer arrays. A hash only finds the bucket: equality is always decided on the contents.
#pragma once

#include <cstdint>
#include <span>

namespace fiw {

/// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr std::uint64_t combine(std::uint64_t seed, std::uint64_t value) noexcept {
  return mix(seed + 0x9e3779b97f4a7c15ULL + value);
}

constexpr std::uint64_t hash_ints(std::span<const std::int32_t> values, std::uint64_t seed = 0) noexcept {
  std::uint64_t h = combine(seed, values.size());
  for (const std::int32_t value : values)
    h = (h ^ static_cast<std::uint32_t>(value)) * 0x9e3779b97f4a7c15ULL + (h >> 29);
  return mix(h);
}

}  // namespace fiw
