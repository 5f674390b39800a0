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
  if (spec.custom_mask || spec.alibi || spec.params.window_left >= 0 || spec.params.logits_soft_cap > 0) return false;
  if (request.total_kv == 0 || request.total_kv > std::numeric_limits<std::int32_t>::max()) return false;
  // FA3 was seen to give empty rows where a causal request has more queries than keys.
  if (spec.params.causal && request.surplus_queries) return false;
  if (find_hopper(spec, false) == nullptr) return false;
  // The copy widens fp8 exactly; other types would be rounded.
  if (spec.kv_dtype != spec.q_dtype && !(request.paged && is_fp8(spec.kv_dtype))) return false;
  return !request.paged || gather_bytes(spec, request.total_kv) <= std::min(request.scratch_limit, kMostGathered);
}

// FA3 neither packs the heads of a group into a tile nor cuts keys: it needs long queries, and enough of them to fill
// the device. Then it is nearly twice as fast, and the copy of the pages costs little beside the work it saves.
bool hopper_pays(const RouteRequest& request, const DeviceProps& device) noexcept {
  constexpr std::int64_t kTileTokens = 128;
  const std::int64_t works = request.total_rows / kTileTokens * request.spec.params.num_qo_heads;
  return 2 * request.total_rows >= 3 * kTileTokens * request.batch && 4 * works >= 3 * device.num_workers;
}

}  // namespace

RouteChoice route_from_environment() {
  const char* const value = std::getenv("FIW_CUDA_ROUTE");
  const std::string_view name(value == nullptr ? "" : value);
  if (name.empty()) return RouteChoice::kTable;
  if (name == "core") return RouteChoice::kCore;
  if (name == "tile") return RouteChoice::kTile;
  if (name == "hopper") return RouteChoice::kHopper;
  if (name == "any") return RouteChoice::kAny;
  fail(Reason::kOptions, "FIW_CUDA_ROUTE is \"{}\", expected \"core\", \"tile\", \"hopper\" or \"any\"", name);
}

KernelFamily choose_family(const RouteRequest& request, const DeviceProps& device, RouteChoice choice) {
  if (choice == RouteChoice::kAny) return KernelFamily::kTensorTile;
  refuse_unbuilt(request.spec);
  if (choice == RouteChoice::kTile) return KernelFamily::kTensorTile;
  if (hopper_serves(request, device) && (choice == RouteChoice::kHopper || hopper_pays(request, device))) {
    return KernelFamily::kHopper;
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

const HopperKernel* find_hopper(const StepSpec& spec, bool same_schedule_for_all_heads) noexcept {
  for (const HopperEntry& entry : hopper_entries()) {
    if (entry.q != spec.q_dtype || entry.head_dim_qk != spec.params.head_dim_qk ||
        entry.head_dim_vo != spec.params.head_dim_vo) {
      continue;
    }
    for (const HopperKernel& kernel : entry.kernels()) {
      if (kernel.causal == spec.params.causal && kernel.same_schedule_for_all_heads == same_schedule_for_all_heads) {
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
