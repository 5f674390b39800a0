// See pinned_ring.h.
#include "cuda/pinned_ring.h"

#include <algorithm>
#include <bit>

#include "cuda/device.h"

namespace fiw::cuda {
namespace {

constexpr std::size_t kSmallSlot = std::size_t{16} << 10;
constexpr std::size_t kSmallSlots = 256;

}  // namespace

PinnedRing::PinnedRing() { add_slots(kSmallSlot, kSmallSlots); }

PinnedRing::~PinnedRing() {
  for (const Slot& slot : slots_) cudaEventDestroy(slot.done);
  for (std::byte* block : blocks_) cudaFreeHost(block);
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
  staged_ = slots_.size();
  add_slots(std::bit_ceil(std::max(bytes, kSmallSlot)), bytes > kSmallSlot ? 1 : kSmallSlots);
  return {slots_[staged_].memory, bytes};
}

void PinnedRing::add_slots(std::size_t bytes, std::size_t count) {
  slots_.reserve(slots_.size() + count);
  blocks_.reserve(blocks_.size() + 1);
  std::byte* block = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&block), bytes * count, cudaHostAllocDefault), "cudaHostAlloc");
  blocks_.push_back(block);
  for (std::size_t i = 0; i < count; ++i) {
    Slot slot{.memory = block + i * bytes, .bytes = bytes};
    check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    slots_.push_back(slot);
  }
}

void PinnedRing::upload(void* to, std::span<const std::byte> staged, cudaStream_t stream) {
  Slot& slot = slots_[staged_];
  check(cudaMemcpyAsync(to, staged.data(), staged.size(), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  slot.in_flight = true;
  check(cudaEventRecord(slot.done, stream), "cudaEventRecord");
  next_ = (staged_ + 1) % slots_.size();
}

}  // namespace fiw::cuda
