// Which bytes a strided view covers, and whether two views share one: what is written must lie apart from what is read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

namespace fiw {

/// Runs of contiguous bytes, repeated along up to three axes.
class Region {
 public:
  struct Axis {
    const char* name;
    std::int64_t extent;
    std::int64_t stride;  ///< elements until the region is made, then bytes
  };

  /// Holds nothing yet, not even zeros, so that a call's list of regions costs no more than what is entered.
  Region() = default;
  /// `count` elements of `element` bytes at `data`, repeated along `axes`, whose strides are not negative. An axis of
  /// extent 1 has no stride, whatever it says; one of extent 0 leaves nothing. Throws kSizeOverflow, naming `name`,
  /// when the bytes reach past what int64 addresses.
  Region(const char* name, const void* data, std::int64_t element, std::int64_t count,
         std::initializer_list<Axis> axes = {});

  /// The axis along which an element is reached a second time, as strides are meant: sorted, each is at least as long
  /// as all that the shorter ones span. Null when there is none.
  const Axis* aliasing_axis() const noexcept;
  /// Bytes that the axes with shorter strides than `axis` span, a run included.
  std::int64_t span_within(const Axis& axis) const noexcept;

  const char* name() const noexcept { return name_; }
  std::int64_t element() const noexcept { return element_; }
  bool empty() const noexcept { return run_ == 0; }

  /// True when `a` and `b` share a byte. Exact for strides that nest, however the two interleave; views that would take
  /// too long to tell apart count as meeting.
  friend bool meet(const Region& a, const Region& b) noexcept {
    return a.first_ < b.end_ && b.first_ < a.end_ && share(a, b);
  }

 private:
  static bool share(const Region& a, const Region& b) noexcept;

  const char* name_;
  std::int64_t element_;  ///< bytes
  std::int64_t first_;    ///< address
  std::int64_t end_;      ///< past the last byte
  std::int64_t run_;      ///< bytes
  std::size_t num_axes_;  ///< of extent 2 and more
  std::array<Axis, 3> axes_;
};

/// What one call writes, or what it reads.
class Regions {
 public:
  void add(const char* name, const void* data, std::int64_t element, std::int64_t count,
           std::initializer_list<Region::Axis> axes = {}) {
    std::construct_at(&regions_.at(size_), name, data, element, count, axes);
    ++size_;
  }
  const Region* begin() const noexcept { return regions_.data(); }
  const Region* end() const noexcept { return regions_.data() + size_; }

 private:
  // q, K, V, two scales, kv_indptr, and four extras
  std::array<Region, 10> regions_;
  std::size_t size_ = 0;
};

}  // namespace fiw
