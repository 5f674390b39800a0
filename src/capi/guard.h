// The one gate between C++ exceptions and fiw_status: nothing is thrown past it.
#pragma once

#include "fiw/fiw.h"

namespace fiw::capi {

/// True when `err` can be used: null, or of a size this library knows. Otherwise says so in it, as far as it reaches.
bool accept(fiw_error* err) noexcept;
/// Clears `err` and returns FIW_OK.
fiw_status succeed(fiw_error* err) noexcept;
/// Puts the exception that is being handled into `err` and returns its status.
fiw_status report_exception(fiw_error* err) noexcept;

template <class Call>
fiw_status guard(fiw_error* err, const Call& call) noexcept {
  if (!accept(err)) return FIW_INVALID_ARGUMENT;
  try {
    call();
    return succeed(err);
  } catch (...) {
    return report_exception(err);
  }
}

}  // namespace fiw::capi
