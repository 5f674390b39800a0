// See device.h.
#include "cuda/device.h"

#include "core/fail.h"

namespace fiw::cuda {
namespace {

// After these the context is lost: every later call of the process returns the same.
bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const char* const hint =
      status == cudaErrorNoKernelImageForDevice ? "; -DFIW_CUDA_ARCHITECTURES builds for other devices" : "";
  const std::string message = fmt::format("{} failed: {} ({}, {}){}", call, cudaGetErrorString(status),
                                          cudaGetErrorName(status), static_cast<int>(status), hint);
  if (!is_sticky(status)) cudaGetLastError();  // or the next launch check would report it again
  const Status kind = status == cudaErrorMemoryAllocation ? Status::kOutOfMemory
                      : is_sticky(status)                 ? Status::kFailed
                                                          : Status::kBackend;
  const Reason reason = status == cudaErrorMemoryAllocation ? Reason::kAllocation : Reason::kCudaCall;
  throw Error(kind, reason, message).backend(static_cast<std::int32_t>(status));
}

DeviceGuard::DeviceGuard(int device) noexcept {
  if (cudaGetDevice(&previous_) != cudaSuccess || previous_ == device) return;
  switched_ = cudaSetDevice(device) == cudaSuccess;
}

DeviceGuard::~DeviceGuard() {
  if (switched_) cudaSetDevice(previous_);
}

RelaxedCapture::RelaxedCapture(bool captured) noexcept : captured_(captured) {
  if (captured_) cudaThreadExchangeStreamCaptureMode(&mode_);
}

RelaxedCapture::~RelaxedCapture() {
  if (captured_) cudaThreadExchangeStreamCaptureMode(&mode_);
}

void require_device(int device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw Error(Status::kNoDevice, Reason::kDeviceMissing,
                fmt::format("device_index is {}, no CUDA device is present: {} ({})", device,
                            cudaGetErrorString(status), cudaGetErrorName(status)))
        .backend(static_cast<std::int32_t>(status));
  }
  if (device >= count) {
    throw Error(
        Status::kNoDevice, Reason::kDeviceMissing,
        fmt::format("device_index is {}, this machine has {} CUDA device{}", device, count, count == 1 ? "" : "s"));
  }
}

}  // namespace fiw::cuda
