// What this machine can do at most, measured, so that kernel speeds can be read as fractions of it.
#pragma once

#include <cstdint>

namespace fiw {

/// Bytes a second that `threads` threads read together from memory that no cache holds (256 MiB, allocated and freed).
double measure_read_bandwidth(std::int32_t threads);
/// Float32 operations a second (a fused multiply-add counts as two) of `threads` threads on independent sums.
double measure_fma_peak(std::int32_t threads);

}  // namespace fiw
