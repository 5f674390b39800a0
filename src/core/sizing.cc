// How much float scratch suffices for any call within limits, so that an engine sizes once at start.
#include <algorithm>

#include "core/support.h"
#include "core/work.h"
#include "fiw/workspace.h"

namespace fiw {
namespace {

/// The worst of one kind of call.
class Sizing {
 public:
  Sizing(const DeviceProps& device, const WorkspaceLimits& limits, const PlanOptions& options)
      : device_(device),
        limits_(limits),
        options_(options),
        cpu_(device.kind == DeviceKind::kCpu ? make_cpu_backend(device.num_workers, {}) : nullptr) {}

  /// `uniform_qo_len` 0: rows are spread over the requests in any way.
  std::size_t worst(const StepSpec& spec, std::int32_t page_size, std::int32_t uniform_qo_len, std::int64_t max_rows,
                    bool graph) const {
    const WorkLoad widest = work_load({.spec = spec, .page_size = page_size, .uniform_qo_len = uniform_qo_len}, {}, {});
    const auto max_pages = static_cast<std::int32_t>((std::int64_t{limits_.max_kv_len} + page_size - 1) / page_size);
    const auto bytes = [&](KernelFamily family) {
      const ScheduleShape shape = worst_shape(family, device_, widest, limits_.max_batch, max_pages, max_rows,
                                              split_policy(options_, graph && cpu_ == nullptr));
      return cpu_ != nullptr ? cpu_->scratch_bytes(shape, spec)
                             : partial_bytes(shape, spec.params.num_qo_heads, spec.params.head_dim_vo);
    };
    if (cpu_ == nullptr) {
      const bool core = uniform_qo_len == 1 && spec.params.num_qo_heads == spec.params.num_kv_heads;
      const bool stream = std::max(uniform_qo_len, 1) * widest.group_size() <= kCudaStreamRows;
      return std::max({bytes(KernelFamily::kTensorTile), core ? bytes(KernelFamily::kCudaCore) : 0,
                       stream ? bytes(KernelFamily::kCudaStream) : 0});
    }
    // Ragged queries take one family or the other, by the longest of them.
    const bool ragged = uniform_qo_len == 0;
    const std::int32_t longest = ragged ? static_cast<std::int32_t>(max_rows) : uniform_qo_len;
    std::size_t most = 0;
    for (const std::int32_t qo_len : {ragged ? 1 : uniform_qo_len, longest}) {
      most = std::max(most, bytes(cpu_->route({.spec = spec,
                                               .page_size = page_size,
                                               .max_qo_len = qo_len,
                                               .total_rows = max_rows,
                                               .batch = limits_.max_batch,
                                               .any_qo_len = options_.batch_invariant && ragged})));
    }
    return most;
  }

  /// The copy of K and V that a prefill over pages may be read from, and partial results beside it.
  std::size_t worst_gathered(const StepSpec& spec) const {
    if (cpu_ != nullptr || device_.compute_capability != 90 || options_.batch_invariant) return 0;
    const std::size_t token = gather_bytes(spec, 1);
    const auto tokens = static_cast<std::size_t>(limits_.max_batch) * static_cast<std::size_t>(limits_.max_kv_len);
    return std::min(tokens, kMostGathered / token) * token + worst_parts(spec);
  }

  /// As above, with and without a custom mask, which turns the causal limit off: under a window more keys are then
  /// seen.
  std::size_t worst_masked(const StepSpec& spec, std::int32_t page_size, std::int32_t uniform_qo_len,
                           std::int64_t max_rows, bool graph) const {
    StepSpec masked = spec;
    masked.params.causal = false;
    return std::max(worst(spec, page_size, uniform_qo_len, max_rows, graph),
                    worst(masked, page_size, uniform_qo_len, max_rows, graph));
  }

 private:
  /// The partial results of our prefill kernel.
  std::size_t worst_parts(const StepSpec& spec) const {
    if (spec.params.head_dim_qk != spec.params.head_dim_vo) return 0;
    constexpr std::int32_t kMostTileRows = 192;
    const auto slots = static_cast<std::size_t>(prefill_slots(device_));
    return slots * prefill_slot_bytes(kMostTileRows, spec.params.head_dim_vo);
  }

  const DeviceProps& device_;
  const WorkspaceLimits& limits_;
  const PlanOptions& options_;
  std::unique_ptr<Backend> cpu_;  ///< null for a CUDA device, whose kernels take the partial outputs alone
};

}  // namespace

std::size_t FlashInferWorkspace::required_workspace(const DeviceProps& device, const WorkspaceLimits& limits,
                                                    const PlanOptions& options) {
  support::check_device(device);
  support::check_limits(limits);
  support::check_plan_options(options);
  if (limits.max_batch == 0) return 0;
  const StepSpec spec = support::resolve(StepSpec{.params = limits.params, .kv_dtype = limits.kv_dtype});
  const Sizing sizing(device, limits, options);

  std::size_t bytes = sizing.worst(spec, limits.page_size, 1, limits.max_batch, limits.graph);
  if (limits.max_total_qo > 0) {
    bytes = std::max(bytes, sizing.worst_masked(spec, limits.page_size, 0, limits.max_total_qo, false));
    // Ragged K/V are planned as pages of one token, whose least chunk may be shorter.
    bytes = std::max(bytes, sizing.worst_masked(spec, 1, 0, limits.max_total_qo, false));
    bytes = std::max(bytes, sizing.worst_gathered(spec));
  }
  // A shorter window may take another kernel, which needs more.
  for (std::int32_t window = 1; window <= limits.max_verify_window; ++window) {
    const std::int64_t rows = std::int64_t{window} * limits.max_batch;
    bytes = std::max(bytes, sizing.worst_masked(spec, limits.page_size, window, rows, limits.graph));
  }
  return bytes;
}

}  // namespace fiw
