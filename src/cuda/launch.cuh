// Launches whose status is their own, and not that of an earlier call whose error nobody read. A kernel may be launched
// ahead of the end of the one before it in its stream, so that the time of a launch passes while that one still works:
// programmatic dependent launch, on sm_90 and newer. Elsewhere everything happens in turn.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace fiw::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

/// First in a kernel that is launched ahead: waits until all that the kernel before it wrote can be read.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Of a kernel that begins with await_previous_kernel(). `ahead`: it was compiled for devices that can.
template <class... Parameters, class... Arguments>
cudaError_t launch_ahead(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                         cudaStream_t stream, bool ahead, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = ahead ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fiw::cuda
