// See routes.h.
#include "cuda/routes.h"

#include <algorithm>
#include <cmath>
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

// Requests of few rows, the keys of each read once. Limits, soft cap, sinks and slopes are the kernel's own; a mask is
// not. It was written and measured for what sm_90 has: 2 blocks of its shared memory, and launches ahead.
bool stream_serves(const RouteRequest& request, const DeviceProps& device) noexcept {
  if (!request.paged || request.any_qo_len || request.spec.custom_mask || request.max_qo_len < 1) return false;
  if (request.graph && request.total_rows != std::int64_t{request.max_qo_len} * request.batch) return false;
  const AttentionParams& params = request.spec.params;
  const std::int64_t rows = std::int64_t{request.max_qo_len} * (params.num_qo_heads / params.num_kv_heads);
  const StreamKernel* const kernel = find_stream(request.spec, rows);
  return kernel != nullptr && device.compute_capability >= 90 &&
         static_cast<std::size_t>(device.max_shared_bytes) >= 2 * kernel->shared_bytes;
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

bool prefill_copies(const RouteRequest& request) noexcept {
  return request.paged && (request.page_size % kPrefillPageSlots != 0 || request.spec.kv_dtype != request.spec.q_dtype);
}

bool prefill_serves(const RouteRequest& request, const DeviceProps& device) noexcept {
  constexpr std::int64_t kMostPlaces = std::numeric_limits<std::int32_t>::max();  // of 8 elements, of all tokens
  const StepSpec& spec = request.spec;
  if (device.compute_capability != 90 || request.graph || request.any_qo_len) return false;
  if (spec.custom_mask || spec.alibi) return false;
  if (spec.kv_dtype != spec.q_dtype && !(request.paged && is_fp8(spec.kv_dtype))) return false;
  const std::int64_t places = std::int64_t{spec.params.num_kv_heads} * (spec.params.head_dim_qk / 8);
  if (request.total_kv == 0 || request.total_kv > kMostPlaces / places || find_prefill(spec, 0) == nullptr)
    return false;
  return !prefill_copies(request) ||
         gather_bytes(spec, request.total_kv) <= std::min(request.scratch_limit, kMostGathered);
}

/// Of a prefill call on each route, in operations at the rate of FA3 over contiguous keys.
struct Costs {
  double own = 0;
  double tile = 0;
  double contiguous = 0;
  double pages = 0;
};

Costs estimate(const RouteRequest& request, const DeviceProps& device) noexcept {
  // Measured on an H200 (bench/cuda_routes): 681 TFLOP/s over contiguous keys, 295 on tiles; a copy moves 4.2 TB/s, in
  // and out.
  constexpr double kTileSlowness = 681.0 / 295;
  constexpr double kOwnSlowness = 0.88;  // it packs the heads of a group
  // Pages of 8 slots and more come in boxes nearly as fast as contiguous keys; smaller boxes are too many.
  const double pages_slowness = request.page_size % 8 == 0 ? 1.02 : 2.0;
  constexpr double kOperationsPerCopiedByte = 2 * 681 / 4.2;

  const StepSpec& spec = request.spec;
  const AttentionParams& params = spec.params;
  const std::int64_t tile_tokens = params.head_dim_vo < 128 ? 192 : 128;
  const auto batch = static_cast<double>(request.batch);
  const double rows = static_cast<double>(request.total_rows) / batch;
  double seen = static_cast<double>(request.total_kv) / batch;  // keys of a row
  if (params.causal) seen -= rows / 2;
  if (params.window_left >= 0) seen = std::min(seen, params.window_left + 1.0);
  const double a_row = 2.0 * (params.head_dim_qk + params.head_dim_vo) * seen;

  // FA3 neither packs the heads of a group into a tile nor cuts keys: its works come in rounds, the last one half
  // empty.
  const auto in_tiles = [&](double tile_rows, double rows_a_request, std::int32_t heads) {
    const double works = std::ceil(rows_a_request / tile_rows) * batch * heads;
    return std::ceil(works / device.num_workers) * device.num_workers * tile_rows * a_row;
  };
  const double hopper = in_tiles(static_cast<double>(tile_tokens), rows, params.num_qo_heads);
  // Ours packs them. Measured in graphs of its own: 8192 tokens 813 us against 852 over contiguous keys.
  const double packed = rows * (params.num_qo_heads / params.num_kv_heads);
  // What a part of cut keys takes beside them, in keys; about as the planner reckons.
  constexpr double kPartKeys = 700;
  const auto slots = static_cast<double>(prefill_slots(device));
  const auto in_parts = [&](double tile_rows) {
    const double works = std::ceil(packed / tile_rows) * batch * params.num_kv_heads;
    double least = in_tiles(tile_rows, packed, params.num_kv_heads);
    for (std::int32_t parts = 2; parts <= kMostPrefillParts && works * parts <= slots; ++parts) {
      const double a_part = 2.0 * (params.head_dim_qk + params.head_dim_vo) * (seen / parts + kPartKeys);
      least = std::min(least, std::ceil(works * parts / device.num_workers) * device.num_workers * tile_rows * a_part);
    }
    return least;
  };
  const double own = kOwnSlowness * std::min(in_parts(128), in_parts(192));
  const auto copied = request.paged ? static_cast<double>(gather_bytes(spec, request.total_kv)) : 0.0;
  Costs costs{.own = own + (prefill_copies(request) ? kOperationsPerCopiedByte * copied : 0),
              .tile = kTileSlowness * rows * batch * params.num_qo_heads * a_row,
              .contiguous = hopper + kOperationsPerCopiedByte * copied,
              .pages = pages_slowness * hopper};
  // Of the general kernel nothing is worse. With mostly empty tiles FA3 does not earn the copy that comes first.
  if (!tile_is_built(spec)) {
    costs.tile = std::numeric_limits<double>::infinity();
  } else if (2 * request.total_rows < 3 * tile_tokens * request.batch && !pages_serve(request) &&
             !prefill_serves(request, device)) {
    costs.tile = 0;
  }
  return costs;
}

// A short decode is over before the tensor cores pay for what they cost at its start and end: 18 us against 20 for
// 32/8 heads and one request of 4096 tokens, on an H200. Workspaces of fixed size were sized for tiles.
bool small_decode(const RouteRequest& request) noexcept {
  constexpr std::int64_t kMostTokens = 65536;  // over all KV heads
  const AttentionParams& params = request.spec.params;
  return request.decode_pages > 0 && !request.graph &&
         request.scratch_limit == std::numeric_limits<std::size_t>::max() &&
         params.num_qo_heads <= 4 * params.num_kv_heads &&
         request.decode_pages * request.page_size * params.num_kv_heads <= kMostTokens;
}

}  // namespace

CudaRoute route_from_environment() {
  const char* const value = std::getenv("FIW_CUDA_ROUTE");
  const std::string_view name(value == nullptr ? "" : value);
  if (name.empty()) return CudaRoute::kTable;
  if (name == "core") return CudaRoute::kCore;
  if (name == "tile") return CudaRoute::kTile;
  if (name == "hopper") return CudaRoute::kHopper;
  if (name == "hopper_paged") return CudaRoute::kHopperPaged;
  if (name == "any") return CudaRoute::kAny;
  if (name == "stream") return CudaRoute::kStream;
  if (name == "prefill") return CudaRoute::kPrefill;
  fail(Reason::kOptions,
       "FIW_CUDA_ROUTE is \"{}\", expected \"core\", \"tile\", \"hopper\", \"hopper_paged\", \"any\", \"stream\" or "
       "\"prefill\"",
       name);
}

KernelFamily choose_family(const RouteRequest& request, const DeviceProps& device, CudaRoute choice) {
  constexpr std::int32_t kMostHeads = 65535;  // of a grid's third axis
  if (request.spec.params.num_kv_heads > kMostHeads) {
    unsupported(Reason::kHeadCount, "num_kv_heads is {}, on CUDA up to {} are served", request.spec.params.num_kv_heads,
                kMostHeads);
  }
  if (choice == CudaRoute::kAny) return KernelFamily::kTensorTile;
  refuse_unbuilt(request.spec);
  if (choice == CudaRoute::kTile) return KernelFamily::kTensorTile;
  // Measured on an H200, batch 64, 4096 tokens, ahead of the others everywhere: with 32/8 heads 241 us against 254 on
  // tiles, of fp8 130 against 236, windows of 8 tokens 249 against 281; with 32/32 heads 932 against 952 on the CUDA
  // cores.
  const bool stream = stream_serves(request, device);
  if (stream && (choice == CudaRoute::kTable || choice == CudaRoute::kStream)) return KernelFamily::kCudaStream;
  // Measured on an H200, our kernel was ahead of FA3 on all of 32 shapes: 8192 tokens of 32/8 heads 733 us against 843
  // over contiguous keys and 887 over pages, 16 x 512 93 us against 126, 512 after 32,256 388 us against 434.
  const bool own = prefill_serves(request, device);
  const bool hopper = hopper_serves(request, device);
  const bool contiguous = hopper && contiguous_serves(request);
  const bool pages = hopper && pages_serve(request);
  if (own && choice == CudaRoute::kPrefill) return KernelFamily::kPrefill;
  if (contiguous && choice == CudaRoute::kHopper) return KernelFamily::kHopper;
  if (pages && choice == CudaRoute::kHopperPaged) return KernelFamily::kHopperPaged;
  if (own || contiguous || pages) {
    constexpr double kNever = std::numeric_limits<double>::infinity();
    Costs costs = estimate(request, device);
    if (!own) costs.own = kNever;
    if (!contiguous || choice == CudaRoute::kHopperPaged) costs.contiguous = kNever;
    if (!pages || choice == CudaRoute::kHopper) costs.pages = kNever;
    if (std::min({costs.own, costs.contiguous, costs.pages}) < costs.tile) {
      if (costs.own <= std::min(costs.contiguous, costs.pages)) return KernelFamily::kPrefill;
      return costs.pages < costs.contiguous ? KernelFamily::kHopperPaged : KernelFamily::kHopper;
    }
  }
  const bool core_can = core_serves(request);
  if (core_can && choice == CudaRoute::kCore) return KernelFamily::kCudaCore;
  if (stream) return KernelFamily::kCudaStream;
  if (!core_can) return KernelFamily::kTensorTile;
  // Measured on an H200, batch 64, 4096 tokens: with 32/32 heads both read 4.3 TB/s; with 32/8 heads the tiles read 4.1
  // and the CUDA cores 2.8.
  const AttentionParams& params = request.spec.params;
  const bool core = params.num_qo_heads == params.num_kv_heads || small_decode(request);
  return core ? KernelFamily::kCudaCore : KernelFamily::kTensorTile;
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

const PrefillKernel* find_prefill(const StepSpec& spec, std::int32_t rows) noexcept {
  const AttentionParams& params = spec.params;
  if (params.head_dim_qk != params.head_dim_vo) return nullptr;
  for (const PrefillEntry& entry : prefill_entries()) {
    if (entry.q != spec.q_dtype || entry.head_dim != params.head_dim_qk) continue;
    for (const PrefillKernel& kernel : entry.kernels()) {
      if ((rows == 0 || kernel.rows == rows) && kernel.soft_cap == (params.logits_soft_cap > 0)) return &kernel;
    }
  }
  return nullptr;
}

const StreamKernel* find_stream(const StepSpec& spec, std::int64_t rows) noexcept {
  if (spec.params.head_dim_qk != spec.params.head_dim_vo) return nullptr;
  for (const StreamEntry& entry : stream_entries()) {
    if (entry.q != spec.q_dtype || entry.kv != spec.kv_dtype || entry.head_dim != spec.params.head_dim_qk) continue;
    const auto kernels = entry.kernels();
    const auto found = std::ranges::find_if(kernels, [&](const StreamKernel& kernel) { return kernel.rows >= rows; });
    return found == kernels.end() ? nullptr : &*found;
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
