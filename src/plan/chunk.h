// How long the KV chunks of a batch should be.
#pragma once

#include <cstdint>

#include "plan/chunk_search.h"
#include "plan/tiling.h"

namespace fiw {

/// The grid of a kernel family on a device.
struct Grid : GridSize {
  Grid(KernelFamily family, const DeviceProps& device, const WorkLoad& work) noexcept;
};

/// Pages a chunk, by choose_chunk of chunk_search.h.
std::int32_t choose_chunk(const Tiling& tiling, const Tiling::Totals& totals, const Grid& grid) noexcept;

}  // namespace fiw
