// The least that a call can take which has to read K and V once: a kernel that asks for them in large pieces, as many
// at a time as shared memory holds, and looks at nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fiw::bench {

/// Reads `bytes`, a multiple of 16, from each of two addresses that are multiples of 16. Launched ahead of the end of
/// the kernel before it, as the kernels of the library are. For sm_90 and newer.
cudaError_t launch_read_kernel(const void* k, const void* v, std::size_t bytes, cudaStream_t stream);

}  // namespace fiw::bench
