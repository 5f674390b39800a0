#include "support/stream.h"

#include <stdexcept>

#ifdef FIW_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fiw::test {

#ifdef FIW_HAS_CUDA
TestStream::TestStream(int device) {
  if (device == kCpuDevice) return;
  cudaStream_t stream = nullptr;
  if (cudaSetDevice(device) != cudaSuccess ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    throw std::runtime_error("no stream");
  }
  stream_ = stream;
}

TestStream::~TestStream() {
  if (stream_ != nullptr) cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}
#else
TestStream::TestStream(int device) {
  if (device != kCpuDevice) throw std::invalid_argument("this build has no streams");
}

TestStream::~TestStream() = default;
#endif

}  // namespace fiw::test
