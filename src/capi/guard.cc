// See guard.h.
#include "capi/guard.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "fiw/error.h"

namespace fiw::capi {
namespace {

fiw_status fill(fiw_error* err, Status status, Reason reason, std::string_view message) noexcept {
  const auto code = static_cast<fiw_status>(status);
  if (err == nullptr) return code;
  err->code = code;
  err->reason = static_cast<fiw_reason>(reason);
  err->backend_code = 0;
  err->reserved = 0;
  err->index = -1;
  err->bytes_required = 0;
  const std::size_t length = std::min(message.size(), sizeof(err->message) - 1);
  std::memcpy(err->message, message.data(), length);
  std::memset(err->message + length, 0, sizeof(err->message) - length);
  return code;
}

}  // namespace

bool accept(fiw_error* err) noexcept {
  if (err == nullptr || err->struct_size == sizeof(fiw_error)) return true;
  if (err->struct_size > sizeof(fiw_error)) {
    fill(err, Status::kInvalidArgument, Reason::kStructSize, "err.struct_size is larger than this library's fiw_error");
  }
  return false;
}

fiw_status succeed(fiw_error* err) noexcept { return fill(err, Status::kOk, Reason::kNone, ""); }

fiw_status report_exception(fiw_error* err) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    const fiw_status code = fill(err, error.status(), error.reason(), error.what());
    if (err != nullptr) {
      err->backend_code = error.backend_code();
      err->index = error.index();
      err->bytes_required = error.bytes_required();
    }
    return code;
  } catch (const std::bad_alloc&) {
    return fill(err, Status::kOutOfMemory, Reason::kAllocation, "host memory is exhausted");
  } catch (const std::exception& error) {
    return fill(err, Status::kInternal, Reason::kBug, error.what());
  } catch (...) {
    return fill(err, Status::kInternal, Reason::kBug, "an exception of unknown type");
  }
}

}  // namespace fiw::capi
