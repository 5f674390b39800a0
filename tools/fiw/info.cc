// `fiw info`: what this build holds and what this machine offers.
// clang-format off
#include "cpu/targets.h"  // before any Highway header
// clang-format on

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/highway.h>
#include <hwy/targets.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "commands.h"
#include "device.h"
#include "fiw/error.h"
#include "fiw/workspace.h"
#include "table.h"

namespace fiw::cli {
namespace {

/// Highway numbers better targets lower.
std::vector<std::string> target_names(std::int64_t targets) {
  std::vector<std::string> names;
  for (; targets != 0; targets &= targets - 1) names.emplace_back(hwy::TargetName(targets & -targets));
  return names;
}

nlohmann::json describe(const FlashInferWorkspace& workspace) {
  const DeviceProps& props = workspace.device_props();
  nlohmann::json device = {{"index", workspace.device_index()}, {"workers", props.num_workers}};
  if (props.kind == DeviceKind::kCpu) {
    device["kind"] = "cpu";
  } else {
    device["kind"] = "cuda";
    device["compute_capability"] = props.compute_capability;
  }
  return device;
}

/// The CUDA devices, and why there are none or no more.
nlohmann::json collect_cuda(nlohmann::json& devices) {
  if (!FlashInferWorkspace::compiled_with(DeviceKind::kCuda)) return "not compiled in";
  for (int index = 0;; ++index) {
    try {
      devices.push_back(describe(*open_workspace(index, {})));
    } catch (const Error& error) {
      if (error.status() == Status::kNoDevice && index > 0) return "present";
      return error.what();
    }
  }
}

nlohmann::json collect() {
  const std::int64_t compiled = HWY_TARGETS;
  const std::int64_t available = compiled & hwy::SupportedTargets();
  const auto workspace = open_workspace(kCpuDevice, {});
  const WorkspaceOptions options;
  const PlanOptions& plan = options.plan;
  nlohmann::json backends = nlohmann::json::array({"cpu"});
  if (FlashInferWorkspace::compiled_with(DeviceKind::kCuda)) backends.push_back("cuda");
  nlohmann::json devices = nlohmann::json::array({describe(*workspace)});
  const nlohmann::json cuda = collect_cuda(devices);
  return {{"version", FIW_VERSION},
          {"backends", backends},
          {"simd",
           {{"compiled", target_names(compiled)},
            {"available", target_names(available)},
            {"chosen", hwy::TargetName(available & -available)}}},
          {"cuda", cuda},
          {"devices", devices},
          {"defaults",
           {{"float_scratch_bytes", workspace->stats().float_scratch_bytes},
            {"cache_entries", options.cache_entries},
            {"fixed_size", options.fixed_size},
            {"batch_invariant", plan.batch_invariant},
            {"fixed_split_tokens", plan.fixed_split_tokens},
            {"verify_cuda_graph", workspace->verify_cuda_graph()}}}};
}

void print(const nlohmann::json& info) {
  const auto list = [](const nlohmann::json& names) {
    return fmt::format("{}", fmt::join(names.get<std::vector<std::string>>(), ", "));
  };
  const nlohmann::json& simd = info["simd"];
  const nlohmann::json& defaults = info["defaults"];
  Table table({{"", Table::Align::kLeft}, {"", Table::Align::kLeft}});
  table.add({"version", info["version"].get<std::string>()});
  table.add({"backends", list(info["backends"])});
  table.add({"SIMD compiled in", list(simd["compiled"])});
  table.add({"SIMD available", list(simd["available"])});
  table.add({"SIMD chosen", simd["chosen"].get<std::string>()});
  for (const nlohmann::json& device : info["devices"]) {
    const int workers = device["workers"].get<int>();
    table.add({fmt::format("device {}", device["index"].get<int>()),
               device["kind"] == "cpu" ? fmt::format("cpu, {} threads", workers)
                                       : fmt::format("cuda, {} multiprocessors, compute capability {}", workers,
                                                     device["compute_capability"].get<int>())});
  }
  table.add({"CUDA", info["cuda"].get<std::string>()});
  table.add({"float scratch", fmt::format("{} bytes at first, {}", defaults["float_scratch_bytes"].get<std::size_t>(),
                                          defaults["fixed_size"].get<bool>() ? "fixed" : "grows")});
  table.add({"plan cache", fmt::format("{} entries a kind", defaults["cache_entries"].get<int>())});
  table.add(
      {"batch-invariant split", fmt::format("{}, {} tokens", defaults["batch_invariant"].get<bool>() ? "on" : "off",
                                            defaults["fixed_split_tokens"].get<int>())});
  table.add({"verify graphs", defaults["verify_cuda_graph"].get<bool>() ? "on" : "off"});
  table.print(std::cout);
}

}  // namespace

void add_info_command(CLI::App& app, int& exit_code) {
  CLI::App& info = *app.add_subcommand("info", "Show version, backends, SIMD targets, devices and defaults");
  const auto json = std::make_shared<bool>(false);
  info.add_flag("--json", *json, "As JSON");
  info.callback([json, &exit_code] {
    const nlohmann::json collected = collect();
    if (*json) {
      print_json(collected);
    } else {
      print(collected);
    }
    exit_code = kExitOk;
  });
}

}  // namespace fiw::cli
