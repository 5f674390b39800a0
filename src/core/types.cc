// Names of the element types, and devices as values.
#include "fiw/types.h"

#include "fiw/device_props.h"

namespace fiw {

std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "unknown dtype";
}

DeviceProps DeviceProps::cpu(std::int32_t threads) noexcept {
  return {.kind = DeviceKind::kCpu, .num_workers = threads};
}

DeviceProps DeviceProps::h200() noexcept {
  return {.kind = DeviceKind::kCuda, .num_workers = 132, .compute_capability = 90, .max_shared_bytes = 232448};
}

}  // namespace fiw
