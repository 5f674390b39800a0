// How far a result may lie from the reference, and how far the worst one did.
#pragma once

#include <cstdint>

#include "fiw/types.h"

namespace fiw::cli {

/// |result - expected| <= absolute + relative * |expected|.
struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;
};

/// For outputs of a type: one rounding to it, and float32 sums of values around 1. A device's tensor cores also round
/// the softmax's weights to a 16-bit type, and so are partial results of split keys: three times as much there.
Tolerance output_tolerance(DType dtype, int device = kCpuDevice) noexcept;
/// For LSE values, always float32.
inline constexpr Tolerance kLseTolerance{1e-3, 0.0};

/// Gathers differences. NaN never passes; infinities must be equal.
class ErrorGauge {
 public:
  explicit ErrorGauge(const Tolerance& tolerance) noexcept : tolerance_(tolerance) {}

  /// False when out of tolerance.
  bool add(double result, double expected) noexcept;

  double largest() const noexcept { return largest_; }  ///< absolute; infinite after a NaN or a wrong infinity
  std::int64_t compared() const noexcept { return compared_; }
  std::int64_t failures() const noexcept { return failures_; }
  const Tolerance& tolerance() const noexcept { return tolerance_; }

 private:
  Tolerance tolerance_;
  double largest_ = 0.0;
  std::int64_t compared_ = 0;
  std::int64_t failures_ = 0;
};

}  // namespace fiw::cli
