// See region.h. Positions are addresses below 2^63, so that every difference of two of them fits int64.
#include "core/region.h"

#include <algorithm>
#include <functional>

#include "core/fail.h"

namespace fiw {
namespace {

/// Multiples of a stride by which an element of one view can lie behind an element of the other.
struct Term {
  std::int64_t stride = 0;
  std::int64_t low = 0;
  std::int64_t high = 0;
};

constexpr std::int64_t floor_div(std::int64_t n, std::int64_t d) noexcept { return n / d - (n % d < 0 ? 1 : 0); }

/// Whether some choice of multiples puts two runs onto each other: longest stride first, and of each only the multiples
/// that the shorter strides can still make up for. Nesting strides leave two or three.
class Search {
 public:
  void add(std::int64_t stride, std::int64_t low, std::int64_t high) noexcept {
    if (stride == 0) return;  // every step ends where it began
    std::size_t at = 0;
    while (at < count_ && terms_[at].stride > stride) ++at;
    if (at < count_ && terms_[at].stride == stride) {
      terms_[at].low += low;
      terms_[at].high += high;
      return;
    }
    for (std::size_t i = count_++; i > at; --i) terms_[i] = terms_[i - 1];
    terms_[at] = {stride, low, high};
  }

  /// `distance` from a run of `a_run` bytes to one of `b_run`.
  bool run(std::int64_t distance, std::int64_t a_run, std::int64_t b_run) noexcept {
    a_run_ = a_run;
    b_run_ = b_run;
    return found(0, distance);
  }

 private:
  bool found(std::size_t next, std::int64_t distance) noexcept {
    if (next == count_) return -b_run_ < distance && distance < a_run_;
    if (--budget_ < 0) return true;
    std::int64_t nearest = distance;
    std::int64_t farthest = distance;
    for (std::size_t i = next + 1; i < count_; ++i) {
      nearest += terms_[i].low * terms_[i].stride;
      farthest += terms_[i].high * terms_[i].stride;
    }
    const Term& term = terms_[next];
    const std::int64_t first = std::max(term.low, -floor_div(farthest + b_run_ - 1, term.stride));
    const std::int64_t last = std::min(term.high, floor_div(a_run_ - 1 - nearest, term.stride));
    for (std::int64_t i = first; i <= last; ++i) {
      if (found(next + 1, distance + i * term.stride)) return true;
    }
    return false;
  }

  std::array<Term, 6> terms_{};  ///< longest stride first
  std::size_t count_ = 0;
  std::int64_t a_run_ = 0;
  std::int64_t b_run_ = 0;
  int budget_ = 4096;
};

}  // namespace

Region::Region(const char* name, const void* data, std::int64_t element, std::int64_t count,
               std::initializer_list<Axis> axes)
    : name_(name), element_(element), num_axes_(0) {
  first_ = end_ = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
  bool overflow = first_ < 0 || __builtin_mul_overflow(count, element, &run_);
  overflow |= __builtin_add_overflow(end_, run_, &end_);
  for (const Axis& axis : axes) {
    if (axis.extent < 1 || count < 1) {
      run_ = 0;
      num_axes_ = 0;
      return;
    }
    if (axis.extent == 1) continue;
    Axis& in_bytes = axes_[num_axes_++];
    in_bytes = axis;
    std::int64_t reach = 0;
    overflow |= __builtin_mul_overflow(axis.stride, element, &in_bytes.stride);
    overflow |= __builtin_mul_overflow(axis.extent - 1, in_bytes.stride, &reach);
    overflow |= __builtin_add_overflow(end_, reach, &end_);
  }
  if (overflow) fail(Reason::kSizeOverflow, "{}: its extents and strides reach past what int64 holds", name);
}

const Region::Axis* Region::aliasing_axis() const noexcept {
  for (std::size_t i = 0; i < num_axes_; ++i) {
    if (axes_[i].stride < span_within(axes_[i])) return &axes_[i];
  }
  return nullptr;
}

std::int64_t Region::span_within(const Axis& axis) const noexcept {
  std::int64_t span = run_;
  for (std::size_t i = 0; i < num_axes_; ++i) {
    const Axis& other = axes_[i];
    // Of two equal strides the second one contains the first.
    const bool within = other.stride < axis.stride || (other.stride == axis.stride && std::less<>()(&other, &axis));
    if (within) span += (other.extent - 1) * other.stride;
  }
  return span;
}

bool Region::share(const Region& a, const Region& b) noexcept {
  if (a.empty() || b.empty()) return false;
  Search search;
  for (std::size_t i = 0; i < a.num_axes_; ++i) search.add(a.axes_[i].stride, 1 - a.axes_[i].extent, 0);
  for (std::size_t i = 0; i < b.num_axes_; ++i) search.add(b.axes_[i].stride, 0, b.axes_[i].extent - 1);
  return search.run(b.first_ - a.first_, a.run_, b.run_);
}

}  // namespace fiw
