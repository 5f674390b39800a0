// A device as a value, so that its schedules can be planned, sized and tested on a machine that has none.
#pragma once

#include <cstdint>

namespace fiw {

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

/// What the planners need to know of a device. Measured once when a workspace is created, or made up in a test.
struct DeviceProps {
  DeviceKind kind = DeviceKind::kCpu;
  std::int32_t num_workers = 1;           ///< streaming multiprocessors, or CPU threads
  std::int32_t compute_capability = 0;    ///< 10 * major + minor; 0 on the CPU
  std::int32_t max_shared_bytes = 0;      ///< opt-in shared memory a block
  std::int32_t decode_blocks_per_sm = 4;  ///< resident blocks of the CUDA-core decode kernel
  std::int32_t tile_blocks_per_sm = 2;    ///< resident blocks of the tensor-core tile kernel

  static DeviceProps cpu(std::int32_t threads) noexcept;
  /// An SXM H200's values, for planning without one.
  static DeviceProps h200() noexcept;

  friend bool operator==(const DeviceProps&, const DeviceProps&) = default;
};

}  // namespace fiw
