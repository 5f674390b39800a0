// See workspace.h.
#include "workspace.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention.h"
#include "error.h"
#include "fiw/fiw.h"
#include "page_table.h"
#include "tensor.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

struct Step {
  std::shared_ptr<Allocator> allocator;
  std::shared_ptr<fiw_step> handle;
  fiw_step* get() const noexcept { return handle.get(); }
};

/// The step of `workspace` that `plan(fiw_step**, fiw_error*)` makes.
template <class Function>
Step make_step(const Workspace& workspace, Function&& plan) {
  fiw_step* step = nullptr;
  call_unlocked([&](fiw_error* error) { return plan(&step, error); });
  return {.allocator = workspace.allocator, .handle = {step, FreeUnlocked<fiw_step_free>()}};
}

fiw_workspace_limits limits_struct(const nb::object& limits, const fiw_attention_params* params) {
  fiw_workspace_limits result = FIW_WORKSPACE_LIMITS_INIT;
  const auto field = [&](const char* name) { return nb::cast<std::int32_t>(limits.attr(name)); };
  result.params = params;
  result.max_batch = field("max_batch");
  result.max_total_qo = field("max_total_qo");
  result.max_verify_window = field("max_verify_window");
  result.max_kv_len = field("max_kv_len");
  result.page_size = field("page_size");
  result.kv_dtype = element_type(nb::cast<std::string>(limits.attr("kv_dtype")));
  result.graph = nb::cast<bool>(limits.attr("graph")) ? 1 : 0;
  return result;
}

Fields fields(const fiw_cache_stats& stats) {
  Fields result;
  result["hits"] = stats.hits;
  result["misses"] = stats.misses;
  result["evictions"] = stats.evictions;
  result["invalidations"] = stats.invalidations;
  result["entries"] = stats.entries;
  result["bytes"] = stats.bytes;
  return result;
}

Fields fields(const fiw_device_props& props) {
  Fields result;
  result["kind"] = props.kind == FIW_DEVICE_CPU ? "cpu" : "cuda";
  result["num_workers"] = props.num_workers;
  result["compute_capability"] = props.compute_capability;
  result["max_shared_bytes"] = props.max_shared_bytes;
  result["decode_blocks_per_sm"] = props.decode_blocks_per_sm;
  result["tile_blocks_per_sm"] = props.tile_blocks_per_sm;
  return result;
}

/// The props that `fill(fiw_device_props*, fiw_error*)` fills.
template <class Function>
Fields device_props(Function&& fill) {
  fiw_device_props props = FIW_DEVICE_PROPS_INIT;
  call([&](fiw_error* error) { return fill(&props, error); });
  return fields(props);
}

std::optional<Workspace> create(std::int32_t device_index, std::size_t workspace_bytes, bool fixed_size,
                                const nb::object& limits, const fiw_attention_params* limits_params,
                                std::int32_t num_threads, std::int32_t cache_entries, bool batch_invariant,
                                std::int32_t fixed_split_tokens, std::int32_t verify_cuda_graph,
                                std::int32_t cuda_route, const nb::object& allocator) {
  fiw_workspace_options options = FIW_WORKSPACE_OPTIONS_INIT;
  fiw_workspace_limits c_limits = FIW_WORKSPACE_LIMITS_INIT;
  if (!limits.is_none()) {
    c_limits = limits_struct(limits, limits_params);
    options.limits = &c_limits;
  }
  const fiw_plan_options plan = {sizeof(fiw_plan_options), batch_invariant ? 1 : 0, fixed_split_tokens};
  options.plan = &plan;
  options.workspace_bytes = workspace_bytes;
  options.fixed_size = fixed_size ? 1 : 0;
  options.num_threads = num_threads;
  options.cache_entries = cache_entries;
  options.verify_cuda_graph = verify_cuda_graph;
  options.cuda_route = cuda_route;
  std::shared_ptr<Allocator> own;
  fiw_allocator callbacks = FIW_ALLOCATOR_INIT;
  if (!allocator.is_none()) {
    own = std::make_shared<Allocator>(allocator);
    callbacks = own->callbacks();
    options.allocator = &callbacks;
  }
  fiw_workspace* workspace = nullptr;
  bool unavailable = false;
  call_unlocked([&](fiw_error* error) {
    const fiw_status status = fiw_workspace_create_with_options(device_index, &options, &workspace, error);
    unavailable = status == FIW_UNAVAILABLE;
    return unavailable ? FIW_OK : status;
  });
  if (unavailable) return std::nullopt;
  return Workspace{.allocator = std::move(own), .handle = {workspace, FreeUnlocked<fiw_workspace_free>()}};
}

std::size_t required_workspace(const nb::object& device, const nb::object& limits, const fiw_attention_params* params,
                               bool batch_invariant, std::int32_t fixed_split_tokens) {
  const auto field = [&](const char* name) { return nb::cast<std::int32_t>(device.attr(name)); };
  const fiw_device_props props = {
      sizeof(fiw_device_props),
      nb::cast<std::string>(device.attr("kind")) == "cpu" ? FIW_DEVICE_CPU : FIW_DEVICE_CUDA,
      field("num_workers"),
      field("compute_capability"),
      field("max_shared_bytes"),
      field("decode_blocks_per_sm"),
      field("tile_blocks_per_sm")};
  const fiw_workspace_limits c_limits = limits_struct(limits, params);
  const fiw_plan_options plan = {sizeof(fiw_plan_options), batch_invariant ? 1 : 0, fixed_split_tokens};
  std::size_t bytes = 0;
  call([&](fiw_error* error) { return fiw_required_workspace(&props, &c_limits, &plan, &bytes, error); });
  return bytes;
}

Fields stats(const Workspace& workspace) {
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  call([&](fiw_error* error) { return fiw_workspace_get_stats(workspace.get(), &stats, error); });
  Fields result;
  result["decode"] = fields(stats.decode);
  result["prefill"] = fields(stats.prefill);
  result["verify"] = fields(stats.verify);
  result["float_scratch_bytes"] = stats.float_scratch_bytes;
  result["float_scratch_peak"] = stats.float_scratch_peak;
  result["int_scratch_bytes"] = stats.int_scratch_bytes;
  result["plan_nanoseconds"] = stats.plan_nanoseconds;
  result["run_nanoseconds"] = stats.run_nanoseconds;
  result["tables_known"] = stats.tables_known;
  result["tables_copied"] = stats.tables_copied;
  return result;
}

Fields step_info(const Step& step) {
  fiw_plan_info info = FIW_PLAN_INFO_INIT;
  call([&](fiw_error* error) { return fiw_step_info(step.get(), &info, error); });
  Fields result;
  result["batch"] = info.batch;
  result["items"] = info.items;
  result["padded_items"] = info.padded_items;
  result["kv_chunk_tokens"] = info.kv_chunk_tokens;
  result["tile_rows"] = info.tile_rows;
  result["split_kv"] = info.split_kv != 0;
  result["cache_hit"] = info.cache_hit != 0;
  result["schedule_bytes"] = info.schedule_bytes;
  result["scratch_bytes"] = info.scratch_bytes;
  return result;
}

}  // namespace

void bind_workspace(nb::module_& module) {
  nb::class_<fiw_step_spec>(module, "StepSpec", "Element types and options of a step's calls. Borrows `params`.")
      .def(
          "__init__",
          [](fiw_step_spec* self, const fiw_attention_params& params, const std::string& q_dtype,
             const std::string& kv_dtype, bool lse, bool sinks, bool alibi, bool custom_mask) {
            *self = {sizeof(fiw_step_spec), &params,       element_type(q_dtype), element_type(kv_dtype),
                     lse ? 1 : 0,           sinks ? 1 : 0, alibi ? 1 : 0,         custom_mask ? 1 : 0};
          },
          "params"_a, "q_dtype"_a, "kv_dtype"_a, "lse"_a, "sinks"_a, "alibi"_a, "custom_mask"_a,
          nb::keep_alive<1, 2>());

  nb::class_<Step>(module, "Step", "A planned step.")
      .def(
          "run",
          [](const Step& step, const Tensor& q, const KvCache& kv, const Tensor& out, const Tensor* lse,
             const Extras* extras, Stream stream) {
            call_unlocked([&](fiw_error* error) {
              return fiw_step_run(step.get(), q.dl(), &kv.c, out.dl(), dl_or_null(lse), c_or_null(extras),
                                  native(stream), error);
            });
          },
          "q"_a, "kv"_a, "out"_a, "lse"_a.none(), "extras"_a.none(), "stream"_a)
      .def("info", &step_info);

  nb::class_<Workspace>(module, "Workspace", "A workspace's handle.")
      .def_static("create", &create, "device_index"_a, "workspace_bytes"_a, "fixed_size"_a, "limits"_a.none(),
                  "limits_params"_a.none(), "num_threads"_a, "cache_entries"_a, "batch_invariant"_a,
                  "fixed_split_tokens"_a, "verify_cuda_graph"_a, "cuda_route"_a, "allocator"_a.none())
      .def("handle",
           [](const Workspace& workspace) {
             const bool closed = fiw_workspace_closed(workspace.get()) != 0;
             return closed ? std::uintptr_t{0} : reinterpret_cast<std::uintptr_t>(workspace.get());
           })
      .def(
          "close", [](const Workspace& workspace) { fiw_workspace_close(workspace.get()); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("closed", [](const Workspace& workspace) { return fiw_workspace_closed(workspace.get()) != 0; })
      .def("invalidate_runtime_cache",
           [](const Workspace& workspace) {
             call_unlocked(
                 [&](fiw_error* error) { return fiw_workspace_invalidate_runtime_cache(workspace.get(), error); });
           })
      .def("invalidate_prefill_runtime_cache",
           [](const Workspace& workspace) {
             call_unlocked([&](fiw_error* error) {
               return fiw_workspace_invalidate_prefill_runtime_cache(workspace.get(), error);
             });
           })
      .def("invalidate_verify_runtime_cache",
           [](const Workspace& workspace) {
             call_unlocked([&](fiw_error* error) {
               return fiw_workspace_invalidate_verify_runtime_cache(workspace.get(), error);
             });
           })
      .def("device_index",
           [](const Workspace& workspace) {
             std::int32_t index = 0;
             call([&](fiw_error* error) { return fiw_workspace_device_index(workspace.get(), &index, error); });
             return index;
           })
      .def("device_props",
           [](const Workspace& workspace) {
             return device_props([&](fiw_device_props* props, fiw_error* error) {
               return fiw_workspace_device_props(workspace.get(), props, error);
             });
           })
      .def("verify_cuda_graph",
           [](const Workspace& workspace) { return fiw_workspace_verify_cuda_graph(workspace.get()) != 0; })
      .def("stats", &stats)
      .def(
          "read_table",
          [](const Workspace& workspace, const Tensor& indptr, const Tensor& indices, const Tensor& last_page_len,
             std::int32_t page_size, std::int64_t num_pages, std::uint64_t version, Stream stream) {
            const fiw_device_page_table table = {sizeof(fiw_device_page_table),
                                                 page_size,
                                                 0,
                                                 num_pages,
                                                 indptr.dl(),
                                                 indices.dl(),
                                                 last_page_len.dl(),
                                                 version};
            fiw_page_table* handle = nullptr;
            call_unlocked([&](fiw_error* error) {
              return fiw_page_table_from_device(workspace.get(), &table, &handle, native(stream), error);
            });
            return PageTable(handle);
          },
          "indptr"_a, "indices"_a, "last_page_len"_a, "page_size"_a, "num_pages"_a, "version"_a, "stream"_a)
      .def(
          "plan_decode",
          [](const Workspace& workspace, const PageTable& table, const fiw_step_spec& spec) {
            return make_step(workspace, [&, pages = table.handle()](fiw_step** out, fiw_error* error) {
              return fiw_plan_decode(workspace.get(), pages.get(), &spec, out, error);
            });
          },
          "table"_a, "spec"_a)
      .def(
          "plan_prefill",
          [](const Workspace& workspace, const Tensor& qo_indptr, const PageTable& table, const fiw_step_spec& spec) {
            return make_step(workspace, [&, pages = table.handle()](fiw_step** out, fiw_error* error) {
              return fiw_plan_prefill(workspace.get(), qo_indptr.dl(), pages.get(), &spec, out, error);
            });
          },
          "qo_indptr"_a, "table"_a, "spec"_a)
      .def(
          "plan_verify",
          [](const Workspace& workspace, std::int32_t window, const PageTable& table, const fiw_step_spec& spec) {
            return make_step(workspace, [&, pages = table.handle()](fiw_step** out, fiw_error* error) {
              return fiw_plan_verify(workspace.get(), window, pages.get(), &spec, out, error);
            });
          },
          "window"_a, "table"_a, "spec"_a)
      .def(
          "decode",
          [](const Workspace& workspace, const Tensor& q, const KvCache& kv, const PageTable& table,
             const fiw_attention_params& params, const Tensor& out, const Tensor* lse, const Extras* extras,
             Stream stream) {
            call_unlocked([&, pages = table.handle()](fiw_error* error) {
              return fiw_decode(workspace.get(), q.dl(), &kv.c, pages.get(), &params, out.dl(), dl_or_null(lse),
                                c_or_null(extras), native(stream), error);
            });
          },
          "q"_a, "kv"_a, "table"_a, "params"_a, "out"_a, "lse"_a.none(), "extras"_a.none(), "stream"_a)
      .def(
          "prefill",
          [](const Workspace& workspace, const Tensor& q, const Tensor& qo_indptr, const KvCache& kv,
             const PageTable& table, const fiw_attention_params& params, const Tensor& out, const Tensor* lse,
             const Extras* extras, Stream stream) {
            call_unlocked([&, pages = table.handle()](fiw_error* error) {
              return fiw_prefill(workspace.get(), q.dl(), qo_indptr.dl(), &kv.c, pages.get(), &params, out.dl(),
                                 dl_or_null(lse), c_or_null(extras), native(stream), error);
            });
          },
          "q"_a, "qo_indptr"_a, "kv"_a, "table"_a, "params"_a, "out"_a, "lse"_a.none(), "extras"_a.none(), "stream"_a)
      .def(
          "verify",
          [](const Workspace& workspace, const Tensor& q, std::int32_t window, const KvCache& kv,
             const PageTable& table, const fiw_attention_params& params, const Tensor& out, const Tensor* lse,
             const Extras* extras, Stream stream) {
            call_unlocked([&, pages = table.handle()](fiw_error* error) {
              return fiw_verify(workspace.get(), q.dl(), window, &kv.c, pages.get(), &params, out.dl(), dl_or_null(lse),
                                c_or_null(extras), native(stream), error);
            });
          },
          "q"_a, "window"_a, "kv"_a, "table"_a, "params"_a, "out"_a, "lse"_a.none(), "extras"_a.none(), "stream"_a)
      .def(
          "ragged_prefill",
          [](const Workspace& workspace, const Tensor& q, const Tensor& qo_indptr, const Tensor& k, const Tensor& v,
             const Tensor& kv_indptr, const fiw_attention_params& params, const Tensor& out, const Tensor* lse,
             const Extras* extras, Stream stream) {
            call_unlocked([&](fiw_error* error) {
              return fiw_ragged_prefill(workspace.get(), q.dl(), qo_indptr.dl(), k.dl(), v.dl(), kv_indptr.dl(),
                                        &params, out.dl(), dl_or_null(lse), c_or_null(extras), native(stream), error);
            });
          },
          "q"_a, "qo_indptr"_a, "k"_a, "v"_a, "kv_indptr"_a, "params"_a, "out"_a, "lse"_a.none(), "extras"_a.none(),
          "stream"_a)
      .def(
          "append_kv",
          [](const Workspace& workspace, const Tensor& k, const Tensor& v, const Tensor& append_indptr,
             const KvCache& kv, const PageTable& table, Stream stream) {
            call_unlocked([&, pages = table.handle()](fiw_error* error) {
              return fiw_append_kv(workspace.get(), k.dl(), v.dl(), append_indptr.dl(), &kv.c, pages.get(),
                                   native(stream), error);
            });
          },
          "k"_a, "v"_a, "append_indptr"_a, "kv"_a, "table"_a, "stream"_a)
      .def(
          "merge_states",
          [](const Workspace& workspace, const std::vector<SharedTensor>& part_outs,
             const std::vector<SharedTensor>& part_lses, const Tensor& out, const Tensor* lse, Stream stream) {
            std::vector<const DLTensor*> outs;
            std::vector<const DLTensor*> lses;
            for (const SharedTensor& part : part_outs) outs.push_back(part->dl());
            for (const SharedTensor& part : part_lses) lses.push_back(part->dl());
            call_unlocked([&](fiw_error* error) {
              return fiw_merge_states(workspace.get(), outs.data(), lses.data(), static_cast<std::int32_t>(outs.size()),
                                      out.dl(), dl_or_null(lse), native(stream), error);
            });
          },
          "part_outs"_a, "part_lses"_a, "out"_a, "lse"_a.none(), "stream"_a);

  module.def("required_workspace", &required_workspace, "device"_a, "limits"_a, "limits_params"_a, "batch_invariant"_a,
             "fixed_split_tokens"_a);
  module.def(
      "device_props_cpu",
      [](std::int32_t threads) {
        return device_props(
            [&](fiw_device_props* props, fiw_error* error) { return fiw_device_props_cpu(threads, props, error); });
      },
      "threads"_a);
  module.def("device_props_h200", [] { return device_props(fiw_device_props_h200); });
  module.def("compiled_with_cuda", [] { return fiw_compiled_with(FIW_DEVICE_CUDA) != 0; });
  module.def("version", &fiw_version);
}

}  // namespace fiw::python
