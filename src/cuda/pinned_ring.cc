// See pinned_ring.h.
#include "cuda/pinned_ring.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/device.h"

namespace fiw::cuda {
namespace {

constexpr std::size_t kSmallSlot = std::size_t{16} << 10;
constexpr std::size_t kSmallSlots = 256;

/// The ring that serves `bytes`.
std::size_t ring_of(std::size_t bytes) noexcept {
  return bytes <= kSmallSlot ? 0 : static_cast<std::size_t>(std::bit_width((bytes - 1) / kSmallSlot));
}

}  // namespace

PinnedRing::PinnedRing() {
  rings_.resize(std::numeric_limits<std::size_t>::digits);
  try {
    add_slots(rings_.front(), kSmallSlot, kSmallSlots);
  } catch (...) {
    release();
    throw;
  }
}

PinnedRing::~PinnedRing() { release(); }

void PinnedRing::release() noexcept {
  for (const Ring& ring : rings_) {
    for (const Slot& slot : ring.slots) cudaEventDestroy(slot.done);
  }
  for (std::byte* block : blocks_) cudaFreeHost(block);
}

std::span<std::byte> PinnedRing::stage(std::size_t bytes) {
  const std::size_t index = ring_of(bytes);
  Ring& ring = rings_[index];
  if (!is_free(ring)) add_slots(ring, kSmallSlot << index, index == 0 ? kSmallSlots : 1);
  staged_ = &ring;
  return {ring.slots[ring.next].memory, bytes};
}

bool PinnedRing::is_free(Ring& ring) {
  if (ring.slots.empty()) return false;
  Slot& slot = ring.slots[ring.next];
  if (!slot.in_flight) return true;
  const cudaError_t status = cudaEventQuery(slot.done);
  if (status == cudaErrorNotReady) return false;
  check(status, "cudaEventQuery");
  slot.in_flight = false;
  return true;
}

void PinnedRing::add_slots(Ring& ring, std::size_t bytes, std::size_t count) {
  ring.slots.reserve(ring.slots.size() + count);
  blocks_.reserve(blocks_.size() + 1);
  std::byte* block = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&block), bytes * count, cudaHostAllocDefault), "cudaHostAlloc");
  blocks_.push_back(block);
  for (std::size_t i = 0; i < count; ++i) {
    Slot slot{.memory = block + i * bytes};
    check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    ring.slots.insert(ring.slots.begin() + static_cast<std::ptrdiff_t>(ring.next), slot);
  }
}

void PinnedRing::upload(void* to, std::span<const std::byte> staged, cudaStream_t stream) {
  Slot& slot = staged_->slots[staged_->next];
  check(cudaMemcpyAsync(to, staged.data(), staged.size(), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  slot.in_flight = true;
  check(cudaEventRecord(slot.done, stream), "cudaEventRecord");
  staged_->next = (staged_->next + 1) % staged_->slots.size();
}

}  // namespace fiw::cuda
