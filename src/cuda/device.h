// CUDA calls that cannot fail silently, and the caller's current device left as it was found.
#pragma once

#include <cuda_runtime_api.h>

#include "fiw/device_props.h"

namespace fiw::cuda {

/// Throws fiw::Error with the call and CUDA's own text and code: kOutOfMemory, kFailed for faults that stay, else
/// kBackend.
void check(cudaError_t status, const char* call);

/// Makes `device` current for its scope. Never throws: a device that cannot be made current fails the next checked
/// call.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) noexcept;
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  int previous_ = -1;
  bool switched_ = false;
};

/// Within its scope, this thread may do what a capture of the caller's forbids but does not record: a kernel's first
/// launch loads it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(bool captured) noexcept;
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const bool captured_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Throws kNoDevice unless `device` exists.
void require_device(int device);

}  // namespace fiw::cuda
