// Comparison with the reference.
#include "compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fiw::cli {

Tolerance output_tolerance(DType dtype, int device) noexcept {
  const double roundings = device == kCpuDevice ? 1.0 : 3.0;
  switch (dtype) {
    case DType::kBFloat16:
      return {roundings * 1e-3, roundings * 0x1p-8};
    case DType::kFloat16:
      return {roundings * 1e-3, roundings * 0x1p-10};
    default:
      return {1e-4, 1e-4};
  }
}

bool ErrorGauge::add(double result, double expected) noexcept {
  ++compared_;
  double error = std::fabs(result - expected);
  if (result == expected) error = 0.0;  // equal infinities
  if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
  largest_ = std::max(largest_, error);
  const bool ok = error == 0.0 ||
                  (std::isfinite(error) && error <= tolerance_.absolute + tolerance_.relative * std::fabs(expected));
  if (!ok) ++failures_;
  return ok;
}

}  // namespace fiw::cli
