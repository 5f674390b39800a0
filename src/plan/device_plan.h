// What a kernel needs to write the schedule that shape_schedule() and write_schedule() would, of uniform requests.
#pragma once

#include <cstdint>

#include "plan/chunk_search.h"
#include "plan/planner.h"

namespace fiw {

/// The facts that no table changes.
struct DevicePlan {
  std::int32_t qo_len = 1;             ///< query tokens a request
  std::int32_t tiles = 1;              ///< query tiles a request
  std::int32_t reach = 1;              ///< most pages that a tile walks
  std::int32_t spared_span = 0;        ///< pages of a request of which the causal limit spares half
  std::int32_t fixed_chunk_pages = 0;  ///< 0: searched for
  std::int32_t page_size = 1;
  bool split_kv = false;
  ChunkRule rule{};
  std::uint32_t most_chunks[ChunkRule::kLimits]{};  ///< of all requests, within each limit of the rule
};

/// For schedules of this shape, which was made from the same arguments under a graph's policy.
DevicePlan device_plan(const ScheduleShape& shape, const DeviceProps& device, const WorkLoad& work,
                       const SplitPolicy& policy);

}  // namespace fiw
