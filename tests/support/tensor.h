// Tensors for tests: random or poisoned contents, contiguous or strided, with everything between the rows poisoned too.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "fiw/types.h"
#include "support/device_buffer.h"
#include "support/random.h"

namespace fiw::test {

/// kStrided leaves odd gaps between heads and rows and starts off any alignment but the element's own.
enum class Spacing { kContiguous, kStrided };

class TestTensor {
 public:
  /// Poisoned: every element, and every element of the gaps, is NaN.
  TestTensor(int device, DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, Spacing spacing);

  /// Normal values of this deviation, rounded to the dtype, on host and device.
  void fill_normal(Rng& rng, float deviation = 1.0F);
  void poison();
  /// Sets every element, not the gaps, on host and device.
  void fill(float value);
  void upload() { bytes_.upload(); }
  void download() { bytes_.download(); }
  /// The device's copy of this tensor becomes the host copy of `other`, which has the same geometry.
  void read_device_into(TestTensor& other) const { bytes_.read(other.bytes_.host()); }
  /// Of the host copy.
  float at(std::int64_t row, std::int64_t head, std::int64_t d) const;
  void set(std::int64_t row, std::int64_t head, std::int64_t d, float value);

  ConstTensor host() const;
  Tensor device() const;
  /// Whether the gaps of the host copy still hold their poison.
  testing::AssertionResult gaps_untouched() const;
  /// Whether the whole host copy is poison.
  bool all_nan() const;

  DType dtype() const { return dtype_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t heads() const { return heads_; }
  std::int64_t dim() const { return dim_; }

 private:
  std::int64_t index(std::int64_t row, std::int64_t head, std::int64_t d) const {
    return offset_ + row * row_stride_ + head * head_stride_ + d;
  }

  int device_;
  DType dtype_;
  std::int64_t rows_, heads_, dim_;
  std::int64_t offset_, row_stride_, head_stride_;
  Mirror<std::byte> bytes_;
};

/// Fills `count` elements with NaN.
void fill_nan(void* data, DType dtype, std::int64_t count);

/// How far a result may be from the reference. Infinities must match exactly and NaN never passes.
struct Tolerance {
  double absolute = 0.0;
  double relative = 0.0;

  bool admits(double expected, double actual) const;
  Tolerance widened(double factor, double term) const { return {factor * absolute + term, factor * relative}; }
  /// For attention outputs of unit-normal data in this dtype: its rounding plus what fp32 sums leave.
  static Tolerance of(DType dtype);
  /// For the logarithm of the sum of exponentials of queries in this dtype.
  static Tolerance of_lse(DType dtype);
};

}  // namespace fiw::test
