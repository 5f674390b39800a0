// Memory of a backend, or an error that says for what there was none.
#pragma once

#include <cstddef>

#include "core/backend.h"
#include "core/fail.h"

namespace fiw {

/// Throws kOutOfMemory with the bytes needed.
inline std::byte* allocate_or_throw(Backend& backend, std::size_t bytes, const char* what, Stream stream) {
  std::byte* const memory = backend.allocate(bytes, stream);
  if (memory == nullptr) {
    throw Error(Status::kOutOfMemory, Reason::kAllocation, fmt::format("no memory for {} bytes of {}", bytes, what))
        .needs(bytes);
  }
  return memory;
}

}  // namespace fiw
