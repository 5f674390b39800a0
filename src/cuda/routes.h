// Which kernel serves a call. One table answers "what runs" and "is it supported".
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "cuda/registry.h"

namespace fiw::cuda {

/// The family whose schedule serves a request; kUnsupported naming the option where only another build would serve it.
KernelFamily choose_family(const RouteRequest& request, const DeviceProps& device, CudaRoute choice);
/// Throws kInvalidArgument for an unknown name.
CudaRoute route_from_environment();

/// Facts of one call that decide the tile kernel's variant.
struct TileNeeds {
  bool causal = false;
  bool one_row = false;  ///< every request has one query row: the causal limit says nothing
  bool options = false;  ///< soft cap, ALiBi, sinks, window, per-head K scales
  bool custom_mask = false;
  bool rows_before_start = false;  ///< see DeviceTable
};
TileVariant choose_variant(const TileNeeds& needs) noexcept;

/// Whether FlashInfer's tile kernels serve these types and head sizes; what they do not, attend_any does.
bool tile_is_built(const StepSpec& spec) noexcept;
/// The kernel, or null when this build has none.
const TileKernel* find_tile(const StepSpec& spec, TileVariant variant, std::int32_t rows, bool paged) noexcept;
const HopperKernel* find_hopper(const StepSpec& spec, bool paged) noexcept;
/// `rows`: of its tiles; 0: any.
const PrefillKernel* find_prefill(const StepSpec& spec, std::int32_t rows) noexcept;
const CoreKernel* find_core(const StepSpec& spec, bool options) noexcept;
/// For requests of up to `rows` packed rows.
const StreamKernel* find_stream(const StepSpec& spec, std::int64_t rows) noexcept;

}  // namespace fiw::cuda
