// See routes.h.
#include "cuda/routes.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "core/fail.h"
#include "core/work.h"

namespace fiw::cuda {
namespace {

const TileEntry* find_entry(const StepSpec& spec, TileVariant variant) noexcept {
  const auto entries = tile_entries();
  const auto found = std::ranges::find_if(entries, [&](const TileEntry& entry) {
    return entry.q == spec.q_dtype && entry.kv == spec.kv_dtype && entry.head_dim_qk == spec.params.head_dim_qk &&
           entry.head_dim_vo == spec.params.head_dim_vo && entry.variant == variant;
  });
  return found == entries.end() ? nullptr : &*found;
}

bool has_options(const StepSpec& spec) noexcept {
  return spec.params.logits_soft_cap > 0 || spec.params.window_left >= 0 || spec.sinks || spec.alibi;
}

/// A combination that another build has FlashInfer's kernels for is refused here, not served slowly.
void refuse_unbuilt(const StepSpec& spec) {
  if (tile_is_built(spec)) return;
  const Combination wanted{spec.q_dtype, spec.kv_dtype, spec.params.head_dim_qk, spec.params.head_dim_vo};
  const auto full = full_combinations();
  if (std::ranges::find(full, wanted) == full.end()) return;
  unsupported(Reason::kKernelNotBuilt,
              "this build has no CUDA kernel for {} queries, {} KV, head_dim {}/{}; -DFIW_CUDA_KERNELS=full builds it",
              to_string(wanted.q), to_string(wanted.kv), wanted.head_dim_qk, wanted.head_dim_vo);
}

// The CUDA cores take exactly one query row a request, which a batch-invariant prefill cannot promise of its batch.
bool core_serves(const RouteRequest& request) noexcept {
  return request.paged && request.max_qo_len == 1 && request.total_rows == request.batch && !request.any_qo_len &&
         !request.spec.custom_mask && find_core(request.spec, has_options(request.spec)) != nullptr;
}

bool hopper_serves(const RouteRequest& request, const DeviceProps& device) noexcept {
  const StepSpec& spec = request.spec;
  if (device.compute_capability != 90 || request.graph || request.any_qo_len) return false;
  if (spec.custom_mask || spec.alibi) return false;
  if (request.total_kv == 0 || request.total_kv > std::numeric_limits<std::int32_t>::max()) return false;
  // FA3 was seen to give empty rows where a causal request has more queries than keys.
  return !(spec.params.causal && request.surplus_queries);
}

bool contiguous_serves(const RouteRequest& request) noexcept {
  const StepSpec& spec = request.spec;
  if (find_hopper(spec, false) == nullptr) return false;
  // The copy widens fp8 exactly; other types would be rounded.
  if (spec.kv_dtype != spec.q_dtype && !(request.paged && is_fp8(spec.kv_dtype))) return false;
  return !request.paged || gather_bytes(spec, request.total_kv) <= std::min(request.scratch_limit, kMostGathered);
}

// A cache whose strides the paged kernel cannot take is seen only when it is run, and then copied after all.
bool pages_serve(const RouteRequest& request) noexcept {
  const StepSpec& spec = request.spec;
  return request.paged && spec.kv_dtype == spec.q_dtype && find_hopper(spec, true) != nullptr &&
         find_hopper(spec, false) != nullptr;
}

// FA3 neither packs the heads of a group into a tile nor cuts keys: it needs long queries, and enough of them to fill
// the device. Then it is nearly twice as fast as tiles.
bool hopper_pays(const RouteRequest& request, const DeviceProps& device) noexcept {
  constexpr std::int64_t kTileTokens = 128;
  const std::int64_t works = request.total_rows / kTileTokens * request.spec.params.num_qo_heads;
  return 2 * request.total_rows >= 3 * kTileTokens * request.batch && 4 * works >= 3 * device.num_workers;
}

// Measured on an H200, head_dim 128: 629 TFLOP/s over contiguous K and V, 475 over pages; a copy moves 4 TB/s, in and
// out. So a copied byte must save about 1000 operations of the slower kernel.
bool copy_pays(const RouteRequest& request) noexcept {
  constexpr double kOperationsPerByte = 1000;
  const AttentionParams& params = request.spec.params;
  const auto rows = static_cast<double>(request.total_rows);
  double seen = static_cast<double>(request.total_kv) / request.batch;  // keys of a row
  if (params.causal) seen -= rows / request.batch / 2;
  if (params.window_left >= 0) seen = std::min<double>(seen, params.window_left);
  const double operations = 2.0 * (params.head_dim_qk + params.head_dim_vo) * params.num_qo_heads * rows * seen;
  return operations >= kOperationsPerByte * static_cast<double>(gather_bytes(request.spec, request.total_kv));
}

}  // namespace

RouteChoice route_from_environment() {
  const char* const value = std::getenv("FIW_CUDA_ROUTE");
  const std::string_view name(value == nullptr ? "" : value);
  if (name.empty()) return RouteChoice::kTable;
  if (name == "core") return RouteChoice::kCore;
  if (name == "tile") return RouteChoice::kTile;
  if (name == "hopper") return RouteChoice::kHopper;
  if (name == "hopper_paged") return RouteChoice::kHopperPaged;
  if (name == "any") return RouteChoice::kAny;
  fail(Reason::kOptions,
       "FIW_CUDA_ROUTE is \"{}\", expected \"core\", \"tile\", \"hopper\", \"hopper_paged\" or \"any\"", name);
}

KernelFamily choose_family(const RouteRequest& request, const DeviceProps& device, RouteChoice choice) {
  if (choice == RouteChoice::kAny) return KernelFamily::kTensorTile;
  refuse_unbuilt(request.spec);
  if (choice == RouteChoice::kTile) return KernelFamily::kTensorTile;
  const bool hopper = choice == RouteChoice::kHopper || choice == RouteChoice::kHopperPaged;
  if (hopper_serves(request, device) && (hopper || hopper_pays(request, device))) {
    const bool contiguous = choice != RouteChoice::kHopperPaged && contiguous_serves(request);
    const bool pages = choice != RouteChoice::kHopper && pages_serve(request);
    if (pages && !(contiguous && copy_pays(request))) return KernelFamily::kHopperPaged;
    if (contiguous) return KernelFamily::kHopper;
  }
  if (!core_serves(request)) return KernelFamily::kTensorTile;
  // Measured on an H200, batch 64, 4096 tokens: with 32/32 heads both read 4.3 TB/s; with 32/8 heads the tiles read 4.1
  // and the CUDA cores 2.8.
  const AttentionParams& params = request.spec.params;
  const bool ungrouped = params.num_qo_heads == params.num_kv_heads;
  return ungrouped || choice == RouteChoice::kCore ? KernelFamily::kCudaCore : KernelFamily::kTensorTile;
}

TileVariant choose_variant(const TileNeeds& needs) noexcept {
  // The causal kernels leave unmasked what lies before position 0, and the plain one knows no options.
  if (needs.custom_mask || needs.rows_before_start || (needs.options && !needs.causal)) return TileVariant::kMasked;
  if (needs.options) return TileVariant::kCausalOptions;
  return needs.causal && !needs.one_row ? TileVariant::kCausal : TileVariant::kPlain;
}

bool tile_is_built(const StepSpec& spec) noexcept { return find_entry(spec, TileVariant::kMasked) != nullptr; }

const TileKernel* find_tile(const StepSpec& spec, TileVariant variant, std::int32_t rows, bool paged) noexcept {
  const TileEntry* const entry = find_entry(spec, variant);
  if (entry == nullptr) return nullptr;
  const auto kernels = entry->kernels();
  const auto found = std::ranges::find_if(
      kernels, [&](const TileKernel& kernel) { return kernel.rows == rows && kernel.paged == paged; });
  return found == kernels.end() ? nullptr : &*found;
}

const HopperKernel* find_hopper(const StepSpec& spec, bool paged) noexcept {
  const AttentionParams& params = spec.params;
  const bool soft_cap = params.logits_soft_cap > 0;
  const bool window = soft_cap || params.window_left >= 0;
  for (const HopperEntry& entry : hopper_entries()) {
    if (entry.q != spec.q_dtype || entry.head_dim_qk != params.head_dim_qk || entry.head_dim_vo != params.head_dim_vo) {
      continue;
    }
    for (const HopperKernel& kernel : entry.kernels()) {
      if (kernel.paged == paged && kernel.causal == params.causal && kernel.window == window &&
          kernel.soft_cap == soft_cap) {
        return &kernel;
      }
    }
  }
  return nullptr;
}

const CoreKernel* find_core(const StepSpec& spec, bool options) noexcept {
  if (spec.params.head_dim_qk != spec.params.head_dim_vo) return nullptr;
  const std::int32_t group = spec.params.num_qo_heads / spec.params.num_kv_heads;
  for (const CoreEntry& entry : core_entries()) {
    if (entry.q != spec.q_dtype || entry.kv != spec.kv_dtype || entry.head_dim != spec.params.head_dim_qk) continue;
    for (const CoreKernel& kernel : entry.kernels()) {
      if (kernel.group_size == group && kernel.options == options) return &kernel;
    }
  }
  return nullptr;
}

}  // namespace fiw::cuda
