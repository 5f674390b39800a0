// What the programs that measure the CUDA backend share: memory, a stream that is held back, and the device's clock.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <stdexcept>
#include <vector>

#include "fiw/types.h"

namespace fiw::bench {

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(status)));
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) { check(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Host memory that copies read while the host goes on.
class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes) { check(cudaMallocHost(&data_, bytes), "cudaMallocHost"); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() { cudaFreeHost(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }
  void synchronize() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Random values of magnitude 1/8 to 1, made for 4 MB and repeated.
inline void fill(std::byte* memory, std::size_t bytes, DType dtype, std::uint32_t seed) {
  std::vector<std::byte> block(std::min<std::size_t>(bytes, 4U << 20));
  std::mt19937 engine(seed);
  for (std::size_t at = 0; at + 1 < block.size(); at += size_of(dtype)) {
    const auto bits = static_cast<std::uint32_t>(engine());
    const std::uint32_t sign = bits & 1;
    const std::uint32_t exponent = (bits >> 1) % 3;
    if (dtype == DType::kFloat8E4M3) {
      block[at] = static_cast<std::byte>(sign << 7 | (4 + exponent) << 3 | (bits >> 8 & 7));
    } else {
      const std::uint32_t value = sign << 15 | (124 + exponent) << 7 | (bits >> 8 & 127);
      block[at] = static_cast<std::byte>(value & 255);
      block[at + 1] = static_cast<std::byte>(value >> 8);
    }
  }
  check(cudaMemcpy(memory, block.data(), block.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  for (std::size_t done = block.size(); done < bytes; done *= 2) {
    check(cudaMemcpy(memory + done, memory, std::min(done, bytes - done), cudaMemcpyDeviceToDevice), "cudaMemcpy");
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// Holds a stream back, so that what is enqueued meanwhile runs without waiting for the host.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    check(cudaLaunchHostFunc(
              stream, [](void* open) { static_cast<std::atomic<bool>*>(open)->wait(false); }, &open_),
          "cudaLaunchHostFunc");
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }
  void open() {
    open_ = true;
    open_.notify_all();
  }

 private:
  std::atomic<bool> open_{false};
};

/// Milliseconds on the device.
class Clock {
 public:
  Clock() {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  ~Clock() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Of what is enqueued in between.
  void begin(cudaStream_t stream) { check(cudaEventRecord(begin_, stream), "cudaEventRecord"); }
  void end(cudaStream_t stream) { check(cudaEventRecord(end_, stream), "cudaEventRecord"); }
  /// Waits for that.
  double elapsed() {
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return milliseconds;
  }
  /// Of what `work` enqueues, which starts only when all of it is there.
  double time(cudaStream_t stream, const std::function<void()>& work) {
    Gate gate(stream);
    begin(stream);
    work();
    end(stream);
    gate.open();
    return elapsed();
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace fiw::bench
