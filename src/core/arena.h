// Int scratch: one growing region of backend memory from which every live plan holds its own slice.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"

namespace fiw {

class Arena;

/// A plan's own bytes; returned to the arena when destroyed. Never overlaps another live slice.
class ArenaSlice {
 public:
  ArenaSlice() = default;
  ArenaSlice(ArenaSlice&& other) noexcept { swap(other); }
  ArenaSlice& operator=(ArenaSlice&& other) noexcept {
    ArenaSlice(std::move(other)).swap(*this);
    return *this;
  }
  ArenaSlice(const ArenaSlice&) = delete;
  ArenaSlice& operator=(const ArenaSlice&) = delete;
  ~ArenaSlice();

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  friend class Arena;
  void swap(ArenaSlice& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  std::shared_ptr<Arena> arena_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// First fit over address-ordered free ranges. Grows by whole blocks and gives them back when destroyed, which is after
/// its last slice. Slices may be released from any thread.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  explicit Arena(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// A slice of at least `bytes` (rounded up to kAlignment). Throws kOutOfMemory with the bytes needed.
  ArenaSlice take(std::size_t bytes, Stream stream);
  /// Bytes held from the backend.
  std::size_t capacity() const noexcept;

  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t kMinBlock = std::size_t{1} << 20;

 private:
  friend class ArenaSlice;
  struct Range {
    std::byte* data;
    std::size_t size;
    std::byte* block;  ///< ranges merge within one block only
  };
  void give_back(std::byte* data, std::size_t size) noexcept;

  std::shared_ptr<Backend> backend_;
  mutable std::mutex mutex_;
  std::vector<Range> blocks_;  ///< address-ordered
  std::vector<Range> free_;    ///< address-ordered; capacity reserved so that give_back cannot throw
  std::size_t live_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace fiw
