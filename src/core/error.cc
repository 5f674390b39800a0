// Names of the outcomes, as they appear in messages and in the C ABI.
#include "fiw/error.h"

namespace fiw {

std::string_view to_string(Status status) noexcept {
  switch (status) {
    case Status::kOk:
      return "OK";
    case Status::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Status::kUnsupported:
      return "UNSUPPORTED";
    case Status::kClosed:
      return "CLOSED";
    case Status::kBusy:
      return "BUSY";
    case Status::kStalePlan:
      return "STALE_PLAN";
    case Status::kFailed:
      return "FAILED";
    case Status::kOutOfMemory:
      return "OUT_OF_MEMORY";
    case Status::kWorkspaceTooSmall:
      return "WORKSPACE_TOO_SMALL";
    case Status::kUnavailable:
      return "UNAVAILABLE";
    case Status::kNoDevice:
      return "NO_DEVICE";
    case Status::kBackend:
      return "BACKEND";
    case Status::kInternal:
      return "INTERNAL";
  }
  return "unknown status";
}

}  // namespace fiw
