// Long replays of a trace through a graph session, checked against the reference on the way.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "compare.h"
#include "fiw/graph.h"
#include "graph_shape.h"
#include "trace.h"

namespace fiw::bench {

struct TraceReplay {
  std::string name{};
  std::int64_t steps = 0;
  std::int64_t requests = 0;    ///< finished
  std::int64_t recaptures = 0;  ///< after the one capture of each bucket
  std::int64_t rows = 0;        ///< compared with the reference
  cli::ErrorGauge errors{cli::output_tolerance(DType::kBFloat16, kDevice)};
  GraphStats stats{};
  double seconds = 0;

  bool ok() const { return errors.failures() == 0 && recaptures == 0 && stats.trips == 0; }
};

/// `steps` steps of up to 64 requests, each with `window` tokens a request (1: decode), through two layers. Each step
/// admits a request of the trace where there is room, from the start again when all were served. `live`: the page table
/// lies in device memory and replays plan on the device; else it is handed to each step.
TraceReplay replay_trace(const cli::Trace& trace, std::int64_t steps, std::int32_t window, bool live);

}  // namespace fiw::bench
