// One-line throwing of fiw::Error with a formatted message.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "fiw/error.h"

namespace fiw {

/// A bad argument: nothing has been done yet.
template <class... Args>
[[noreturn]] void fail(Reason reason, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::kInvalidArgument, reason, fmt::format(format, std::forward<Args>(args)...));
}

/// A bad argument that belongs to one request.
template <class Index, class... Args>
[[noreturn]] void fail_at(Index request, Reason reason, fmt::format_string<Args...> format, Args&&... args) {
  Error error(Status::kInvalidArgument, reason, fmt::format(format, std::forward<Args>(args)...));
  throw error.at(static_cast<std::int64_t>(request));
}

/// Something this build or kernel set does not do.
template <class... Args>
[[noreturn]] void unsupported(Reason reason, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(Status::kUnsupported, reason, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fiw
