// Pinned host memory in which uploads are written: each slot is free again once the copy that reads it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <vector>

namespace fiw::cuda {

/// Starts with small slots enough for many steps in flight and grows when all are still being read, since waiting for
/// the device could wait for ever. A slot that was staged and never uploaded (the plan failed half way) is free again.
class PinnedRing {
 public:
  PinnedRing();
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
  /// One allocation, cut into `count` slots.
  void add_slots(std::size_t bytes, std::size_t count);

  std::vector<Slot> slots_;
  std::vector<std::byte*> blocks_;
  std::size_t next_ = 0;    ///< where the search starts: the slot that has been in flight longest
  std::size_t staged_ = 0;  ///< the slot handed out last
};

}  // namespace fiw::cuda
