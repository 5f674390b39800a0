// Memory from the caller's allocator, which is not taken on trust.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fail.h"
#include "fiw/workspace.h"

namespace fiw {

/// Null when `allocator`, whose callbacks are set, is out of memory. Throws kInvalidArgument for memory that kernels
/// could not use, which goes back first.
inline std::byte* allocate_from(const Allocator& allocator, std::size_t bytes, std::size_t alignment, Stream stream) {
  void* const memory = allocator.allocate(allocator.context, bytes, alignment, stream);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (address % alignment != 0) {
    allocator.free(allocator.context, memory, bytes, stream);
    fail(Reason::kOptions, "allocator.allocate gave {:#x} for {} bytes, expected a multiple of {}", address, bytes,
         alignment);
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace fiw
