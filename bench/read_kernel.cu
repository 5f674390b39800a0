// See read_kernel.h.
#include <cstdint>

#include "cuda/launch.cuh"
#include "read_kernel.h"

namespace fiw::bench {
namespace {

// Fastest on an H200 at nearly all sizes, beside pieces of 4 and 8 KB, one block a multiprocessor, and plain loads.
constexpr int kPieceBytes = 16 << 10;
constexpr int kStages = 6;
constexpr int kBlocksPerSm = 2;

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// By one thread a block, which takes every gridDim.x-th piece.
__global__ void __launch_bounds__(32) read_kernel(const std::byte* k, const std::byte* v, std::size_t bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ alignas(8) std::uint64_t arrived[kStages];
  if (threadIdx.x > 0) return;
  for (std::uint64_t& barrier : arrived) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cuda::await_previous_kernel();

  const std::size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;  // of K, and as many of V
  std::size_t next = blockIdx.x;
  const auto request = [&](int stage) {
    const std::size_t at = (next < pieces ? next : next - pieces) * kPieceBytes;
    const auto size = static_cast<std::uint32_t>(bytes - at < kPieceBytes ? bytes - at : kPieceBytes);
    const std::uint32_t barrier = shared_address(&arrived[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(ring) + stage * kPieceBytes),
                 "l"((next < pieces ? k : v) + at), "r"(size), "r"(barrier)
                 : "memory");
    next += gridDim.x;
  };
  int under_way = 0;
  for (; under_way < kStages && next < 2 * pieces; ++under_way) request(under_way);
  int stage = 0;
  for (std::uint32_t phase = 0; under_way > 0;) {
    std::uint32_t done = 0;
    while (done == 0) {
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(shared_address(&arrived[stage])), "r"(phase)
                   : "memory");
    }
    if (next < 2 * pieces) {
      request(stage);
    } else {
      --under_way;
    }
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
#endif
}

}  // namespace

cudaError_t launch_read_kernel(const void* k, const void* v, std::size_t bytes, cudaStream_t stream) {
  constexpr std::size_t kSharedBytes = std::size_t{kStages} * kPieceBytes;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(&read_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (status != cudaSuccess) return status;
  return cuda::launch_ahead(&read_kernel, static_cast<unsigned>(kBlocksPerSm * multiprocessors), 32, kSharedBytes,
                            stream, true, static_cast<const std::byte*>(k), static_cast<const std::byte*>(v), bytes);
}

}  // namespace fiw::bench
