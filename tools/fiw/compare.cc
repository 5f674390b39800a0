// Comparison with the reference.
#include "compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fiw::cli {

Tolerance output_tolerance(DType dtype, int device) noexcept {
  const bool tensor_cores = device != kCpuDevice;
  switch (dtype) {
    case DType::kBFloat16:
      return tensor_cores ? Tolerance{6e-3, 0x3p-8} : Tolerance{1e-3, 0x1p-8};
    case DType::kFloat16:
      return tensor_cores ? Tolerance{2e-3, 0x3p-10} : Tolerance{1e-3, 0x1p-10};
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
