// Requests memory ahead of its use, line by line in the order of addresses: in any other order, or in bursts, measured
// bandwidth is a fifth lower.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/base.h"

namespace fiw::cpu {

/// Bytes that one request brings.
inline constexpr std::int32_t kLineBytes = 64;

struct MemoryRun {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
};

/// Each call requests the next line of a list of runs, which the caller keeps. A line that is cached stands in where
/// there is nothing to request, so that callers need no branch.
class Fetch {
 public:
  explicit Fetch(const std::byte* cached) noexcept : cached_(cached) { advance(); }

  HWY_INLINE void operator()() noexcept {
    __builtin_prefetch(line_, 0, 2);
    line_ += step_;
    if (HWY_UNLIKELY(line_ >= end_)) advance();
  }

  /// Copies what is left of the list, the last `most` runs if there are more, to `to`, for more to be appended; returns
  /// the end.
  MemoryRun* move_rest(std::ptrdiff_t most, MemoryRun* to) const noexcept {
    return std::copy(last_ - std::min(most, last_ - next_), last_, to);
  }
  void resume(const MemoryRun* begin, const MemoryRun* end) noexcept {
    next_ = begin;
    last_ = end;
    if (step_ == 0) advance();
  }

 private:
  HWY_NOINLINE void advance() noexcept {
    if (next_ == last_) {
      line_ = cached_;
      end_ = cached_ + 1;
      step_ = 0;
      return;
    }
    line_ = next_->begin - reinterpret_cast<std::uintptr_t>(next_->begin) % kLineBytes;
    end_ = next_->end;
    step_ = kLineBytes;
    ++next_;
  }

  const std::byte* line_ = nullptr;
  const std::byte* end_ = nullptr;
  std::ptrdiff_t step_ = 0;
  const MemoryRun* next_ = nullptr;
  const MemoryRun* last_ = nullptr;
  const std::byte* cached_;
};

}  // namespace fiw::cpu
