// What can go wrong, as one exception type that carries the same fields as the C ABI's `fiw_error`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fiw {

/// The few outcomes a caller branches on. Values are those of `fiw_status` and are never reused.
enum class Status : std::int32_t {
  kOk = 0,
  kInvalidArgument = 10,
  kUnsupported = 11,
  kClosed = 20,
  kBusy = 21,
  kStalePlan = 22,
  kFailed = 23,  ///< a sticky device fault: what enqueues work fails until the process ends; close() still works
  kOutOfMemory = 30,
  kWorkspaceTooSmall = 31,
  kUnavailable = 40,
  kNoDevice = 41,
  kBackend = 42,  ///< CUDA or NCCL reported an error; see `backend_code`
  kInternal = 90,
};

/// Why, in bands by theme; values are those of `fiw_reason` and are never reused.
enum class Reason : std::int32_t {
  kNone = 0,
  // page tables
  kTableNull = 100,
  kIndptrStart = 101,
  kIndptrDecreasing = 102,
  kIndptrLength = 103,
  kIndicesLength = 104,
  kPageIndex = 105,
  kLastPageLen = 106,
  kKvLens = 107,
  kPageSize = 108,
  kBatch = 109,
  kIndexType = 110,
  kTableSize = 111,
  kNewPages = 112,
  kQoIndptr = 113,
  // tensors
  kTensorNull = 200,
  kTensorRank = 201,
  kTensorShape = 202,
  kTensorStride = 203,
  kTensorDType = 204,
  kTensorDevice = 205,
  kTensorOverlap = 206,
  kTensorAlignment = 207,
  // attention parameters
  kHeadCount = 300,
  kHeadDim = 301,
  kScale = 302,
  kWindow = 303,
  kSoftCap = 304,
  kMask = 305,
  kSinks = 306,
  kAlibi = 307,
  kDTypeCombination = 308,
  kPartialStates = 309,
  // workspace and plans
  kClosedWorkspace = 400,
  kBusyWorkspace = 401,
  kStepMismatch = 402,
  kOptions = 403,
  kStructSize = 404,
  kAbiVersion = 405,
  kStaleTable = 406,
  // memory
  kAllocation = 500,
  kScratchTooSmall = 501,
  kSizeOverflow = 502,
  // devices
  kBackendNotBuilt = 600,
  kDeviceMissing = 601,
  kCudaCall = 602,
  kNcclCall = 603,
  kKernelNotBuilt = 604,
  // input files
  kFileOpen = 700,
  kFileFormat = 701,
  // ours
  kBug = 900,
};

/// "INVALID_ARGUMENT", "WORKSPACE_TOO_SMALL", ...
std::string_view to_string(Status status) noexcept;

/// Thrown by every C++ entry point. Nothing has been launched or changed when it is thrown for a bad argument.
class Error : public std::runtime_error {
 public:
  Error(Status status, Reason reason, const std::string& message)
      : runtime_error(message), status_(status), reason_(reason) {}

  /// Fluent setters for the fields that only some errors have.
  Error& at(std::int64_t index) noexcept {
    index_ = index;
    return *this;
  }
  Error& needs(std::size_t bytes) noexcept {
    bytes_required_ = bytes;
    return *this;
  }
  Error& backend(std::int32_t code) noexcept {
    backend_code_ = code;
    return *this;
  }

  Status status() const noexcept { return status_; }
  Reason reason() const noexcept { return reason_; }
  /// The offending request or rank; -1 when the error is not about one.
  std::int64_t index() const noexcept { return index_; }
  /// Bytes that would have sufficed; 0 unless the status is kWorkspaceTooSmall or kOutOfMemory.
  std::size_t bytes_required() const noexcept { return bytes_required_; }
  /// The cudaError_t or ncclResult_t behind a kBackend error, else 0.
  std::int32_t backend_code() const noexcept { return backend_code_; }

 private:
  Status status_;
  Reason reason_;
  std::int64_t index_ = -1;
  std::size_t bytes_required_ = 0;
  std::int32_t backend_code_ = 0;
};

}  // namespace fiw
