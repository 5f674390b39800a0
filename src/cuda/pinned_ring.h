// Pinned host memory in which uploads are written: each slot is free again once the copy that reads it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <vector>

namespace fiw::cuda {

/// Never waits: when every slot is still being read, it grows. A slot that was staged and never uploaded (the plan
/// failed half way) is the next one handed out.
class PinnedRing {
 public:
  PinnedRing() = default;
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;
  /// The copies must be done.
  ~PinnedRing();

  /// At least `bytes`, valid until upload().
  std::span<std::byte> stage(std::size_t bytes);
  /// Enqueues the copy of `staged`, which stage() returned last.
  void upload(void* to, std::span<const std::byte> staged, cudaStream_t stream);

 private:
  struct Slot {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
    cudaEvent_t done = nullptr;
    bool in_flight = false;
  };
  std::size_t add_slot(std::size_t bytes);

  std::vector<Slot> slots_;
  std::size_t next_ = 0;    ///< where the search starts: the slot that has been in flight longest
  std::size_t staged_ = 0;  ///< the slot handed out last
};

}  // namespace fiw::cuda
