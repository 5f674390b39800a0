// Pinned host memory in which uploads are written: each slot is free again once the copy that reads it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <vector>

namespace fiw::cuda {

/// One ring for each size of slot, a power of two. The small ones are enough for many steps in flight from the start; a
/// ring grows where its oldest slot is still being read, since waiting for the device could wait for ever. A slot that
/// was staged and never uploaded (the plan failed half way) is free again.
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
    cudaEvent_t done = nullptr;
    bool in_flight = false;
  };
  struct Ring {
    std::vector<Slot> slots;
    std::size_t next = 0;  ///< the slot that has been in flight longest
  };
  void release() noexcept;
  /// Whether the ring's next slot can be written to.
  static bool is_free(Ring& ring);
  /// One allocation, cut into `count` slots, which are the ring's next ones.
  void add_slots(Ring& ring, std::size_t bytes, std::size_t count);

  std::vector<Ring> rings_;  ///< [power of two]
  std::vector<std::byte*> blocks_;
  Ring* staged_ = nullptr;  ///< whose next slot was handed out last
};

}  // namespace fiw::cuda
