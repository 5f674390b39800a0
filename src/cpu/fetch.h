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

/// Lines for a loop to request, one a call.
struct Lines {
  const std::byte* line;
  std::ptrdiff_t step;

  HWY_INLINE void operator()() noexcept {
    __builtin_prefetch(line, 0, 2);
    line += step;
  }
};

/// Runs that are to be fetched; the caller keeps the array. A line that is cached stands in where there is nothing to
/// request, so that callers need no branch.
class FetchList {
 public:
  /// Where a Fetch stands: the next line, the end of its run, and the step, 0 at the stand-in.
  struct Place {
    const std::byte* line;
    const std::byte* end;
    std::ptrdiff_t step;
  };

  explicit FetchList(const std::byte* cached) noexcept : cached_(cached) {}

  Lines stand_in() const noexcept { return {cached_, 0}; }
  /// Where no end is ever reached.
  static Place nothing(const std::byte* cached) noexcept { return {cached, cached + 1, 0}; }

  HWY_NOINLINE Place next() noexcept {
    if (next_ == last_) return nothing(cached_);
    const MemoryRun run = *next_++;
    return {run.begin - reinterpret_cast<std::uintptr_t>(run.begin) % kLineBytes, run.end, kLineBytes};
  }

  /// Copies what is left, the last `most` runs if there are more, to `to`, for more to be appended; returns the end.
  MemoryRun* move_rest(std::ptrdiff_t most, MemoryRun* to) const noexcept {
    return std::copy(last_ - std::min(most, last_ - next_), last_, to);
  }
  void assign(const MemoryRun* begin, const MemoryRun* end) noexcept {
    next_ = begin;
    last_ = end;
  }

 private:
  const MemoryRun* next_ = nullptr;
  const MemoryRun* last_ = nullptr;
  const std::byte* cached_;
};

/// Each call requests the next line of a list.
class Fetch {
 public:
  explicit Fetch(FetchList& list) noexcept : list_(&list), place_(list.next()) {}
  /// Requests nothing but a line that is cached.
  explicit Fetch(const std::byte* cached) noexcept : list_(nullptr), place_(FetchList::nothing(cached)) {}

  HWY_INLINE void operator()() noexcept {
    __builtin_prefetch(place_.line, 0, 2);
    place_.line += place_.step;
    if (HWY_UNLIKELY(place_.line >= place_.end)) place_ = list_->next();
  }

  /// The next `count` lines for a loop that has no room for more than a pointer: where they do not lie together, they
  /// are requested at once, and the loop repeats a cached one.
  HWY_INLINE Lines take(std::int32_t count) noexcept {
    if (HWY_LIKELY(place_.step == 0 || place_.end - place_.line > count * kLineBytes)) {
      const Lines lines{place_.line, place_.step};
      place_.line += count * place_.step;
      return lines;
    }
    for (std::int32_t i = 0; i < count; ++i) (*this)();
    return list_->stand_in();
  }

  /// After runs were added to the list.
  void resume() noexcept {
    if (place_.step == 0) place_ = list_->next();
  }

 private:
  FetchList* list_;
  FetchList::Place place_;
};

}  // namespace fiw::cpu
