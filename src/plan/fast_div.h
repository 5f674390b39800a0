// Exact division of 32-bit numbers by a divisor that stays the same over a loop: a multiplication and a shift.
#pragma once

#include <cstdint>

namespace fiw {

/// Unsigned division by `divisor` (>= 1), exact for every 32-bit dividend (Lemire, Kaser, Kurz 2019).
class FastDiv {
 public:
  explicit constexpr FastDiv(std::uint32_t divisor) noexcept
      : divisor_(divisor), reciprocal_(divisor == 1 ? 0 : UINT64_MAX / divisor + 1) {}

  constexpr std::uint32_t divisor() const noexcept { return divisor_; }
  constexpr std::uint32_t floor(std::uint32_t n) const noexcept {
    if (divisor_ == 1) return n;
    return static_cast<std::uint32_t>((static_cast<Wide>(reciprocal_) * n) >> 64);
  }
  /// Needs n + divisor - 1 to fit 32 bits.
  constexpr std::uint32_t ceil(std::uint32_t n) const noexcept { return floor(n + divisor_ - 1); }

 private:
  __extension__ using Wide = unsigned __int128;
  std::uint32_t divisor_;
  std::uint64_t reciprocal_;
};

/// Rounded up; for non-negative n.
template <class T>
constexpr T ceil_div(T n, T divisor) noexcept {
  return n / divisor + (n % divisor != 0 ? 1 : 0);
}

}  // namespace fiw
