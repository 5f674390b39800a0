// The C ABI's errors as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "fiw/fiw.h"

namespace fiw::python {

/// Raises the exception of `fiw.errors` that belongs to `error.code`. Needs the GIL.
[[noreturn]] void raise(const fiw_error& error);

/// Raises fiw.InvalidArgumentError for an argument that the C ABI never gets to see. Needs the GIL.
[[noreturn]] void raise_invalid(fiw_reason reason, const char* message);

/// Makes `exception` the cause of the OutOfMemoryError that is raised next in this thread. Needs the GIL.
void blame(nanobind::object exception);

/// Calls `function(fiw_error*)`, a call of the C ABI; raises when it fails.
template <class Function>
void call(Function&& function) {
  fiw_error error = FIW_ERROR_INIT;
  if (std::forward<Function>(function)(&error) != FIW_OK) raise(error);
}

/// As above, without the GIL while the function runs.
template <class Function>
void call_unlocked(Function&& function) {
  call([&](fiw_error* error) {
    const nanobind::gil_scoped_release unlocked;
    return std::forward<Function>(function)(error);
  });
}

}  // namespace fiw::python
