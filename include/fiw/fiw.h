// The C ABI of flashinfer-workspace. This header is the manual; docs/c-abi.md states the rules behind it on one page.
//
// ---- 1. INTRODUCTION ------------------------------------------------------------------------------------------------
//
// A workspace owns everything between an engine's scheduler and the attention kernels of one device (or one
// tensor-parallel rank): scratch memory, plans, and the caches that let one plan serve every layer of a step. A page
// table says which pages of the paged KV cache belong to which request. Attention calls take tensors as DLPack's
// `DLTensor`.
//
// One decode step of `layers` layers, for the batch that `table` describes, on the CPU (device -1):
//
//     fiw_status decode_step(const fiw_page_table* table, const DLTensor* q, const fiw_kv_cache* kv,
//                            const DLTensor* out, int32_t layers, fiw_error* err) {
//       fiw_workspace* ws = NULL;
//       fiw_attention_params params = FIW_ATTENTION_PARAMS_INIT;
//       params.num_qo_heads = 32;
//       params.num_kv_heads = 8;
//       params.head_dim_qk = 128;
//       fiw_status status = fiw_workspace_create(-1, 0, &ws, err);
//       for (int32_t i = 0; status == FIW_OK && i < layers; ++i) {
//         status = fiw_decode(ws, &q[i], &kv[i], table, &params, &out[i], NULL, NULL, NULL, err);
//       }
//       fiw_workspace_free(ws);
//       return status;
//     }
//
// The first layer's call makes the plan, the others find it in the cache. An engine keeps its workspace, of course.
//
// Rules that hold for every function, unless it says otherwise:
//
// Errors: a call that can fail returns `fiw_status` and takes a last `fiw_error*`, which may be null. All arguments are
// validated before any work, planning included: a call that fails for a bad argument has changed nothing, caches,
// scratch and counters included, and the workspace stays usable. When a call fails, its out parameters hold null
// (handles) or are untouched (structs, arrays). A handle is judged first (null, then closed, then busy), and only then
// the other arguments.
//
// Ownership: `*_create`, `*_from_*`, `*_copy` and `fiw_plan_*` hand out an owned handle through `out`; the caller gives
// it to the matching `*_free`, which accepts null. What is passed in is borrowed for the call: option structs and index
// arrays are read before it returns. On CUDA, the data of tensors must live until the stream has passed the call.
// Returned pointers are borrowed from the handle.
//
// Streams: `stream` is a `cudaStream_t` on CUDA, where the work is enqueued and ordered by it; null is the default
// stream. The CPU ignores it, and every call returns when its results are there.
//
// Threads: different handles may be used from different threads at once. A workspace, with its steps and graphs, takes
// one thread at a time: a second one gets FIW_BUSY and changes nothing. A page table may be read by many threads;
// advancing or freeing it excludes them. No state is kept per thread: a handle may move between threads.
//
// Units: lengths are tokens, strides are elements (as DLPack has them), sizes are bytes, the LSE is a natural
// logarithm.
//
// Tensors: `DLTensor`, any `byte_offset`, `strides` null (compact) or given with 1 for the last axis, on kDLCPU or
// {kDLCUDA, id}, aligned to their element. Element types are float32 {kDLFloat, 32, 1}, float16 {kDLFloat, 16, 1},
// bfloat16 {kDLBfloat, 16, 1} and, for K and V only, fp8 {FIW_DL_FLOAT8_E4M3FN, 8, 1} or {FIW_DL_FLOAT8_E5M2, 8, 1}.
// CUDA serves float32 as it is, too, by a kernel that is right rather than fast. A tensor without elements may have
// null data. Tensors that are written are passed as `const DLTensor*` as well: the view is const, its data is not.
//
// Index arrays: `DLTensor`, int32 {kDLInt, 32, 1}, rank 1, compact, on the CPU unless their struct says otherwise.
// 64-bit integers are an error, never converted.
//
// Structs: sized structs start with `struct_size`. Set them up by INIT macro or init function, then change fields. A
// size that this library does not know is an error with reason FIW_REASON_STRUCT_SIZE; `reserved` fields stay 0.
//
// Booleans: int32_t, 0 is false, anything else true; the library returns 0 or 1.
#ifndef FIW_FIW_H_
#define FIW_FIW_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FIW_API __attribute__((visibility("default")))
#else
#define FIW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- 2. VERSION ----------------------------------------------------------------------------------------------------

#define FIW_VERSION_MAJOR 0
#define FIW_VERSION_MINOR 1
#define FIW_VERSION_PATCH 0

/// Grows when a change breaks callers that were compiled against an older header. New functions, new enum values and
/// new fields at the end of sized structs do not break them.
#define FIW_ABI_VERSION 1

/// "major.minor.patch" of the library that is loaded. Static storage.
FIW_API const char* fiw_version(void);

/// The FIW_ABI_VERSION of the library that is loaded.
FIW_API int32_t fiw_abi_version(void);

// ---- 3. ERRORS -----------------------------------------------------------------------------------------------------

/// The few outcomes that a caller branches on. Values are fixed and never reused.
typedef enum fiw_status {
  FIW_OK = 0,
  FIW_INVALID_ARGUMENT = 10,
  FIW_UNSUPPORTED = 11,
  FIW_CLOSED = 20,
  FIW_BUSY = 21,        ///< another thread is in a call on the same workspace; nothing was changed
  FIW_STALE_PLAN = 22,  ///< a captured graph met a page table that its plan was not made for
  FIW_FAILED = 23,      ///< a sticky device fault: what enqueues work fails until the process ends; close and free work
  FIW_OUT_OF_MEMORY = 30,
  FIW_WORKSPACE_TOO_SMALL = 31,  ///< a fixed-size workspace; `bytes_required` would do
  FIW_UNAVAILABLE = 40,          ///< the backend is not compiled in
  FIW_NO_DEVICE = 41,
  FIW_BACKEND = 42,  ///< CUDA or NCCL reported an error: `backend_code`
  FIW_INTERNAL = 90
} fiw_status;

/// Why, in bands by theme. Values are fixed and never reused.
typedef enum fiw_reason {
  FIW_REASON_NONE = 0,
  // page tables
  FIW_REASON_TABLE_NULL = 100,
  FIW_REASON_INDPTR_START = 101,
  FIW_REASON_INDPTR_DECREASING = 102,
  FIW_REASON_INDPTR_LENGTH = 103,
  FIW_REASON_INDICES_LENGTH = 104,
  FIW_REASON_PAGE_INDEX = 105,
  FIW_REASON_LAST_PAGE_LEN = 106,
  FIW_REASON_KV_LENS = 107,
  FIW_REASON_PAGE_SIZE = 108,
  FIW_REASON_BATCH = 109,
  FIW_REASON_INDEX_TYPE = 110,
  FIW_REASON_TABLE_SIZE = 111,
  FIW_REASON_NEW_PAGES = 112,
  FIW_REASON_QO_INDPTR = 113,
  // tensors
  FIW_REASON_TENSOR_NULL = 200,
  FIW_REASON_TENSOR_RANK = 201,
  FIW_REASON_TENSOR_SHAPE = 202,
  FIW_REASON_TENSOR_STRIDE = 203,
  FIW_REASON_TENSOR_DTYPE = 204,
  FIW_REASON_TENSOR_DEVICE = 205,
  FIW_REASON_TENSOR_OVERLAP = 206,
  FIW_REASON_TENSOR_ALIGNMENT = 207,
  // attention parameters
  FIW_REASON_HEAD_COUNT = 300,
  FIW_REASON_HEAD_DIM = 301,
  FIW_REASON_SCALE = 302,
  FIW_REASON_WINDOW = 303,
  FIW_REASON_SOFT_CAP = 304,
  FIW_REASON_MASK = 305,
  FIW_REASON_SINKS = 306,
  FIW_REASON_ALIBI = 307,
  FIW_REASON_DTYPE_COMBINATION = 308,
  FIW_REASON_PARTIAL_STATES = 309,
  // workspaces and plans
  FIW_REASON_CLOSED_WORKSPACE = 400,
  FIW_REASON_BUSY_WORKSPACE = 401,
  FIW_REASON_STEP_MISMATCH = 402,
  FIW_REASON_OPTIONS = 403,  ///< also a null handle, struct or out parameter
  FIW_REASON_STRUCT_SIZE = 404,
  FIW_REASON_ABI_VERSION = 405,
  FIW_REASON_STALE_TABLE = 406,
  // memory
  FIW_REASON_ALLOCATION = 500,
  FIW_REASON_SCRATCH_TOO_SMALL = 501,
  FIW_REASON_SIZE_OVERFLOW = 502,
  // devices
  FIW_REASON_BACKEND_NOT_BUILT = 600,
  FIW_REASON_DEVICE_MISSING = 601,
  FIW_REASON_CUDA_CALL = 602,
  FIW_REASON_NCCL_CALL = 603,
  FIW_REASON_KERNEL_NOT_BUILT = 604,
  // input files
  FIW_REASON_FILE_OPEN = 700,
  FIW_REASON_FILE_FORMAT = 701,
  // the library's own
  FIW_REASON_BUG = 900
} fiw_reason;

/// What went wrong. Filled by every call that gets one: after a success it holds FIW_OK, FIW_REASON_NONE and an empty
/// message.
///
/// A `struct_size` above the known one gets the known fields; one below it gets nothing. In both cases the call returns
/// FIW_INVALID_ARGUMENT without having done anything.
typedef struct fiw_error {
  size_t struct_size;
  fiw_status code;          ///< what the call returned
  fiw_reason reason;        ///< why
  int32_t backend_code;     ///< the cudaError_t or ncclResult_t behind FIW_BACKEND, else 0
  int32_t reserved;         ///< 0
  int64_t index;            ///< the offending request or rank; -1 when the error is not about one
  uint64_t bytes_required;  ///< bytes that would have sufficed, else 0
  char message[256];        ///< names the argument, its value and what was expected; always terminated
} fiw_error;

#define FIW_ERROR_INIT                                             \
  {                                                                \
    sizeof(fiw_error), FIW_OK, FIW_REASON_NONE, 0, 0, -1, 0, { 0 } \
  }

/// Every init function writes what the struct's INIT macro holds, and no more than `struct_size` bytes: pass sizeof of
/// the struct that you compiled with. It records the size, known or not; a call that is given an unknown one reports
/// it. Accepts a null struct. Cannot fail; thread-safe.
FIW_API void fiw_error_init(fiw_error* error, size_t struct_size);

/// "OK", "INVALID_ARGUMENT", "WORKSPACE_TOO_SMALL", ... Static storage; never null.
FIW_API const char* fiw_status_name(fiw_status status);

/// Call this first with FIW_ABI_VERSION: FIW_UNSUPPORTED (reason ABI_VERSION, both numbers in the message) when the
/// library that is loaded does not serve callers of that ABI version.
FIW_API fiw_status fiw_check_abi(int32_t expected, fiw_error* err);

// ---- 4. WORKSPACE --------------------------------------------------------------------------------------------------

/// Scratch memory, plans and plan caches of one device or tensor-parallel rank. `fiw::FlashInferWorkspace::handle()` is
/// one, too: good for every call here until close(), but owned by the C++ object, so never given to fiw_workspace_free.
typedef struct fiw_workspace fiw_workspace;

/// Kinds of device. Device indices are CUDA ordinals; the CPU is -1.
typedef enum fiw_device_kind { FIW_DEVICE_CPU = 0, FIW_DEVICE_CUDA = 1 } fiw_device_kind;

/// DLPack 1.1's type codes for fp8 and booleans, for use with older dlpack.h.
#define FIW_DL_BOOL 6
#define FIW_DL_FLOAT8_E4M3FN 10
#define FIW_DL_FLOAT8_E5M2 12

/// The values that shape an attention call; every one is part of a plan's key.
///
/// For query position p of request r, with q_pos = kv_len - qo_len + p and key position j:
///
///     s_j = sm_scale * <q_p, k_j>              the scaled dot product
///     s_j = s_j + slope_h * (j - q_pos)        ALiBi, if slopes are given
///     s_j = cap * tanh(s_j / cap)              logits soft cap, if it is > 0
///     visible: j <= q_pos if causal; j >= q_pos - window_left if window_left >= 0; the mask's bit, if a mask is given
///     out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))
///     lse = log(sum_j exp(s_j) + exp(sink_h))
///
/// A row that sees no key gives out = 0 and lse = -infinity, with or without a sink. NaN in a key makes out and lse NaN
/// for the rows that see it, and for no others.
typedef struct fiw_attention_params {
  size_t struct_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;   ///< divides num_qo_heads; query head h reads KV head h / (num_qo_heads / num_kv_heads)
  int32_t head_dim_qk;    ///< a multiple of 8, at most 576
  int32_t head_dim_vo;    ///< 0: as head_dim_qk
  float sm_scale;         ///< at most 1e30; <= 0: 1 / sqrt(head_dim_qk)
  int32_t causal;         ///< boolean; ignored where a custom mask is given: the mask says all
  int32_t window_left;    ///< keys that a query sees before its own position; -1: all
  float logits_soft_cap;  ///< 0: off
} fiw_attention_params;

#define FIW_ATTENTION_PARAMS_INIT \
  { sizeof(fiw_attention_params), 0, 0, 0, 0, 0.0f, 1, -1, 0.0f }

FIW_API void fiw_attention_params_init(fiw_attention_params* params, size_t struct_size);

/// The largest work that a workspace will be asked for, so that its scratch is sized once at start.
typedef struct fiw_workspace_limits {
  size_t struct_size;
  const fiw_attention_params* params;  ///< the widest layer; required
  int32_t max_batch;                   ///< requests in one call
  int32_t max_total_qo;                ///< query rows in one prefill call; 0: no prefill
  int32_t max_verify_window;           ///< tokens a request in a verify call; 0: no verify
  int32_t max_kv_len;                  ///< tokens of one request
  int32_t page_size;
  DLDataType kv_dtype;
  int32_t graph;     ///< boolean: decode and verify run from captured graphs, whose grids are padded
  int32_t reserved;  ///< 0
} fiw_workspace_limits;

#define FIW_WORKSPACE_LIMITS_INIT \
  { sizeof(fiw_workspace_limits), NULL, 0, 0, 0, 0, 16, {kDLBfloat, 16, 1}, 0, 0 }

FIW_API void fiw_workspace_limits_init(fiw_workspace_limits* limits, size_t struct_size);

/// How plans are made. Part of every plan's key.
typedef struct fiw_plan_options {
  size_t struct_size;
  int32_t
      batch_invariant;  ///< boolean: cut every request's keys at multiples of `fixed_split_tokens`, whatever else is
                        ///< in the batch: its result is then the same bit for bit in any batch, on any thread count
  int32_t fixed_split_tokens;
} fiw_plan_options;

#define FIW_PLAN_OPTIONS_INIT \
  { sizeof(fiw_plan_options), 0, 2048 }

FIW_API void fiw_plan_options_init(fiw_plan_options* options, size_t struct_size);

/// Memory from the caller's own pool, in place of cudaMallocAsync and cudaFreeAsync, or of the heap on the CPU: all
/// scratch, plans and copies of page tables on the device. Pinned host memory for uploads is not asked for here.
///
/// Both callbacks must be set, may be called from any thread that calls the workspace or frees a step, and must neither
/// throw nor call back into the workspace. They, and `context`, must live until the workspace and its steps are gone.
typedef struct fiw_allocator {
  size_t struct_size;
  /// At least `bytes` (> 0) on the workspace's device, at a multiple of `alignment`; null: out of memory. On CUDA that
  /// device is current, `stream` is never null (the workspace has one of its own for calls without), and the memory is
  /// for work that is enqueued on it from now on.
  void* (*allocate)(void* context, size_t bytes, size_t alignment, void* stream);
  /// Takes back what `allocate` gave for `bytes`. On CUDA, work that `stream` holds already may still use it: what is
  /// enqueued there later may not.
  void (*free)(void* context, void* memory, size_t bytes, void* stream);
  void* context;  ///< passed through
} fiw_allocator;

#define FIW_ALLOCATOR_INIT \
  { sizeof(fiw_allocator), NULL, NULL, NULL }

FIW_API void fiw_allocator_init(fiw_allocator* allocator, size_t struct_size);

/// Which CUDA kernels serve a call, wherever they can. For tests and measurements.
typedef enum fiw_cuda_route {
  FIW_CUDA_ROUTE_UNSET = -1,        ///< as FIW_CUDA_ROUTE in the environment says at create, or the table
  FIW_CUDA_ROUTE_TABLE = 0,         ///< what is expected to take the least time
  FIW_CUDA_ROUTE_CORE = 1,          ///< FlashInfer's CUDA-core decode
  FIW_CUDA_ROUTE_TILE = 2,          ///< FlashInfer's FA2 tiles
  FIW_CUDA_ROUTE_HOPPER = 3,        ///< FA3 over contiguous K and V
  FIW_CUDA_ROUTE_HOPPER_PAGED = 4,  ///< FA3 over pages
  FIW_CUDA_ROUTE_ANY = 5,           ///< the general kernel, which serves everything
  FIW_CUDA_ROUTE_STREAM = 6,        ///< our own decode and verify kernels
  FIW_CUDA_ROUTE_PREFILL = 7        ///< our own prefill kernels
} fiw_cuda_route;

typedef struct fiw_workspace_options {
  size_t struct_size;
  size_t workspace_bytes;              ///< float scratch hint; 0: sized from `limits`, else a default that grows
  const fiw_workspace_limits* limits;  ///< null: not declared
  const fiw_plan_options* plan;        ///< null: the defaults
  const fiw_allocator* allocator;      ///< null: the backend's own
  int32_t fixed_size;                  ///< boolean: never grow; what does not fit is FIW_WORKSPACE_TOO_SMALL
  int32_t num_threads;                 ///< CPU only; 0: OpenMP's default
  int32_t cache_entries;               ///< plans kept in each of the three scopes, and device page tables, 1..1024
  int32_t verify_cuda_graph;  ///< captured verify graphs: 0 off, 1 on, -1 as SMILE_VERIFY_CUDA_GRAPH says at create;
                              ///< without effect on the CPU
  int32_t cuda_route;         ///< a fiw_cuda_route; without effect on the CPU
  int32_t reserved;           ///< 0
} fiw_workspace_options;

#define FIW_WORKSPACE_OPTIONS_INIT \
  { sizeof(fiw_workspace_options), 0, NULL, NULL, NULL, 0, 0, 16, -1, FIW_CUDA_ROUTE_UNSET, 0 }

FIW_API void fiw_workspace_options_init(fiw_workspace_options* options, size_t struct_size);

/// True when this build has a backend for `kind` (a fiw_device_kind). Thread-safe.
FIW_API int32_t fiw_compiled_with(int32_t kind);

/// A workspace on CUDA device `device_index`, or on the CPU (-1). `workspace_bytes` is a hint for the float scratch; 0:
/// a default that grows. The current CUDA device is left as found.
///
/// Ownership: `*out` is freed by fiw_workspace_free. Errors: FIW_UNAVAILABLE and a null `*out` when that backend is not
/// compiled in; FIW_NO_DEVICE; FIW_OUT_OF_MEMORY.
FIW_API fiw_status fiw_workspace_create(int32_t device_index, size_t workspace_bytes, fiw_workspace** out,
                                        fiw_error* err);

/// As fiw_workspace_create, with all options. `options` is read before the call returns; null: the defaults.
FIW_API fiw_status fiw_workspace_create_with_options(int32_t device_index, const fiw_workspace_options* options,
                                                     fiw_workspace** out, fiw_error* err);

/// Frees what the workspace holds once the work that uses it is done. The handle stays valid: attention calls then
/// return FIW_CLOSED. Closing twice, or null, does nothing.
FIW_API void fiw_workspace_close(fiw_workspace* ws);

/// Closes the workspace and frees the handle. Accepts null. No other thread may be using the handle.
FIW_API void fiw_workspace_free(fiw_workspace* ws);

/// True after close, and for null.
FIW_API int32_t fiw_workspace_closed(const fiw_workspace* ws);

/// Drops decode and prefill plans, on CUDA with the K/V gathered for prefills, and the versions of device page tables;
/// the verify plan stays. Like the two below: for callers who want memory back or a clean slate, never needed for right
/// results. Steps that were handed out keep their plans.
///
/// FIW_OK without effect on null and on a closed workspace. Errors: FIW_BUSY.
FIW_API fiw_status fiw_workspace_invalidate_runtime_cache(fiw_workspace* ws, fiw_error* err);

/// Drops prefill plans, and what was gathered for them, only; decode plans stay.
FIW_API fiw_status fiw_workspace_invalidate_prefill_runtime_cache(fiw_workspace* ws, fiw_error* err);

/// Drops verify plans only.
FIW_API fiw_status fiw_workspace_invalidate_verify_runtime_cache(fiw_workspace* ws, fiw_error* err);

/// The index that the workspace was created with. Also after close. Errors: a null argument.
FIW_API fiw_status fiw_workspace_device_index(const fiw_workspace* ws, int32_t* device_index, fiw_error* err);

/// True when captured verify graphs are on. False for null.
FIW_API int32_t fiw_workspace_verify_cuda_graph(const fiw_workspace* ws);

// ---- 5. PAGE TABLES ------------------------------------------------------------------------------------------------

/// CSR over pages: request i owns pages indices[indptr[i] .. indptr[i+1]), and its last page holds last_page_len[i]
/// tokens. A handle to immutable contents, which steps share; pages may be shared by several requests (prefix reuse).
/// Owns its arrays.
typedef struct fiw_page_table fiw_page_table;

/// From host CSR arrays, copied and validated once.
///
/// Shapes: `indptr` [batch + 1], starts at 0, does not decrease; `indices` [indptr[batch]], page ids in [0, num_pages);
/// `last_page_len` [batch], in 1..page_size for a request with pages, ignored for one without (its length is 0);
/// `kv_lens` [batch] tokens or null: if given, must equal the lengths that the CSR form implies (a surplus page is
/// otherwise invisible). Errors: FIW_INVALID_ARGUMENT naming request, value and limit, with the request in `index`.
FIW_API fiw_status fiw_page_table_from_csr(int32_t page_size, int64_t num_pages, const DLTensor* indptr,
                                           const DLTensor* indices, const DLTensor* last_page_len,
                                           const DLTensor* kv_lens, fiw_page_table** out, fiw_error* err);

/// From each request's list of pages, one after the other: `pages` [sum of page_counts], `page_counts` [batch],
/// `kv_lens` [batch] tokens. Request i uses the first ceil(kv_lens[i] / page_size) pages of its list; more are ignored
/// (pages reserved ahead), fewer are an error.
FIW_API fiw_status fiw_page_table_from_pages(int32_t page_size, int64_t num_pages, const DLTensor* pages,
                                             const DLTensor* page_counts, const DLTensor* kv_lens, fiw_page_table** out,
                                             fiw_error* err);

/// From the padded form that other engines hold: `blocks` int32 [batch, max_pages], any row stride, and `kv_lens`
/// [batch] tokens. Row i uses its first ceil(kv_lens[i] / page_size) entries; the rest is not read, whatever lies
/// there.
FIW_API fiw_status fiw_page_table_from_block_table(int32_t page_size, int64_t num_pages, const DLTensor* blocks,
                                                   const DLTensor* kv_lens, fiw_page_table** out, fiw_error* err);

/// A page table that lies on a workspace's device, as an engine's kernels write it.
typedef struct fiw_device_page_table {
  size_t struct_size;
  int32_t page_size;
  int32_t reserved;               ///< 0
  int64_t num_pages;              ///< page ids are below it
  const DLTensor* indptr;         ///< int32 [batch + 1]; the three arrays lie on the workspace's device
  const DLTensor* indices;        ///< int32 [indptr[batch]], or more: what follows is ignored
  const DLTensor* last_page_len;  ///< int32 [batch]
  /// The caller's word for the contents: whoever changes them gives them a version that these arrays, of these lengths,
  /// have not had before. 0: no word is given, and the contents themselves are compared.
  uint64_t version;
} fiw_device_page_table;

#define FIW_DEVICE_PAGE_TABLE_INIT \
  { sizeof(fiw_device_page_table), 1, 0, 0, NULL, NULL, NULL, 0 }

FIW_API void fiw_device_page_table_init(fiw_device_page_table* table, size_t struct_size);

/// From device memory, once a step. Where these very arrays were read before by `ws` with this version, and it is not
/// 0: what was read then, at once. Else the arrays are copied to the host in the order of `stream` and the call waits
/// for that, so it is not for streams under capture. Contents equal to those of a table read before share that table,
/// so that all layers of the step find its plans and device copies without comparing; others are validated as
/// fiw_page_table_from_csr does, so that nothing is launched with a page outside the cache. Once read, the arrays may
/// change. Errors: also FIW_CLOSED, FIW_BUSY.
FIW_API fiw_status fiw_page_table_from_device(fiw_workspace* ws, const fiw_device_page_table* table,
                                              fiw_page_table** out, void* stream, fiw_error* err);

/// Writes the padded form into the caller's `blocks` int32 [batch, max_pages], where max_pages is at least what the
/// longest request needs, padded with `pad`, and the lengths in tokens into `kv_lens` int32 [batch] (may be null).
FIW_API fiw_status fiw_page_table_to_block_table(const fiw_page_table* table, int32_t pad, const DLTensor* blocks,
                                                 const DLTensor* kv_lens, fiw_error* err);

/// A second handle to the same contents; cheap. Advancing one leaves the other as it is.
FIW_API fiw_status fiw_page_table_copy(const fiw_page_table* table, fiw_page_table** out, fiw_error* err);

/// Every request grows by `tokens` (>= 0). `new_pages` lists the pages gained, in request order, and must hold exactly
/// fiw_page_table_pages_needed(table, tokens) of them; null: none. Steps planned before keep the old table. Pointers
/// that the getters returned before are no longer valid.
FIW_API fiw_status fiw_page_table_advance(fiw_page_table* table, int32_t tokens, const DLTensor* new_pages,
                                          fiw_error* err);

/// As above with a growth for each request, `tokens` [batch].
FIW_API fiw_status fiw_page_table_advance_each(fiw_page_table* table, const DLTensor* tokens, const DLTensor* new_pages,
                                               fiw_error* err);

/// Accepts null.
FIW_API void fiw_page_table_free(fiw_page_table* table);

/// Pages that advancing by `tokens` would take. Like the getters below: 0 (arrays: null) for a null table.
FIW_API int64_t fiw_page_table_pages_needed(const fiw_page_table* table, int32_t tokens);
FIW_API int32_t fiw_page_table_batch(const fiw_page_table* table);       ///< requests
FIW_API int32_t fiw_page_table_page_size(const fiw_page_table* table);   ///< tokens a page
FIW_API int64_t fiw_page_table_num_pages(const fiw_page_table* table);   ///< the pool that indices were checked against
FIW_API int64_t fiw_page_table_total_kv(const fiw_page_table* table);    ///< tokens of all requests
FIW_API int32_t fiw_page_table_max_kv_len(const fiw_page_table* table);  ///< tokens of the longest request

/// The arrays of the table, borrowed until it is advanced or freed.
FIW_API const int32_t* fiw_page_table_indptr(const fiw_page_table* table);   ///< [batch + 1]
FIW_API const int32_t* fiw_page_table_indices(const fiw_page_table* table);  ///< [indptr[batch]]
FIW_API const int32_t* fiw_page_table_last_page_len(
    const fiw_page_table* table);  ///< [batch]; 0 for a request with no page
FIW_API const int32_t* fiw_page_table_page_counts(const fiw_page_table* table);  ///< [batch] pages
FIW_API const int32_t* fiw_page_table_kv_lens(const fiw_page_table* table);      ///< [batch] tokens

/// True for equal contents (pages, lengths, page size), and for two nulls.
FIW_API int32_t fiw_page_table_equal(const fiw_page_table* a, const fiw_page_table* b);

// ---- 6. ATTENTION --------------------------------------------------------------------------------------------------

/// How a page of the cache orders its axes.
typedef enum fiw_kv_layout {
  FIW_LAYOUT_NHD = 0,  ///< [num_pages, page_size, num_kv_heads, head_dim]
  FIW_LAYOUT_HND = 1   ///< [num_pages, num_kv_heads, page_size, head_dim]
} fiw_kv_layout;

/// A view of one layer's paged K and V. Owns nothing; any strides, the last axis contiguous.
///
/// Either `k` and `v` (rank 4, alike but for head_dim), or `kv` (rank 5, [num_pages, 2, ...]: each page holds its K and
/// then its V) with `k` and `v` null. fp8 caches store value / scale, and attention multiplies the scale back. A
/// per-head scale, float32 [num_kv_heads] on the workspace's device, multiplies the per-tensor one; null: none. Slots
/// past a request's length may hold anything, NaN too: they never reach a result. Attention reads through any strides
/// of at least head_dim: slots may share memory, and V may lie in K. fiw_append_kv writes, and refuses such a cache.
typedef struct fiw_kv_cache {
  size_t struct_size;
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* kv;
  const DLTensor* k_head_scale;
  const DLTensor* v_head_scale;
  float k_scale;
  float v_scale;
  int32_t layout;    ///< a fiw_kv_layout
  int32_t reserved;  ///< 0
} fiw_kv_cache;

#define FIW_KV_CACHE_INIT \
  { sizeof(fiw_kv_cache), NULL, NULL, NULL, NULL, NULL, 1.0f, 1.0f, FIW_LAYOUT_NHD, 0 }

FIW_API void fiw_kv_cache_init(fiw_kv_cache* cache, size_t struct_size);

/// Inputs that may differ from layer to layer without a new plan; each may be null. All lie on the workspace's device.
typedef struct fiw_attention_extras {
  size_t struct_size;
  const DLTensor* sinks;         ///< float32 [num_qo_heads], logits; -inf switches a head's sink off
  const DLTensor* alibi_slopes;  ///< float32 [num_qo_heads], finite
  const DLTensor* mask;          ///< uint8 [bytes], as fiw_pack_mask writes it; with `mask_indptr` or not at all
  const DLTensor* mask_indptr;   ///< int32 [batch + 1], byte offsets
} fiw_attention_extras;

#define FIW_ATTENTION_EXTRAS_INIT \
  { sizeof(fiw_attention_extras), NULL, NULL, NULL, NULL }

FIW_API void fiw_attention_extras_init(fiw_attention_extras* extras, size_t struct_size);

/// One query token for each request of the table: q [batch, num_qo_heads, head_dim_qk], out [batch, num_qo_heads,
/// head_dim_vo] of q's type, `lse` float32 [batch, num_qo_heads] compact or null, `extras` or null. Out and lse share
/// no memory with each other or with anything that is read, and no two elements of out share theirs.
///
/// Finds the plan in the workspace's cache or makes it. Errors: FIW_INVALID_ARGUMENT naming the argument;
/// FIW_UNSUPPORTED; FIW_CLOSED; FIW_BUSY; FIW_WORKSPACE_TOO_SMALL; FIW_OUT_OF_MEMORY. The same holds for the calls that
/// follow.
FIW_API fiw_status fiw_decode(fiw_workspace* ws, const DLTensor* q, const fiw_kv_cache* kv, const fiw_page_table* table,
                              const fiw_attention_params* params, const DLTensor* out, const DLTensor* lse,
                              const fiw_attention_extras* extras, void* stream, fiw_error* err);

/// The last qo_len tokens of each request, ragged: `qo_indptr` [batch + 1] starts at 0, and request r's queries are
/// rows qo_indptr[r] .. qo_indptr[r+1) of q and out (0 rows are legal). The cache must already hold their keys: see
/// fiw_append_kv.
FIW_API fiw_status fiw_prefill(fiw_workspace* ws, const DLTensor* q, const DLTensor* qo_indptr, const fiw_kv_cache* kv,
                               const fiw_page_table* table, const fiw_attention_params* params, const DLTensor* out,
                               const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err);

/// The last `window` tokens (1..64) of every request, as speculative decoding checks them: request r's queries are the
/// rows from r * window on. With a mask: a tree of drafts.
FIW_API fiw_status fiw_verify(fiw_workspace* ws, const DLTensor* q, int32_t window, const fiw_kv_cache* kv,
                              const fiw_page_table* table, const fiw_attention_params* params, const DLTensor* out,
                              const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err);

/// Attention over k [total_kv, num_kv_heads, head_dim_qk] and v [total_kv, num_kv_heads, head_dim_vo] with no cache;
/// `kv_indptr` [batch + 1] cuts their rows into requests as `qo_indptr` cuts those of q.
FIW_API fiw_status fiw_ragged_prefill(fiw_workspace* ws, const DLTensor* q, const DLTensor* qo_indptr,
                                      const DLTensor* k, const DLTensor* v, const DLTensor* kv_indptr,
                                      const fiw_attention_params* params, const DLTensor* out, const DLTensor* lse,
                                      const fiw_attention_extras* extras, void* stream, fiw_error* err);

/// Writes new tokens into the cache: rows append_indptr[r] .. append_indptr[r+1) of k and v become the last tokens of
/// request r, whose `table` entry already counts them. Converts to the cache's type, dividing by its scales, rounding
/// to nearest even and saturating (fp8, float16). A page that two requests share must not be appended to through both.
/// No two slots of the cache may share memory, of K, of V or of one each, nor may k and v lie in it; K and V may
/// interleave.
FIW_API fiw_status fiw_append_kv(fiw_workspace* ws, const DLTensor* k, const DLTensor* v, const DLTensor* append_indptr,
                                 const fiw_kv_cache* kv, const fiw_page_table* table, void* stream, fiw_error* err);

/// Combines attention over disjoint sets of keys into attention over their union. `part_outs` and `part_lses` are
/// arrays of `num_parts` (>= 1) tensors: outs [rows, num_qo_heads, head_dim_vo] and float32 lses [rows, num_qo_heads].
/// All parts and `out` have equal shapes and types; `out` and `lse` may be those of a part, and otherwise share no
/// memory with any. Parts with lse -inf carry no weight. `lse` may be null.
FIW_API fiw_status fiw_merge_states(fiw_workspace* ws, const DLTensor* const* part_outs,
                                    const DLTensor* const* part_lses, int32_t num_parts, const DLTensor* out,
                                    const DLTensor* lse, void* stream, fiw_error* err);

/// Fills `slopes`, float32 [num_qo_heads] on the CPU, with the usual ALiBi slopes for that many heads. Thread-safe.
FIW_API fiw_status fiw_alibi_slopes(const DLTensor* slopes, fiw_error* err);

/// Bytes of the packed mask for these lengths: the sum of ceil(qo_lens[r] * kv_lens[r] / 8). Both int32 [batch].
/// Thread-safe.
FIW_API fiw_status fiw_packed_mask_bytes(const DLTensor* qo_lens, const DLTensor* kv_lens, size_t* bytes,
                                         fiw_error* err);

/// Packs `booleans`, uint8 or bool [sum of qo_lens[r] * kv_lens[r]] (nonzero: visible), into bits: bit (p * kv_lens[r]
/// + j) of request r lies at mask[mask_indptr[r] + bit / 8] >> (bit % 8) & 1. Writes `mask`, uint8
/// [fiw_packed_mask_bytes], and `mask_indptr`, int32 [batch + 1], both the caller's. All on the CPU. Thread-safe.
FIW_API fiw_status fiw_pack_mask(const DLTensor* booleans, const DLTensor* qo_lens, const DLTensor* kv_lens,
                                 const DLTensor* mask, const DLTensor* mask_indptr, fiw_error* err);

// ---- 7. PLANS AND STEPS --------------------------------------------------------------------------------------------

/// Element types and options of a step's calls, fixed when it is planned.
typedef struct fiw_step_spec {
  size_t struct_size;
  const fiw_attention_params* params;  ///< required
  DLDataType q_dtype;                  ///< of q and out
  DLDataType kv_dtype;
  int32_t lse;          ///< boolean: runs may ask for the LSE
  int32_t sinks;        ///< boolean: runs pass sinks
  int32_t alibi;        ///< boolean: runs pass alibi_slopes
  int32_t custom_mask;  ///< boolean: runs pass mask and mask_indptr
} fiw_step_spec;

#define FIW_STEP_SPEC_INIT \
  { sizeof(fiw_step_spec), NULL, {kDLBfloat, 16, 1}, {kDLBfloat, 16, 1}, 0, 0, 0, 0 }

FIW_API void fiw_step_spec_init(fiw_step_spec* spec, size_t struct_size);

/// A planned step: run it once a layer. It keeps its plan and page table alive, works on after an invalidate call, and
/// may outlive its workspace: fiw_step_run then returns FIW_CLOSED. Shares the workspace's one-thread-at-a-time rule.
typedef struct fiw_step fiw_step;

/// What a step was planned as.
typedef struct fiw_plan_info {
  size_t struct_size;
  int32_t batch;
  int32_t items;            ///< work items before the kernel's own second grid axis
  int32_t padded_items;     ///< grid size under graphs; else equal to items
  int32_t kv_chunk_tokens;  ///< keys that an item covers; 0: all of a request's
  int32_t tile_rows;        ///< packed (token, head) rows of a query tile; 0: one tile a request
  int32_t split_kv;         ///< boolean
  int32_t cache_hit;        ///< boolean: found, not made, by the call that returned the step
  int32_t reserved;         ///< 0
  uint64_t schedule_bytes;  ///< the plan's own slice of int scratch
  uint64_t scratch_bytes;   ///< float scratch that running it takes
} fiw_plan_info;

#define FIW_PLAN_INFO_INIT \
  { sizeof(fiw_plan_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

FIW_API void fiw_plan_info_init(fiw_plan_info* info, size_t struct_size);

/// Plans a step of one query token a request: validates, looks the plan up or makes it. The step shares the table's
/// contents, so the table may be advanced or freed at once. Free `*out` with fiw_step_free.
///
/// Errors: as fiw_decode.
FIW_API fiw_status fiw_plan_decode(fiw_workspace* ws, const fiw_page_table* table, const fiw_step_spec* spec,
                                   fiw_step** out, fiw_error* err);

/// Plans a step of the last qo_len tokens of each request; see fiw_prefill.
FIW_API fiw_status fiw_plan_prefill(fiw_workspace* ws, const DLTensor* qo_indptr, const fiw_page_table* table,
                                    const fiw_step_spec* spec, fiw_step** out, fiw_error* err);

/// Plans a step of the last `window` tokens (1..64) of every request; see fiw_verify.
FIW_API fiw_status fiw_plan_verify(fiw_workspace* ws, int32_t window, const fiw_page_table* table,
                                   const fiw_step_spec* spec, fiw_step** out, fiw_error* err);

/// One layer of a planned step; tensors as in fiw_decode, fiw_prefill or fiw_verify. Looks nothing up and plans
/// nothing. Errors: FIW_INVALID_ARGUMENT (reason STEP_MISMATCH or a tensor's) for tensors that differ from what was
/// planned; FIW_CLOSED; FIW_BUSY.
FIW_API fiw_status fiw_step_run(const fiw_step* step, const DLTensor* q, const fiw_kv_cache* kv, const DLTensor* out,
                                const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err);

/// Fills `info`, whose struct_size the caller has set.
FIW_API fiw_status fiw_step_info(const fiw_step* step, fiw_plan_info* info, fiw_error* err);

/// Accepts null.
FIW_API void fiw_step_free(fiw_step* step);

// ---- 8. GRAPHS -----------------------------------------------------------------------------------------------------

/// Decode or verify steps that are captured once a batch bucket and replayed with other page tables; see
/// docs/graphs.md. Owns its plan, its copy of the page table and its scratch. Shares its workspace's
/// one-thread-at-a-time rule, may outlive it (calls then return FIW_CLOSED), and must outlive the work it enqueued and
/// the graphs that recorded it.
///
/// On the CPU nothing is captured: fiw_graph_capture calls `body` to have its calls checked, and a replay calls it
/// again, when fiw_graph_run and fiw_graph_append_kv compute.
typedef struct fiw_graph fiw_graph;

/// What a graph is captured for. Its memory is taken once, for the largest step that these allow.
typedef struct fiw_graph_options {
  size_t struct_size;
  int64_t num_pages;                  ///< pages of the cache: page ids are below it
  const fiw_step_spec* const* kinds;  ///< [num_kinds] kinds of layer; layers of a kind share a plan
  /// int32 [n], batch sizes to capture, ascending, the last one max_batch. A step runs in the smallest that holds its
  /// requests. Null: the powers of two below max_batch, and max_batch.
  const DLTensor* buckets;
  /// A page table in device memory, read by each replay; its arrays must live as long as the graph. `indptr` has
  /// max_batch + 1 entries or more, `indices` max_pages, `last_page_len` max_batch; a replay reads the first bucket +
  /// 1, where requests that are not there own no page. Page size and num_pages are those of the graph, and the version
  /// means nothing. Null: fiw_graph_step brings the table.
  const fiw_device_page_table* live_table;
  int32_t num_kinds;
  int32_t window;     ///< 0: decode; 1..4096: verify, the last `window` tokens of each request
  int32_t max_batch;  ///< requests in a step
  int32_t max_pages;  ///< entries of a step's page table, all requests together
  int32_t page_size;
  /// Boolean; with a live table: each replay plans on the device. 0: fiw_graph_prepare plans, and a replay whose table
  /// has other page counts than the prepared one, or that is of another bucket, does no work and raises FIW_STALE_PLAN.
  int32_t plan_on_device;
} fiw_graph_options;

#define FIW_GRAPH_OPTIONS_INIT \
  { sizeof(fiw_graph_options), 0, NULL, NULL, NULL, 0, 0, 0, 0, 16, 1 }

FIW_API void fiw_graph_options_init(fiw_graph_options* options, size_t struct_size);

/// `options` is read before the call returns; `*out` is freed by fiw_graph_free. Errors: FIW_INVALID_ARGUMENT naming
/// the option; FIW_UNSUPPORTED; FIW_CLOSED; FIW_BUSY; FIW_OUT_OF_MEMORY.
FIW_API fiw_status fiw_graph_create(fiw_workspace* ws, const fiw_graph_options* options, fiw_graph** out,
                                    fiw_error* err);

/// Accepts null. Waits for a call in flight on the workspace, and for replays that still run.
FIW_API void fiw_graph_free(fiw_graph* graph);

/// Enqueues one step of `batch` requests: fiw_graph_run for the attention of each layer, fiw_graph_append_kv, and
/// whatever else the step does. Must not throw. Calls within it take a fiw_error of their own.
typedef fiw_status (*fiw_graph_body)(void* context, int32_t batch);

/// Records `body` once for each bucket, on `stream` (not the default one on CUDA). Not executed. A second call replaces
/// what was captured. A status other than FIW_OK from `body` ends the capture and comes back, with FIW_REASON_NONE;
/// what was captured before stays. Within `body` the graph's other calls are refused. On the CPU, `body` and `context`
/// must live until the next capture or the graph's end.
FIW_API fiw_status fiw_graph_capture(fiw_graph* graph, fiw_graph_body body, void* context, void* stream,
                                     fiw_error* err);

/// Starts a step of the smallest bucket that holds `batch` requests, in a capture of the caller's, which `stream` is
/// part of. Puts the bucket into `bucket`, which may be null.
FIW_API fiw_status fiw_graph_begin(fiw_graph* graph, int32_t batch, int32_t* bucket, void* stream, fiw_error* err);

/// One layer's attention, within `body` or after fiw_graph_begin; `kind` indexes the options' kinds. Tensors as in
/// fiw_decode or fiw_verify, with at least bucket * window rows (decode: bucket); the addresses are what is captured,
/// and may be others in each bucket. `mask_indptr` has max_batch + 1 entries; on the CPU all of them must lie within
/// the mask whenever this is called, in a capture too. Null `stream`: the step's. The calls of a step share scratch, so
/// each comes after the last one, whatever streams a capture forks into.
FIW_API fiw_status fiw_graph_run(fiw_graph* graph, int32_t kind, const DLTensor* q, const fiw_kv_cache* kv,
                                 const DLTensor* out, const DLTensor* lse, const fiw_attention_extras* extras,
                                 void* stream, fiw_error* err);

/// Writes the step's new tokens, `window` rows a request (decode: one) of k and v [rows, num_kv_heads, head_dim], to
/// the ends of their requests; where and with how many rows as fiw_graph_run. Rows of requests that are not there, and
/// rows that would come before a request's first token, are passed over.
FIW_API fiw_status fiw_graph_append_kv(fiw_graph* graph, const DLTensor* k, const DLTensor* v, const fiw_kv_cache* kv,
                                       void* stream, fiw_error* err);

/// Rewrites plan and table for the next replay, in the order of `stream`, and puts the bucket that it is for into
/// `bucket`, which may be null. A table beyond the options' limits is FIW_INVALID_ARGUMENT with a message that names
/// the limit, and the last plan stays in force. Errors: also FIW_STALE_PLAN; see fiw_graph_check.
FIW_API fiw_status fiw_graph_prepare(fiw_graph* graph, const fiw_page_table* table, int32_t* bucket, void* stream,
                                     fiw_error* err);

/// fiw_graph_prepare, and the replay of what fiw_graph_capture recorded.
FIW_API fiw_status fiw_graph_step(fiw_graph* graph, const fiw_page_table* table, void* stream, fiw_error* err);

/// The replay alone, of the bucket that holds `batch` requests. With a live table this is the whole step.
FIW_API fiw_status fiw_graph_replay(fiw_graph* graph, int32_t batch, void* stream, fiw_error* err);

/// Waits for `stream`. FIW_STALE_PLAN, with the first request in `index`, if a replay found no right plan since the
/// last check. fiw_graph_step, _prepare and _replay return the same as soon as they see it, without waiting.
FIW_API fiw_status fiw_graph_check(fiw_graph* graph, void* stream, fiw_error* err);

/// The batch sizes that are captured, ascending, borrowed until the graph is freed. 0 and null for null.
FIW_API int32_t fiw_graph_num_buckets(const fiw_graph* graph);
FIW_API const int32_t* fiw_graph_buckets(const fiw_graph* graph);

typedef struct fiw_graph_stats {
  size_t struct_size;
  uint64_t captures;   ///< graphs recorded, one a bucket
  uint64_t replays;    ///< by fiw_graph_step and fiw_graph_replay
  uint64_t plans;      ///< schedules written by the host
  uint64_t plan_hits;  ///< steps that found the last schedule right
  uint64_t trips;      ///< replays that were found to have no right plan
  uint64_t bytes;      ///< device memory held: schedules, table and float scratch
} fiw_graph_stats;

#define FIW_GRAPH_STATS_INIT \
  { sizeof(fiw_graph_stats), 0, 0, 0, 0, 0, 0 }

FIW_API void fiw_graph_stats_init(fiw_graph_stats* stats, size_t struct_size);

/// Fills `stats`, whose struct_size the caller has set. Also after the workspace's close.
FIW_API fiw_status fiw_graph_get_stats(const fiw_graph* graph, fiw_graph_stats* stats, fiw_error* err);

// ---- 9. SIZES ------------------------------------------------------------------------------------------------------

/// A device as a value, so that its scratch can be sized on a machine that has none.
typedef struct fiw_device_props {
  size_t struct_size;
  int32_t kind;                  ///< a fiw_device_kind
  int32_t num_workers;           ///< streaming multiprocessors, or CPU threads
  int32_t compute_capability;    ///< 10 * major + minor; 0 on the CPU
  int32_t max_shared_bytes;      ///< opt-in shared memory a block
  int32_t decode_blocks_per_sm;  ///< resident blocks of the CUDA-core decode kernel
  int32_t tile_blocks_per_sm;    ///< resident blocks of the tensor-core tile kernel
} fiw_device_props;

#define FIW_DEVICE_PROPS_INIT \
  { sizeof(fiw_device_props), FIW_DEVICE_CPU, 1, 0, 0, 4, 2 }

FIW_API void fiw_device_props_init(fiw_device_props* props, size_t struct_size);

/// A CPU with that many threads (at least 1), an SXM H200, and the device of a workspace (also after close). Each fills
/// `props`, whose struct_size the caller has set.
FIW_API fiw_status fiw_device_props_cpu(int32_t threads, fiw_device_props* props, fiw_error* err);
FIW_API fiw_status fiw_device_props_h200(fiw_device_props* props, fiw_error* err);
FIW_API fiw_status fiw_workspace_device_props(const fiw_workspace* ws, fiw_device_props* props, fiw_error* err);

/// Float scratch bytes that suffice for any call within `limits` on such a device. `options` null: the defaults. Where
/// `limits` allow prefill, a Hopper device's include the copy of all requests' K and V, up to 4 GiB, that long prefills
/// are read from; a workspace of fixed size that has less serves these without a copy, more slowly. Touches no device.
/// Thread-safe.
FIW_API fiw_status fiw_required_workspace(const fiw_device_props* device, const fiw_workspace_limits* limits,
                                          const fiw_plan_options* options, size_t* bytes, fiw_error* err);

// ---- 10. STATISTICS ------------------------------------------------------------------------------------------------

/// Counters of one cache scope since creation; `entries` and `bytes` are what is held now. This struct never changes:
/// it lies by value in fiw_workspace_stats.
typedef struct fiw_cache_stats {
  uint64_t hits;
  uint64_t misses;
  uint64_t evictions;      ///< plans dropped to make room
  uint64_t invalidations;  ///< plans dropped by an invalidate call
  uint64_t entries;
  uint64_t bytes;  ///< schedule bytes of the live plans
} fiw_cache_stats;

typedef struct fiw_workspace_stats {
  size_t struct_size;
  fiw_cache_stats decode;
  fiw_cache_stats prefill;
  fiw_cache_stats verify;
  uint64_t float_scratch_bytes;  ///< capacity held
  uint64_t float_scratch_peak;   ///< most that one call needed
  uint64_t int_scratch_bytes;    ///< capacity held for schedules
  uint64_t plan_nanoseconds;     ///< time in lookups and planning
  uint64_t run_nanoseconds;      ///< time in attention calls (host time; on the CPU that is the work)
  uint64_t tables_known;         ///< device page tables that were known by their version
  uint64_t tables_copied;        ///< device page tables that were copied to the host
} fiw_workspace_stats;

#define FIW_WORKSPACE_STATS_INIT \
  { sizeof(fiw_workspace_stats), {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}, 0, 0, 0, 0, 0, 0, 0 }

FIW_API void fiw_workspace_stats_init(fiw_workspace_stats* stats, size_t struct_size);

/// Fills `stats`, whose struct_size the caller has set; all zero after close. Errors: FIW_BUSY.
FIW_API fiw_status fiw_workspace_get_stats(const fiw_workspace* ws, fiw_workspace_stats* stats, fiw_error* err);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // FIW_FIW_H_
