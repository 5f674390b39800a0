// Version, ABI check, and the numbers that C and C++ must share.
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "capi/guard.h"
#include "core/fail.h"
#include "fiw/fiw.h"
#include "fiw/types.h"

namespace {

using fiw::Reason;
using fiw::Status;

constexpr std::array<std::pair<Status, fiw_status>, 13> kStatuses{
    {{Status::kOk, FIW_OK},
     {Status::kInvalidArgument, FIW_INVALID_ARGUMENT},
     {Status::kUnsupported, FIW_UNSUPPORTED},
     {Status::kClosed, FIW_CLOSED},
     {Status::kBusy, FIW_BUSY},
     {Status::kStalePlan, FIW_STALE_PLAN},
     {Status::kFailed, FIW_FAILED},
     {Status::kOutOfMemory, FIW_OUT_OF_MEMORY},
     {Status::kWorkspaceTooSmall, FIW_WORKSPACE_TOO_SMALL},
     {Status::kUnavailable, FIW_UNAVAILABLE},
     {Status::kNoDevice, FIW_NO_DEVICE},
     {Status::kBackend, FIW_BACKEND},
     {Status::kInternal, FIW_INTERNAL}}};

constexpr std::array<std::pair<Reason, fiw_reason>, 51> kReasons{{
    {Reason::kNone, FIW_REASON_NONE},
    {Reason::kTableNull, FIW_REASON_TABLE_NULL},
    {Reason::kIndptrStart, FIW_REASON_INDPTR_START},
    {Reason::kIndptrDecreasing, FIW_REASON_INDPTR_DECREASING},
    {Reason::kIndptrLength, FIW_REASON_INDPTR_LENGTH},
    {Reason::kIndicesLength, FIW_REASON_INDICES_LENGTH},
    {Reason::kPageIndex, FIW_REASON_PAGE_INDEX},
    {Reason::kLastPageLen, FIW_REASON_LAST_PAGE_LEN},
    {Reason::kKvLens, FIW_REASON_KV_LENS},
    {Reason::kPageSize, FIW_REASON_PAGE_SIZE},
    {Reason::kBatch, FIW_REASON_BATCH},
    {Reason::kIndexType, FIW_REASON_INDEX_TYPE},
    {Reason::kTableSize, FIW_REASON_TABLE_SIZE},
    {Reason::kNewPages, FIW_REASON_NEW_PAGES},
    {Reason::kQoIndptr, FIW_REASON_QO_INDPTR},
    {Reason::kTensorNull, FIW_REASON_TENSOR_NULL},
    {Reason::kTensorRank, FIW_REASON_TENSOR_RANK},
    {Reason::kTensorShape, FIW_REASON_TENSOR_SHAPE},
    {Reason::kTensorStride, FIW_REASON_TENSOR_STRIDE},
    {Reason::kTensorDType, FIW_REASON_TENSOR_DTYPE},
    {Reason::kTensorDevice, FIW_REASON_TENSOR_DEVICE},
    {Reason::kTensorOverlap, FIW_REASON_TENSOR_OVERLAP},
    {Reason::kTensorAlignment, FIW_REASON_TENSOR_ALIGNMENT},
    {Reason::kHeadCount, FIW_REASON_HEAD_COUNT},
    {Reason::kHeadDim, FIW_REASON_HEAD_DIM},
    {Reason::kScale, FIW_REASON_SCALE},
    {Reason::kWindow, FIW_REASON_WINDOW},
    {Reason::kSoftCap, FIW_REASON_SOFT_CAP},
    {Reason::kMask, FIW_REASON_MASK},
    {Reason::kSinks, FIW_REASON_SINKS},
    {Reason::kAlibi, FIW_REASON_ALIBI},
    {Reason::kDTypeCombination, FIW_REASON_DTYPE_COMBINATION},
    {Reason::kPartialStates, FIW_REASON_PARTIAL_STATES},
    {Reason::kClosedWorkspace, FIW_REASON_CLOSED_WORKSPACE},
    {Reason::kBusyWorkspace, FIW_REASON_BUSY_WORKSPACE},
    {Reason::kStepMismatch, FIW_REASON_STEP_MISMATCH},
    {Reason::kOptions, FIW_REASON_OPTIONS},
    {Reason::kStructSize, FIW_REASON_STRUCT_SIZE},
    {Reason::kAbiVersion, FIW_REASON_ABI_VERSION},
    {Reason::kStaleTable, FIW_REASON_STALE_TABLE},
    {Reason::kAllocation, FIW_REASON_ALLOCATION},
    {Reason::kScratchTooSmall, FIW_REASON_SCRATCH_TOO_SMALL},
    {Reason::kSizeOverflow, FIW_REASON_SIZE_OVERFLOW},
    {Reason::kBackendNotBuilt, FIW_REASON_BACKEND_NOT_BUILT},
    {Reason::kDeviceMissing, FIW_REASON_DEVICE_MISSING},
    {Reason::kCudaCall, FIW_REASON_CUDA_CALL},
    {Reason::kNcclCall, FIW_REASON_NCCL_CALL},
    {Reason::kKernelNotBuilt, FIW_REASON_KERNEL_NOT_BUILT},
    {Reason::kFileOpen, FIW_REASON_FILE_OPEN},
    {Reason::kFileFormat, FIW_REASON_FILE_FORMAT},
    {Reason::kBug, FIW_REASON_BUG},
}};

template <class Pairs>
constexpr bool all_equal(const Pairs& pairs) {
  for (const auto& [cpp, c] : pairs) {
    if (static_cast<int>(cpp) != static_cast<int>(c)) return false;
  }
  return true;
}

static_assert(all_equal(kStatuses) && all_equal(kReasons));
static_assert(sizeof(fiw_status) == 4 && sizeof(fiw_reason) == 4);
static_assert(sizeof(DLDataType) == 4);

#define FIW_TEXT_(x) #x
#define FIW_TEXT(x) FIW_TEXT_(x)

}  // namespace

const char* fiw_version(void) {
  return FIW_TEXT(FIW_VERSION_MAJOR) "." FIW_TEXT(FIW_VERSION_MINOR) "." FIW_TEXT(FIW_VERSION_PATCH);
}

int32_t fiw_abi_version(void) { return FIW_ABI_VERSION; }

const char* fiw_status_name(fiw_status status) {
  std::int32_t code = 0;  // any number may come, and an enumeration must not hold one that it does not name
  std::memcpy(&code, &status, sizeof(code));
  return fiw::to_string(Status{code}).data();  // the names are literals, so their data is terminated
}

fiw_status fiw_check_abi(int32_t expected, fiw_error* err) {
  return fiw::capi::guard(err, [&] {
    if (expected != FIW_ABI_VERSION) {
      fiw::unsupported(Reason::kAbiVersion, "the caller was compiled for ABI version {}, the library has {}", expected,
                       FIW_ABI_VERSION);
    }
  });
}
