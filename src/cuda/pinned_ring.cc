// See pinned_ring.h.
#include "cuda/pinned_ring.h"

#include <algorithm>
#include <bit>

#include "cuda/device.h"

namespace fiw::cuda {
namespace {

constexpr std::size_t kLeastSlot = std::size_t{16} << 10;

}  // namespace

PinnedRing::~PinnedRing() {
  for (const Slot& slot : slots_) {
    cudaEventDestroy(slot.done);
    cudaFreeHost(slot.memory);
  }
}

std::span<std::byte> PinnedRing::stage(std::size_t bytes) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const std::size_t index = (next_ + i) % slots_.size();
    Slot& slot = slots_[index];
    if (slot.bytes < bytes) continue;
    if (slot.in_flight) {
      const cudaError_t status = cudaEventQuery(slot.done);
      if (status == cudaErrorNotReady) continue;
      check(status, "cudaEventQuery");
      slot.in_flight = false;
    }
    staged_ = index;
    return {slot.memory, bytes};
  }
  staged_ = add_slot(bytes);
  return {slots_[staged_].memory, bytes};
}

std::size_t PinnedRing::add_slot(std::size_t bytes) {
  slots_.reserve(slots_.size() + 1);
  Slot slot{.bytes = std::bit_ceil(std::max(bytes, kLeastSlot))};
  check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&slot.memory), slot.bytes, cudaHostAllocDefault);
  if (status != cudaSuccess) {
    cudaEventDestroy(slot.done);
    check(status, "cudaHostAlloc");
  }
  slots_.push_back(slot);
  return slots_.size() - 1;
}

void PinnedRing::upload(void* to, std::span<const std::byte> staged, cudaStream_t stream) {
  Slot& slot = slots_[staged_];
  check(cudaMemcpyAsync(to, staged.data(), staged.size(), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  slot.in_flight = true;
  check(cudaEventRecord(slot.done, stream), "cudaEventRecord");
  next_ = (staged_ + 1) % slots_.size();
}

}  // namespace fiw::cuda
