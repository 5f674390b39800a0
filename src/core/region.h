// Which bytes a strided view covers, and whether two views share one: what is written must lie apart from what is read.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "fiw/types.h"

namespace fiw {

/// Runs of contiguous bytes, repeated along up to three axes. Without a run it covers nothing.
class Region {
 public:
  struct Axis {
    const char* name = "";
    std::int64_t extent = 1;
    std::int64_t stride = 0;  ///< elements until the region is made, then bytes
  };

  Region() = default;
  /// `count` elements of `element` bytes at `data`, repeated along `axes`, whose strides are not negative. An axis of
  /// extent 1 has no stride, whatever it says; one of extent 0 leaves nothing. Throws kSizeOverflow, naming `name`,
  /// when the bytes reach past what int64 addresses.
  Region(const char* name, const void* data, std::int64_t element, std::int64_t count,
         std::initializer_list<Axis> axes = {});

  /// Whether an element is reached in two ways, judged as strides are meant: sorted, each at least as long as all that
  /// the shorter ones span. Returns the axis that is too short, or null.
  const Axis* aliasing_axis() const noexcept;
  /// Bytes that the axes with shorter strides than `axis` span, a run included.
  std::int64_t span_within(const Axis& axis) const noexcept;

  const char* name() const noexcept { return name_; }
  bool empty() const noexcept { return run_ == 0; }

  /// True when `a` and `b` share a byte. Exact for strides that nest, however the two interleave; views that would take
  /// too long to tell apart count as meeting.
  friend bool meet(const Region& a, const Region& b) noexcept;

 private:
  const char* name_ = "";
  std::int64_t first_ = 0;  ///< address
  std::int64_t end_ = 0;    ///< past the last byte
  std::int64_t run_ = 0;    ///< bytes
  std::array<Axis, 3> axes_{};
};

}  // namespace fiw
