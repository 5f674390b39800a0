// Planning on the device: the head of a captured step whose page table lives in device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "core/graph_backend.h"

namespace fiw::cuda {

/// Most kinds of layers, and most requests, of such a step.
inline constexpr std::size_t kMostParts = 8;
inline constexpr std::int32_t kMostRequests = 1024;

/// Enqueues what ReplanLaunch describes.
cudaError_t replan(const ReplanLaunch& launch, cudaStream_t stream);

}  // namespace fiw::cuda
