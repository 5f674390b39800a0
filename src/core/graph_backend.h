// What a backend that enqueues work does for graphs: record once, repeat, and plan on the device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/backend.h"
#include "fiw/error.h"
#include "plan/device_plan.h"

namespace fiw {

/// What replays found wrong, in memory that the host sees without waiting.
struct GraphAlarm {
  std::uint32_t trips = 0;  ///< replays that found something; the rest tells of the last one
  std::int32_t reason = 0;  ///< a Reason
  std::int32_t request = 0;
  std::int32_t found = 0;
  std::int32_t expected = 0;
};

/// The head of a captured step over a live table: plans, or finds out whether the plan still holds. Where the table is
/// bad or the plan does not hold, the schedules are left without work and the alarm is raised.
struct ReplanLaunch {
  /// One kind of layer.
  struct Part {
    const ScheduleShape* shape = nullptr;  ///< of any table of this batch: sizes and offsets are the same
    DevicePlan plan{};
    std::byte* schedule = nullptr;
  };
  std::span<const Part> parts{};
  FixedTable table{};
  std::int32_t* kv_lens = nullptr;  ///< [batch], written; zeros where the alarm is raised, so that nothing is appended
  /// What the host planned for last: its batch; for each part the tokens of a chunk; then for each part whether its
  /// schedule still stands in memory, which the kernel keeps true. Null: plan.
  std::int32_t* prepared = nullptr;
  const std::int32_t* prepared_indptr = nullptr;  ///< ... its table's; with `prepared`
  std::int32_t batch = 0;
  std::int32_t page_size = 1;
  std::int64_t num_pages = 0;
  std::int32_t max_pages = 0;
  GraphAlarm* alarm = nullptr;
  Stream stream = nullptr;
};

/// Recording work once and repeating it, for backends that enqueue work.
class GraphBackend {
 public:
  class Recording {
   public:
    Recording() = default;
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
    virtual ~Recording() = default;
  };

  virtual ~GraphBackend() = default;
  /// What is enqueued on `stream` from here on, also by the caller, comes after all that the workspace has enqueued.
  /// Throws for a stream under capture.
  virtual void follow(Stream stream) = 0;
  /// Waits for all that the workspace has enqueued.
  virtual void settle() = 0;
  /// From here to end() or abandon(), what is enqueued on `stream` is recorded instead of run.
  virtual void begin(Stream stream) = 0;
  virtual std::unique_ptr<Recording> end(Stream stream) = 0;
  virtual void abandon(Stream stream) noexcept = 0;
  /// Which recording `stream` is part of; all streams of one have the same. Throws where what is enqueued on it would
  /// be run instead.
  virtual std::uint64_t recording_on(Stream stream) const = 0;
  virtual void replay(const Recording& recording, Stream stream) = 0;
  virtual std::shared_ptr<GraphAlarm> make_alarm() = 0;
  virtual void replan(const ReplanLaunch& launch) = 0;
};

}  // namespace fiw
