// The least that a node of a graph can be.
#pragma once

#include <cuda_runtime_api.h>

namespace fiw::bench {

cudaError_t launch_empty_kernel(cudaStream_t stream);

}  // namespace fiw::bench
