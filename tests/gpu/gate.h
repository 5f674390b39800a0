// A stream that stands still for as long as a test wants.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>

namespace fiw::test {

/// Holds a stream back until released.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    const cudaError_t status = cudaLaunchHostFunc(
        stream, [](void* open) { static_cast<std::atomic<bool>*>(open)->wait(false); }, &open_);
    EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { release(); }
  void release() {
    open_ = true;
    open_.notify_all();
  }

 private:
  std::atomic<bool> open_{false};
};

}  // namespace fiw::test
