// See arena.h.
#include "core/arena.h"

#include <algorithm>

#include "core/allocate.h"

namespace fiw {

ArenaSlice::~ArenaSlice() {
  if (arena_ != nullptr) arena_->give_back(data_, size_);
}

Arena::~Arena() {
  for (const Range& block : blocks_) backend_->release(block.data, block.size, nullptr);
}

ArenaSlice Arena::take(std::size_t bytes, Stream stream) {
  const std::size_t size = std::max((bytes + kAlignment - 1) / kAlignment, std::size_t{1}) * kAlignment;
  const std::lock_guard lock(mutex_);
  // Every live slice, this one included, may come back as a range of its own.
  free_.reserve(free_.size() + live_ + 2);
  auto fit = std::ranges::find_if(free_, [&](const Range& range) { return range.size >= size; });
  if (fit == free_.end()) {
    const std::size_t block_size = std::max({size, kMinBlock, capacity_});
    blocks_.reserve(blocks_.size() + 1);
    std::byte* const block = allocate_or_throw(*backend_, block_size, "plan schedules", stream);
    const auto by_address = [](const Range& a, const Range& b) { return a.data < b.data; };
    const Range range{block, block_size, block};
    blocks_.insert(std::ranges::upper_bound(blocks_, range, by_address), range);
    capacity_ += block_size;
    fit = free_.insert(std::ranges::upper_bound(free_, range, by_address), range);
  }

  ArenaSlice slice;
  slice.arena_ = shared_from_this();
  slice.data_ = fit->data;
  slice.size_ = size;
  fit->data += size;
  fit->size -= size;
  if (fit->size == 0) free_.erase(fit);
  ++live_;
  return slice;
}

void Arena::give_back(std::byte* data, std::size_t size) noexcept {
  const std::lock_guard lock(mutex_);
  --live_;
  const auto block =
      std::ranges::find_if(blocks_, [&](const Range& b) { return data >= b.data && data < b.data + b.size; });
  auto next = std::ranges::find_if(free_, [&](const Range& range) { return range.data > data; });
  next = free_.insert(next, Range{data, size, block->data});
  if (const auto after = next + 1;
      after != free_.end() && after->block == next->block && next->data + next->size == after->data) {
    next->size += after->size;
    free_.erase(after);
  }
  if (next != free_.begin()) {
    const auto before = next - 1;
    if (before->block == next->block && before->data + before->size == next->data) {
      before->size += next->size;
      free_.erase(next);
    }
  }
}

std::size_t Arena::capacity() const noexcept {
  const std::lock_guard lock(mutex_);
  return capacity_;
}

}  // namespace fiw
