// Launching a kernel ahead of the end of the one before it in its stream, so that the time of a launch passes while
// that one still works: programmatic dependent launch, on sm_90 and newer. Elsewhere everything happens in turn.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace fiw::cuda {

/// First in a kernel that is launched ahead: waits until all that the kernel before it wrote can be read.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline bool device_launches_ahead() {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

/// Of a kernel that begins with await_previous_kernel().
template <class... Parameters, class... Arguments>
cudaError_t launch_ahead(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute ahead{};
  ahead.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  ahead.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &ahead;
  config.numAttrs = device_launches_ahead() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fiw::cuda
