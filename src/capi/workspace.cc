// Workspaces in C: creating, closing, invalidating, sizes and statistics.
#include "fiw/workspace.h"

#include <memory>

#include "capi/convert.h"

namespace {

namespace capi = fiw::capi;
using fiw::FlashInferWorkspace;
using fiw::Reason;

fiw::WorkspaceOptions to_options(const fiw_workspace_options& given) {
  fiw::WorkspaceOptions options;
  options.workspace_bytes = given.workspace_bytes;
  options.fixed_size = given.fixed_size != 0;
  if (given.limits != nullptr) options.limits = capi::limits("options.limits", given.limits);
  options.num_threads = given.num_threads;
  options.cache_entries = given.cache_entries;
  options.plan = capi::plan_options("options.plan", given.plan);
  if (given.verify_cuda_graph < -1 || given.verify_cuda_graph > 1) {
    fiw::fail(Reason::kOptions, "options.verify_cuda_graph is {}, expected -1, 0 or 1", given.verify_cuda_graph);
  }
  if (given.verify_cuda_graph >= 0) options.verify_cuda_graph = given.verify_cuda_graph == 1;
  if (given.cuda_route < FIW_CUDA_ROUTE_UNSET || given.cuda_route > FIW_CUDA_ROUTE_PREFILL) {
    fiw::fail(Reason::kOptions, "options.cuda_route is {}, expected {}..{}", given.cuda_route,
              static_cast<int>(FIW_CUDA_ROUTE_UNSET), static_cast<int>(FIW_CUDA_ROUTE_PREFILL));
  }
  if (given.cuda_route != FIW_CUDA_ROUTE_UNSET) options.cuda_route = static_cast<fiw::CudaRoute>(given.cuda_route);
  if (given.reserved != 0) fiw::fail(Reason::kOptions, "options.reserved is {}, expected 0", given.reserved);
  if (given.allocator != nullptr) {
    const fiw_allocator& allocator = capi::require_struct(given.allocator, "options.allocator");
    if (allocator.allocate == nullptr || allocator.free == nullptr) {
      fiw::fail(Reason::kOptions, "options.allocator.{} is null, expected a function",
                allocator.allocate == nullptr ? "allocate" : "free");
    }
    options.allocator = {.allocate = allocator.allocate, .free = allocator.free, .context = allocator.context};
  }
  return options;
}

fiw_workspace* create(int32_t device_index, const fiw::WorkspaceOptions& options) {
  std::unique_ptr<FlashInferWorkspace> workspace = FlashInferWorkspace::create(device_index, options);
  if (workspace == nullptr) {
    throw fiw::Error(fiw::Status::kUnavailable, Reason::kBackendNotBuilt,
                     fmt::format("device_index is {}, and this build has no CUDA backend", device_index));
  }
  return reinterpret_cast<fiw_workspace*>(workspace.release());
}

/// Null and closed workspaces have nothing to invalidate.
fiw_status invalidate(fiw_workspace* ws, void (FlashInferWorkspace::*scope)(), fiw_error* err) {
  return capi::guard(err, [&] {
    if (ws != nullptr) (capi::any_workspace(ws).*scope)();
  });
}

void write(const fiw::DeviceProps& props, fiw_device_props* out) {
  capi::require_struct(out, "props") = {.struct_size = sizeof(fiw_device_props),
                                        .kind = static_cast<int32_t>(props.kind),
                                        .num_workers = props.num_workers,
                                        .compute_capability = props.compute_capability,
                                        .max_shared_bytes = props.max_shared_bytes,
                                        .decode_blocks_per_sm = props.decode_blocks_per_sm,
                                        .tile_blocks_per_sm = props.tile_blocks_per_sm};
}

fiw::DeviceKind to_kind(int32_t kind) {
  if (kind == FIW_DEVICE_CPU) return fiw::DeviceKind::kCpu;
  if (kind == FIW_DEVICE_CUDA) return fiw::DeviceKind::kCuda;
  fiw::fail(Reason::kOptions, "device.kind is {}, expected FIW_DEVICE_CPU (0) or FIW_DEVICE_CUDA (1)", kind);
}

fiw::DeviceProps to_props(const fiw_device_props* device) {
  const fiw_device_props& given = capi::require_struct(device, "device");
  return {.kind = to_kind(given.kind),
          .num_workers = given.num_workers,
          .compute_capability = given.compute_capability,
          .max_shared_bytes = given.max_shared_bytes,
          .decode_blocks_per_sm = given.decode_blocks_per_sm,
          .tile_blocks_per_sm = given.tile_blocks_per_sm};
}

fiw_cache_stats to_c(const fiw::CacheStats& stats) {
  return {.hits = stats.hits,
          .misses = stats.misses,
          .evictions = stats.evictions,
          .invalidations = stats.invalidations,
          .entries = stats.entries,
          .bytes = stats.bytes};
}

static_assert(static_cast<int>(fiw::DeviceKind::kCpu) == FIW_DEVICE_CPU);
static_assert(static_cast<int>(fiw::DeviceKind::kCuda) == FIW_DEVICE_CUDA);

}  // namespace

int32_t fiw_compiled_with(int32_t kind) {
  if (kind == FIW_DEVICE_CPU) return FlashInferWorkspace::compiled_with(fiw::DeviceKind::kCpu) ? 1 : 0;
  if (kind == FIW_DEVICE_CUDA) return FlashInferWorkspace::compiled_with(fiw::DeviceKind::kCuda) ? 1 : 0;
  return 0;
}

fiw_status fiw_workspace_create(int32_t device_index, size_t workspace_bytes, fiw_workspace** out, fiw_error* err) {
  return capi::hand_out(out, err, [&] {
    fiw::WorkspaceOptions options;
    options.workspace_bytes = workspace_bytes;
    return create(device_index, options);
  });
}

fiw_status fiw_workspace_create_with_options(int32_t device_index, const fiw_workspace_options* options,
                                             fiw_workspace** out, fiw_error* err) {
  return capi::hand_out(out, err, [&] {
    return create(device_index,
                  options == nullptr ? fiw::WorkspaceOptions{} : to_options(capi::require_struct(options, "options")));
  });
}

void fiw_workspace_close(fiw_workspace* ws) {
  if (ws != nullptr) capi::any_workspace(ws).close();
}

void fiw_workspace_free(fiw_workspace* ws) {
  if (ws != nullptr) delete &capi::any_workspace(ws);
}

int32_t fiw_workspace_closed(const fiw_workspace* ws) {
  return ws == nullptr || capi::any_workspace(ws).closed() ? 1 : 0;
}

fiw_status fiw_workspace_invalidate_runtime_cache(fiw_workspace* ws, fiw_error* err) {
  return invalidate(ws, &FlashInferWorkspace::invalidate_runtime_cache, err);
}

fiw_status fiw_workspace_invalidate_prefill_runtime_cache(fiw_workspace* ws, fiw_error* err) {
  return invalidate(ws, &FlashInferWorkspace::invalidate_prefill_runtime_cache, err);
}

fiw_status fiw_workspace_invalidate_verify_runtime_cache(fiw_workspace* ws, fiw_error* err) {
  return invalidate(ws, &FlashInferWorkspace::invalidate_verify_runtime_cache, err);
}

fiw_status fiw_workspace_device_index(const fiw_workspace* ws, int32_t* device_index, fiw_error* err) {
  return capi::guard(err, [&] {
    const FlashInferWorkspace& workspace = capi::any_workspace(ws);
    capi::require(device_index, "device_index") = workspace.device_index();
  });
}

int32_t fiw_workspace_verify_cuda_graph(const fiw_workspace* ws) {
  return ws != nullptr && capi::any_workspace(ws).verify_cuda_graph() ? 1 : 0;
}

fiw_status fiw_device_props_cpu(int32_t threads, fiw_device_props* props, fiw_error* err) {
  return capi::guard(err, [&] {
    if (threads < 1) fiw::fail(Reason::kOptions, "threads is {}, expected at least 1", threads);
    write(fiw::DeviceProps::cpu(threads), props);
  });
}

fiw_status fiw_device_props_h200(fiw_device_props* props, fiw_error* err) {
  return capi::guard(err, [&] { write(fiw::DeviceProps::h200(), props); });
}

fiw_status fiw_workspace_device_props(const fiw_workspace* ws, fiw_device_props* props, fiw_error* err) {
  return capi::guard(err, [&] { write(capi::any_workspace(ws).device_props(), props); });
}

fiw_status fiw_required_workspace(const fiw_device_props* device, const fiw_workspace_limits* limits,
                                  const fiw_plan_options* options, size_t* bytes, fiw_error* err) {
  return capi::guard(err, [&] {
    size_t& result = capi::require(bytes, "bytes");
    result = FlashInferWorkspace::required_workspace(to_props(device), capi::limits("limits", limits),
                                                     capi::plan_options("options", options));
  });
}

fiw_status fiw_workspace_get_stats(const fiw_workspace* ws, fiw_workspace_stats* stats, fiw_error* err) {
  return capi::guard(err, [&] {
    const fiw::WorkspaceStats now = capi::any_workspace(ws).stats();
    fiw_workspace_stats& out = capi::require_struct(stats, "stats");
    out.decode = to_c(now.decode);
    out.prefill = to_c(now.prefill);
    out.verify = to_c(now.verify);
    out.float_scratch_bytes = now.float_scratch_bytes;
    out.float_scratch_peak = now.float_scratch_peak;
    out.int_scratch_bytes = now.int_scratch_bytes;
    out.plan_nanoseconds = now.plan_nanoseconds;
    out.run_nanoseconds = now.run_nanoseconds;
    out.tables_known = now.tables_known;
    out.tables_copied = now.tables_copied;
  });
}
