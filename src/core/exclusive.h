// One thread at a time in a workspace: the second to arrive is told so and changes nothing, or waits where it must not
// fail.
#pragma once

#include <atomic>

#include "fiw/error.h"

namespace fiw::detail {

[[noreturn]] inline void throw_busy() {
  throw Error(Status::kBusy, Reason::kBusyWorkspace, "the workspace is in use by another thread");
}

/// Holds a workspace for its scope; throws kBusy where another thread does.
class Exclusive {
 public:
  explicit Exclusive(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) throw_busy();
  }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;
  ~Exclusive() {
    busy_.store(false, std::memory_order_release);
    busy_.notify_all();
  }

 private:
  std::atomic<bool>& busy_;
};

/// As Exclusive, but waits for a call in flight on another thread.
class Turn {
 public:
  explicit Turn(std::atomic<bool>& busy) noexcept : busy_(busy) {
    while (busy_.exchange(true, std::memory_order_acquire)) busy_.wait(true, std::memory_order_relaxed);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    busy_.store(false, std::memory_order_release);
    busy_.notify_all();
  }

 private:
  std::atomic<bool>& busy_;
};

}  // namespace fiw::detail
