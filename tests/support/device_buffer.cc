#include "support/device_buffer.h"

#ifdef FIW_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cstring>
#include <new>
#include <stdexcept>

namespace fiw::test {
namespace {

constexpr std::align_val_t kAlignment{64};

#ifdef FIW_HAS_CUDA
void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

std::byte* allocate(int device, std::size_t bytes) {
  if (device == kCpuDevice) return static_cast<std::byte*>(::operator new(bytes, kAlignment));
  void* memory = nullptr;
  check(cudaSetDevice(device));
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
  return static_cast<std::byte*>(memory);
}

void release(int device, std::byte* memory) {
  if (device == kCpuDevice) return ::operator delete(memory, kAlignment);
  cudaFree(memory);
}

void copy_bytes(int device, void* to, const void* from, std::size_t bytes) {
  if (device == kCpuDevice) {
    std::memcpy(to, from, bytes);
  } else {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    // A copy to the device may be on its way yet, and streams that do not block would not wait for it.
    check(cudaStreamSynchronize(cudaStreamLegacy));
  }
}
#else
std::byte* allocate(int device, std::size_t bytes) {
  if (device != kCpuDevice) throw std::invalid_argument("this build has no device memory");
  return static_cast<std::byte*>(::operator new(bytes, kAlignment));
}

void release(int /*device*/, std::byte* memory) { ::operator delete(memory, kAlignment); }

void copy_bytes(int /*device*/, void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
#endif

}  // namespace

int device_count() {
  int count = 0;
#ifdef FIW_HAS_CUDA
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
#endif
  return count;
}

void synchronize([[maybe_unused]] int device) {
#ifdef FIW_HAS_CUDA
  if (device == kCpuDevice) return;
  check(cudaSetDevice(device));
  check(cudaDeviceSynchronize());
#endif
}

DeviceBuffer::DeviceBuffer(int device, std::size_t bytes)
    : device_(device), bytes_(bytes), memory_(allocate(device, bytes), Free{device}) {}

void DeviceBuffer::Free::operator()(std::byte* memory) const { release(device, memory); }

void DeviceBuffer::write(std::span<const std::byte> host) {
  if (host.size() != bytes_) throw std::invalid_argument("the host copy differs in size");
  if (bytes_ > 0) copy_bytes(device_, memory_.get(), host.data(), bytes_);
}

void DeviceBuffer::read(std::span<std::byte> host) const {
  if (host.size() != bytes_) throw std::invalid_argument("the host copy differs in size");
  if (bytes_ > 0) copy_bytes(device_, host.data(), memory_.get(), bytes_);
}

}  // namespace fiw::test
