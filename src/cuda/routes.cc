// See routes.h.
#include "cuda/routes.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "core/fail.h"

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

bool core_serves(const RouteRequest& request) noexcept {
  return request.paged && request.max_qo_len == 1 && !request.spec.custom_mask &&
         find_core(request.spec, has_options(request.spec)) != nullptr;
}

}  // namespace

RouteChoice route_from_environment() {
  const char* const value = std::getenv("FIW_CUDA_ROUTE");
  const std::string_view name(value == nullptr ? "" : value);
  if (name.empty()) return RouteChoice::kTable;
  if (name == "core") return RouteChoice::kCore;
  if (name == "tile") return RouteChoice::kTile;
  if (name == "any") return RouteChoice::kAny;
  fail(Reason::kOptions, "FIW_CUDA_ROUTE is \"{}\", expected \"core\", \"tile\" or \"any\"", name);
}

KernelFamily choose_family(const RouteRequest& request, RouteChoice choice) {
  if (choice == RouteChoice::kAny) return KernelFamily::kTensorTile;
  refuse_unbuilt(request.spec);
  if (choice == RouteChoice::kTile || !core_serves(request)) return KernelFamily::kTensorTile;
  // Measured on an H200, batch 64, 4096 tokens: with 32/32 heads the CUDA cores read 4.39 TB/s, with 32/8 heads the
  // tiles read 4.23 TB/s and the CUDA cores 2.76.
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
