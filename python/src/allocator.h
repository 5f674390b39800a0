// A Python object as the allocator of a workspace.
#pragma once

#include <nanobind/nanobind.h>

#include "fiw/fiw.h"

namespace fiw::python {

/// The C ABI's pair of callbacks over an object with `allocate` and `free`. Must outlive the workspace and its steps.
/// What `allocate` raises becomes the cause of the OutOfMemoryError that follows; what `free` raises is unraisable.
class Allocator {
 public:
  /// Needs the GIL; raises AttributeError.
  explicit Allocator(const nanobind::object& object) : allocate(object.attr("allocate")), free(object.attr("free")) {}
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// Refers to this object.
  fiw_allocator callbacks() noexcept;

  const nanobind::object allocate;
  const nanobind::object free;
};

}  // namespace fiw::python
