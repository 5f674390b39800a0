// The CPU backend: memory from the heap or the caller's allocator, work units over OpenMP threads, SIMD kernels.
#pragma once

#include "core/backend.h"

namespace fiw {

class CpuBackend final : public Backend {
 public:
  /// `num_threads` 0: as many as OpenMP would use now.
  CpuBackend(std::int32_t num_threads, const Allocator& allocator);

  const DeviceProps& props() const noexcept override { return props_; }
  KernelFamily route(const RouteRequest& request) const override;
  std::size_t scratch_bytes(const ScheduleShape& shape, const StepSpec& spec) const override;

  std::byte* allocate(std::size_t bytes, Stream stream) override;
  void release(std::byte* memory, std::size_t bytes, Stream stream) noexcept override;
  std::span<std::byte> stage(std::byte* device_slice, std::size_t bytes) override { return {device_slice, bytes}; }
  void upload(std::byte* /*device_slice*/, std::span<const std::byte> /*staged*/, Stream /*stream*/) override {}
  void fetch(std::span<const HostCopy> arrays, Stream stream) override;

  void attend(const AttentionLaunch& launch) override;
  void append(const AppendLaunch& launch) override;
  void merge(const MergeLaunch& launch) override;

 private:
  DeviceProps props_;
  Allocator allocator_;
};

}  // namespace fiw
