// What this machine can do at most, measured, so that kernel speeds can be read as fractions of it.
#pragma once

#include <cstdint>
#include <memory>

namespace fiw {

/// Measures pass by pass, so that passes can alternate with what is compared to them: the speed of a shared machine
/// changes from second to second. Not safe for use by several threads at once.
class LimitMeter {
 public:
  /// Holds 256 MiB, more than caches do, read by `threads` threads together.
  explicit LimitMeter(std::int32_t threads);

  /// Bytes a second read in one pass over that memory.
  double read_bandwidth();
  /// Float32 operations a second (a fused multiply-add counts as two) on independent sums, in one pass.
  double fma_peak();

 private:
  struct Free {
    void operator()(float* memory) const noexcept;
  };

  std::int32_t threads_;
  std::unique_ptr<float, Free> memory_;
};

}  // namespace fiw
