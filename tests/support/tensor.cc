#include "support/tensor.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/numeric.h"

namespace fiw::test {

TestTensor::TestTensor(int device, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                       Spacing spacing)
    : device_(device),
      dtype_(dtype),
      rows_(rows),
      heads_(heads),
      dim_(dim),
      offset_(spacing == Spacing::kStrided ? 1 : 0),
      row_stride_(spacing == Spacing::kStrided ? heads * (dim + 3) + 5 : heads * dim),
      head_stride_(spacing == Spacing::kStrided ? dim + 3 : dim),
      bytes_(device, static_cast<std::size_t>(offset_ + rows * row_stride_) * size_of(dtype)) {
  poison();
}

void TestTensor::fill_normal(Rng& rng, float deviation) {
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t h = 0; h < heads_; ++h) {
      for (std::int64_t d = 0; d < dim_; ++d) set(r, h, d, deviation * rng.normal());
    }
  }
  upload();
}

void TestTensor::fill(float value) {
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t h = 0; h < heads_; ++h) {
      for (std::int64_t d = 0; d < dim_; ++d) set(r, h, d, value);
    }
  }
  upload();
}

void TestTensor::poison() {
  fill_nan(bytes_.host().data(), dtype_, static_cast<std::int64_t>(bytes_.host().size() / size_of(dtype_)));
  upload();
}

float TestTensor::at(std::int64_t row, std::int64_t head, std::int64_t d) const {
  return load_float(bytes_.host().data(), dtype_, index(row, head, d));
}

void TestTensor::set(std::int64_t row, std::int64_t head, std::int64_t d, float value) {
  store_float(bytes_.host().data(), dtype_, index(row, head, d), value);
}

ConstTensor TestTensor::host() const {
  return {bytes_.host().data() + static_cast<std::size_t>(offset_) * size_of(dtype_),
          dtype_,
          rows_,
          heads_,
          dim_,
          row_stride_,
          head_stride_};
}

Tensor TestTensor::device() const {
  return {bytes_.device() + static_cast<std::size_t>(offset_) * size_of(dtype_),
          dtype_,
          rows_,
          heads_,
          dim_,
          row_stride_,
          head_stride_,
          device_};
}

testing::AssertionResult TestTensor::gaps_untouched() const {
  std::vector<bool> inside(bytes_.host().size() / size_of(dtype_), false);
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t h = 0; h < heads_; ++h) {
      for (std::int64_t d = 0; d < dim_; ++d) inside[static_cast<std::size_t>(index(r, h, d))] = true;
    }
  }
  for (std::size_t i = 0; i < inside.size(); ++i) {
    const float value = load_float(bytes_.host().data(), dtype_, static_cast<std::int64_t>(i));
    if (!inside[i] && !std::isnan(value)) {
      return testing::AssertionFailure() << "element " << i
                                         << " of the buffer, in a gap between rows or heads, was overwritten with "
                                         << value;
    }
  }
  return testing::AssertionSuccess();
}

bool TestTensor::all_nan() const {
  const auto elements = static_cast<std::int64_t>(bytes_.host().size() / size_of(dtype_));
  for (std::int64_t i = 0; i < elements; ++i) {
    if (!std::isnan(load_float(bytes_.host().data(), dtype_, i))) return false;
  }
  return true;
}

void fill_nan(void* data, DType dtype, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) store_float(data, dtype, i, std::numeric_limits<float>::quiet_NaN());
}

bool Tolerance::admits(double expected, double actual) const {
  if (!std::isfinite(expected) || !std::isfinite(actual)) return expected == actual;
  return std::abs(expected - actual) <= absolute + relative * std::abs(expected);
}

Tolerance Tolerance::of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {3e-5, 3e-5};
    case DType::kFloat16:
      return {5e-4, 1.0 / 1024};
    default:
      return {2e-3, 1.0 / 256};
  }
}

Tolerance Tolerance::of_lse(DType dtype) { return {dtype == DType::kFloat32 ? 1e-4 : 1e-3, 1e-6}; }

}  // namespace fiw::test
