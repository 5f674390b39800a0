// The CUDA backend: FlashInfer's kernels behind the interface that every backend has.
#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <vector>

#include "core/allocate.h"
#include "core/backend.h"
#include "core/caller_memory.h"
#include "core/fail.h"
#include "core/work.h"
#include "cuda/any/any.h"
#include "cuda/append/append.h"
#include "cuda/device.h"
#include "cuda/gather/gather.h"
#include "cuda/graphs.h"
#include "cuda/merge/merge.h"
#include "cuda/pinned_ring.h"
#include "cuda/routes.h"
#include "cuda/table_cache.h"
#include "cuda/timeline.h"
#include "plan/planner.h"

namespace fiw {
namespace cuda {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::int64_t kVectorBytes = 16;

// A CUDA-core schedule has one query row a request, cut without regard to the window: to a tile kernel, tiles of 16.
constexpr std::int32_t kCoreTileRows = 16;

/// As partial_bytes() counts.
constexpr std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
}

/// FlashInfer's kernels move 16 bytes at a time and reckon strides, and offsets into tensors of rows, in 32 bits.
bool suits_vectors(const void* data, DType dtype, std::initializer_list<std::int64_t> strides) noexcept {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype));
  return reinterpret_cast<std::uintptr_t>(data) % std::uintptr_t{kVectorBytes} == 0 &&
         std::ranges::all_of(strides, [&](std::int64_t stride) {
           return stride * bytes % kVectorBytes == 0 && stride <= std::int64_t{UINT32_MAX};
         });
}

bool suits_vectors(const ConstTensor& t) noexcept {
  return suits_vectors(t.data, t.dtype, {t.row_stride, t.head_stride}) &&
         (t.rows == 0 || t.row_stride <= std::int64_t{UINT32_MAX} / t.rows);
}

bool suits_kernels(const KvCache& kv) noexcept {
  return suits_vectors(kv.k, kv.dtype, {kv.k_stride.page, kv.k_stride.token, kv.k_stride.head}) &&
         suits_vectors(kv.v, kv.dtype, {kv.v_stride.page, kv.v_stride.token, kv.v_stride.head});
}

bool suits_kernels(const AttentionLaunch& launch) noexcept {
  if (!suits_vectors(launch.q) || launch.out.heads * launch.out.dim > std::int64_t{UINT32_MAX} / launch.out.rows) {
    return false;
  }
  if (launch.kv == nullptr) return suits_vectors(launch.ragged->k) && suits_vectors(launch.ragged->v);
  return suits_kernels(*launch.kv);
}

/// Whether the schedule leaves out what comes before the window.
bool skips_window(const ScheduleShape& shape, const AttentionParams& params) noexcept {
  return shape.family == KernelFamily::kCudaStream || (shape.family == KernelFamily::kTensorTile && params.causal);
}

/// Rows of the tiles that the general kernel, or a tile kernel in place of another one, makes of a schedule.
std::int32_t rows_of_tiles(const ScheduleShape& shape) noexcept {
  if (shape.family == KernelFamily::kCudaStream) return kCudaStreamRows;
  return shape.family == KernelFamily::kCudaCore ? kCoreTileRows : shape.tile_rows;
}

/// Whether the blocks of our own kernel merge their partial results, which saves a launch. Then one block merges all
/// rows of a KV head, where the merge kernel spreads them over the device. On an H200 the blocks were ahead in plans
/// for up to 8 rows a request, and for 16 and 32 rows up to about so many partial results. A graph's chunks come with
/// its tables: it has room for two blocks on each multiprocessor.
bool merges_itself(const ScheduleShape& shape, const StreamKernel& kernel) noexcept {
  constexpr std::int64_t kMostPartials = 128;
  const std::int64_t chunks = shape.graph ? shape.padded_items / shape.padded_batch : shape.max_chunks;
  return kernel.rows <= 8 || chunks * kernel.rows <= kMostPartials;
}

/// A captured step's table was sized so.
bool numbers_slots(const AttentionLaunch& launch) noexcept {
  if (launch.kv == nullptr || launch.fixed != nullptr) return true;
  return std::ssize(launch.table->indices()) * std::int64_t{launch.kv->page_size} <= kMostTableSlots;
}

/// Our prefill kernel numbers the heads of all pages, or tokens, in 32 bits, in units that divide both strides.
bool prefill_reaches(std::int64_t count, std::int64_t stride, std::int64_t heads, std::int64_t head_stride) noexcept {
  const std::int64_t unit = std::gcd(stride, head_stride);
  return count * (stride / unit) + heads * (head_stride / unit) <= std::numeric_limits<std::int32_t>::max();
}

bool prefill_reaches(const KvCache& kv) noexcept {
  return prefill_reaches(kv.num_pages, kv.k_stride.page, kv.num_kv_heads, kv.k_stride.head) &&
         prefill_reaches(kv.num_pages, kv.v_stride.page, kv.num_kv_heads, kv.v_stride.head);
}

void read_pages(KvView& view, const KvCache& kv, const DeviceTable& table) noexcept {
  view.k = kv.k;
  view.v = kv.v;
  view.page_size = kv.page_size;
  view.num_pages = kv.num_pages;
  view.k_page = kv.k_stride.page;
  view.k_token = kv.k_stride.token;
  view.k_head = kv.k_stride.head;
  view.v_page = kv.v_stride.page;
  view.v_token = kv.v_stride.token;
  view.v_head = kv.v_stride.head;
  view.indptr = table.indptr;
  view.indices = table.indices;
  view.last_page_len = table.last_page_len;
}

/// Copies between two tensors of one shape and type, whatever their strides.
void copy_tensor(const Tensor& to, const ConstTensor& from, cudaStream_t stream) {
  constexpr std::int64_t kMostPitch = std::numeric_limits<std::int32_t>::max();
  const auto element = static_cast<std::int64_t>(size_of(to.dtype));
  const auto width = static_cast<std::size_t>(to.dim * element);
  const std::int64_t to_pitch = std::max(to.row_stride, to.dim) * element;
  const std::int64_t from_pitch = std::max(from.row_stride, to.dim) * element;
  // Rows too far apart for one copy are copied each.
  const std::int64_t at_once = std::max(to_pitch, from_pitch) <= kMostPitch ? to.rows : 1;
  for (std::int64_t head = 0; head < to.heads; ++head) {
    auto* const target = static_cast<std::byte*>(to.data) + head * to.head_stride * element;
    const auto* const source = static_cast<const std::byte*>(from.data) + head * from.head_stride * element;
    for (std::int64_t row = 0; row < to.rows; row += at_once) {
      check(cudaMemcpy2DAsync(target + row * to_pitch, at_once > 1 ? static_cast<std::size_t>(to_pitch) : width,
                              source + row * from_pitch, at_once > 1 ? static_cast<std::size_t>(from_pitch) : width,
                              width, static_cast<std::size_t>(at_once), cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpy2DAsync");
    }
  }
}

/// No element is reached through the stride of an axis with one entry, but kernels reckon with it: the compact one.
template <class T>
T with_plain_strides(T tensor) noexcept {
  if (tensor.heads == 1) tensor.head_stride = tensor.dim;
  if (tensor.rows <= 1) tensor.row_stride = tensor.heads * tensor.head_stride;
  return tensor;
}

KvCache with_plain_strides(KvCache kv) noexcept {
  const auto plain = [&](KvCache::Strides& stride, std::int64_t dim) {
    if (kv.num_kv_heads == 1) stride.head = dim;
    if (kv.page_size == 1) stride.token = kv.num_kv_heads * stride.head;
    if (kv.num_pages <= 1) stride.page = std::max(kv.page_size * stride.token, kv.num_kv_heads * stride.head);
  };
  plain(kv.k_stride, kv.head_dim_qk);
  plain(kv.v_stride, kv.head_dim_vo);
  return kv;
}

DeviceTable view_of(const FixedTable& table) noexcept {
  return {.indptr = table.indptr,
          .indices = table.indices,
          .last_page_len = table.last_page_len,
          .kv_lens = table.kv_lens,
          .qo_indptr = table.qo_indptr};
}

bool is_contiguous(const Tensor& t) noexcept {
  return (t.heads == 1 || t.head_stride == t.dim) && (t.rows == 1 || t.row_stride == t.heads * t.dim);
}

}  // namespace

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const Allocator& allocator, std::optional<CudaRoute> route);
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;
  ~CudaBackend() override;

  const DeviceProps& props() const noexcept override { return props_; }
  KernelFamily route(const RouteRequest& request) const override { return choose_family(request, props_, route_); }
  std::size_t scratch_bytes(const ScheduleShape& shape, const StepSpec& spec) const override {
    if (is_hopper(shape.family)) {
      const std::size_t gathered = align_up(gather_bytes(spec, shape.gathered_kv));
      return gathered + static_cast<std::size_t>(shape.hopper.slots) *
                            prefill_slot_bytes(shape.tile_rows, spec.params.head_dim_vo);
    }
    return partial_bytes(shape, spec.params.num_qo_heads, spec.params.head_dim_vo);
  }

  std::byte* allocate(std::size_t bytes, Stream stream) override;
  void release(std::byte* memory, std::size_t bytes, Stream stream) noexcept override;
  std::span<std::byte> stage(std::byte* device_slice, std::size_t bytes) override;
  void upload(std::byte* device_slice, std::span<const std::byte> staged, Stream stream) override {
    send(device_slice, staged, own_or(stream));
  }
  void rewrite(std::byte* device_slice, std::span<const std::byte> staged, Stream stream) override {
    send(device_slice, staged, static_cast<cudaStream_t>(stream));
  }
  void fetch(std::span<const HostCopy> arrays, Stream stream) override;

  void attend(const AttentionLaunch& launch) override;
  void append(const AppendLaunch& launch) override;
  void merge(const MergeLaunch& launch) override;
  GraphBackend* graphs() noexcept override { return &graphs_; }

 private:
  void measure();
  /// What a graph would repeat wrongly is not for streams under capture.
  static void refuse_capture(cudaStream_t stream);
  /// The device copy of a call's requests; a captured call's own, put together in `fixed`.
  const DeviceTable& table_of(const AttentionLaunch& launch, DeviceTable& fixed);
  /// A call's place in the timeline; a captured call has one at each replay instead.
  std::optional<Timeline::Entry> enter(cudaStream_t stream, bool captured) {
    return captured ? std::nullopt : std::optional<Timeline::Entry>(std::in_place, timeline_, stream);
  }
  /// Our own stream where the caller names none: what it carries is ordered by the timeline, not by the default stream.
  cudaStream_t own_or(Stream stream) const noexcept {
    return stream == nullptr ? own_ : static_cast<cudaStream_t>(stream);
  }
  void send(std::byte* device_slice, std::span<const std::byte> staged, cudaStream_t stream);
  AttentionArgs describe(const AttentionLaunch& launch, const DeviceTable& table) const;
  /// Raises the kernel's shared memory limit, once.
  void prepare(const void* function, std::size_t shared_bytes);
  /// The kernel for a call; none where attend_any is to serve it.
  struct Chosen {
    const TileKernel* tile = nullptr;
    const CoreKernel* core = nullptr;
    const StreamKernel* stream = nullptr;
  };
  Chosen choose_kernel(const AttentionLaunch& launch, const StepSpec& spec, const AttentionArgs& args,
                       const DeviceTable& table) const;
  void attend_hopper(const AttentionLaunch& launch, const StepSpec& spec, const DeviceTable& table);
  /// Memory for the length of a call, given back on its stream.
  class Temporary;
  class Addressable;

  const int device_;
  const Allocator allocator_;
  const CudaRoute route_;
  DeviceProps props_;
  bool launches_ahead_ = false;
  cudaStream_t own_ = nullptr;
  Timeline timeline_;
  std::mutex releasing_;  ///< plans and sessions may outlive the workspace, each with a thread of its own
  Graphs graphs_{device_, timeline_};
  PinnedRing ring_;
  std::unordered_set<const void*> prepared_;
  std::optional<TableCache> tables_;
  std::vector<MergePart> parts_;  ///< of the call at hand
};

class CudaBackend::Temporary {
 public:
  Temporary(CudaBackend& backend, std::size_t bytes, Stream stream, const char* what)
      : backend_(backend), bytes_(bytes), stream_(stream), memory_(allocate_or_throw(backend, bytes, what, stream)) {}
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() { backend_.release(memory_, bytes_, stream_); }

  std::byte* data() const noexcept { return memory_; }

 private:
  CudaBackend& backend_;
  std::size_t bytes_;
  Stream stream_;
  std::byte* memory_;
};

/// A tensor as the Hopper kernel can address it: itself, or room for a contiguous copy.
class CudaBackend::Addressable {
 public:
  Addressable(CudaBackend& backend, const ConstTensor& tensor, Stream stream, bool reachable = true) : given_(tensor) {
    if (reachable && suits_vectors(tensor.data, tensor.dtype, {tensor.row_stride, tensor.head_stride})) return;
    copy_.emplace(backend, static_cast<std::size_t>(tensor.rows * tensor.heads * tensor.dim) * size_of(tensor.dtype),
                  stream, "an aligned copy");
    room_ = Tensor(copy_->data(), tensor.dtype, tensor.rows, tensor.heads, tensor.dim, tensor.device);
  }

  ConstTensor get() const noexcept { return copy_ ? ConstTensor(room_) : given_; }
  void fill(cudaStream_t stream) const {
    if (copy_) copy_tensor(room_, given_, stream);
  }

 private:
  ConstTensor given_;
  std::optional<Temporary> copy_;
  Tensor room_;
};

CudaBackend::CudaBackend(int device, const Allocator& allocator, std::optional<CudaRoute> route)
    : device_(device), allocator_(allocator), route_(route ? *route : route_from_environment()) {
  measure();
  check(load_merge_kernels(launches_ahead_), "loading the merge kernels");
  check(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  tables_.emplace(*this);
}

CudaBackend::~CudaBackend() {
  const DeviceGuard guard(device_);
  try {
    timeline_.drain();
  } catch (const Error&) {
    // The device is lost or the process is ending; what follows fails as quietly.
  }
  tables_.reset();
  cudaStreamSynchronize(own_);
  cudaStreamDestroy(own_);
}

void CudaBackend::measure() {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, device_), "cudaDeviceGetAttribute");
    return value;
  };
  props_ = {.kind = DeviceKind::kCuda,
            .num_workers = attribute(cudaDevAttrMultiProcessorCount),
            .compute_capability =
                10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
            .max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  const auto resident = [&](const void* function, std::size_t shared_bytes, std::int32_t threads) {
    prepare(function, shared_bytes);
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(blocks, 1);
  };
  const TileKernel& tile = tile_entries().front().kernels().front();
  props_.tile_blocks_per_sm = resident(tile.function, tile.shared_bytes, tile.threads);
  const CoreKernel& core = core_entries().front().kernels().front();
  props_.decode_blocks_per_sm = resident(core.function, core.shared_bytes, core.threads);
}

void CudaBackend::prepare(const void* function, std::size_t shared_bytes) {
  if (prepared_.contains(function)) return;
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  prepared_.insert(function);
}

void CudaBackend::refuse_capture(cudaStream_t stream) {
  if (!is_capturing(stream)) return;
  unsupported(Reason::kOptions,
              "the stream is being captured: a graph would repeat this call with the requests of now; record it by "
              "GraphSession::run() or append_kv()");
}

std::byte* CudaBackend::allocate(std::size_t bytes, Stream stream) {
  const DeviceGuard guard(device_);
  const cudaStream_t on = own_or(stream);
  refuse_capture(on);
  Timeline::Entry entry(timeline_, on);
  void* memory = nullptr;
  if (allocator_.allocate != nullptr) {
    memory = allocate_from(allocator_, bytes, kAlignment, on);
  } else {
    const cudaError_t status = cudaMallocAsync(&memory, bytes, on);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(status, "cudaMallocAsync");
  }
  entry.leave();
  return static_cast<std::byte*>(memory);
}

void CudaBackend::release(std::byte* memory, std::size_t bytes, Stream stream) noexcept {
  const DeviceGuard guard(device_);
  const cudaStream_t on = own_or(stream);
  const std::scoped_lock lock(releasing_);
  try {
    Timeline::Entry entry(timeline_, on);
    if (allocator_.free != nullptr) {
      allocator_.free(allocator_.context, memory, bytes, on);
    } else {
      check(cudaFreeAsync(memory, on), "cudaFreeAsync");
    }
    entry.leave();
  } catch (const Error&) {
    // Nothing can be freed on a lost device.
  }
}

std::span<std::byte> CudaBackend::stage(std::byte* /*device_slice*/, std::size_t bytes) {
  const DeviceGuard guard(device_);
  const RelaxedCapture relaxed(true);  // another thread may be capturing, which forbids looking at events
  return ring_.stage(bytes);
}

void CudaBackend::send(std::byte* device_slice, std::span<const std::byte> staged, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  refuse_capture(stream);
  Timeline::Entry entry(timeline_, stream);
  ring_.upload(device_slice, staged, stream);
  entry.leave();
}

void CudaBackend::fetch(std::span<const HostCopy> arrays, Stream stream) {
  const DeviceGuard guard(device_);
  const auto on = static_cast<cudaStream_t>(stream);
  refuse_capture(on);
  const RelaxedCapture relaxed(true);  // see stage()
  std::size_t bytes = 0;
  for (const HostCopy& array : arrays) bytes += array.to.size();
  // Pinned, so that all copies are under way before the one wait. Not uploaded: the slot is free again afterwards.
  const std::span<std::byte> pinned = ring_.stage(bytes);
  std::size_t at = 0;
  cudaError_t copied = cudaSuccess;
  for (const HostCopy& array : arrays) {
    if (array.to.empty() || copied != cudaSuccess) continue;
    copied = cudaMemcpyAsync(pinned.data() + at, array.from, array.to.size(), cudaMemcpyDeviceToHost, on);
    at += array.to.size();
  }
  const cudaError_t waited = cudaStreamSynchronize(on);  // after a failure, too: others may be writing to the slot
  check(copied, "cudaMemcpyAsync");
  check(waited, "cudaStreamSynchronize");
  at = 0;
  for (const HostCopy& array : arrays) {
    std::ranges::copy(pinned.subspan(at, array.to.size()), array.to.begin());
    at += array.to.size();
  }
}

AttentionArgs CudaBackend::describe(const AttentionLaunch& launch, const DeviceTable& table) const {
  const AttentionParams& params = *launch.params;
  const ScheduleShape& shape = *launch.shape;
  const auto words = [&](std::size_t offset) {
    return reinterpret_cast<const std::int32_t*>(launch.schedule + offset);
  };
  AttentionArgs args{
      .q = const_cast<void*>(launch.q.data),
      .q_row = launch.q.row_stride,
      .q_head = launch.q.head_stride,
      .qo_indptr = table.qo_indptr,
      .batch = shape.batch,
      .num_qo_heads = params.num_qo_heads,
      .request_indices = words(shape.request_indices),
      .qo_tile_indices = words(shape.qo_tile_indices),
      .kv_tile_indices = words(shape.kv_tile_indices),
      .o_indptr = words(shape.o_indptr),
      .kv_chunk_size = words(shape.kv_chunk_size),
      .block_valid =
          shape.graph ? reinterpret_cast<const std::uint8_t*>(launch.schedule) + shape.block_valid_mask : nullptr,
      .items = shape.padded_items,
      .split_kv = shape.split_kv,
      .causal = params.causal,
      .skip_window = skips_window(shape, params) ? params.window_left : -1,
      .window_left = params.window_left,
      .sm_scale = params.sm_scale,
      .soft_cap = params.logits_soft_cap,
      .sinks = launch.extras.sinks,
      .alibi_slopes = launch.extras.alibi_slopes,
      .mask = launch.extras.mask,
      .mask_indptr = launch.extras.mask_indptr};
  args.kv.num_kv_heads = params.num_kv_heads;
  if (launch.kv != nullptr) {
    const KvCache& kv = *launch.kv;
    read_pages(args.kv, kv, table);
    args.sm_scale *= kv.k_scale;
    args.v_scale = kv.v_scale;
    args.k_head_scale = kv.k_head_scale;
    args.v_head_scale = kv.v_head_scale;
  } else {
    const RaggedKv& ragged = *launch.ragged;
    args.kv.k = const_cast<void*>(ragged.k.data);
    args.kv.v = const_cast<void*>(ragged.v.data);
    args.kv.k_token = ragged.k.row_stride;
    args.kv.k_head = ragged.k.head_stride;
    args.kv.v_token = ragged.v.row_stride;
    args.kv.v_head = ragged.v.head_stride;
    args.kv.indptr = table.indptr;
  }
  return args;
}

CudaBackend::Chosen CudaBackend::choose_kernel(const AttentionLaunch& launch, const StepSpec& spec,
                                               const AttentionArgs& args, const DeviceTable& table) const {
  const AttentionParams& params = *launch.params;
  if (route_ == CudaRoute::kAny || !suits_kernels(launch)) return {};
  if (launch.shape->family != KernelFamily::kCudaStream && !numbers_slots(launch)) return {};
  const bool options =
      params.logits_soft_cap > 0 || params.window_left >= 0 || spec.sinks || spec.alibi || args.k_head_scale != nullptr;
  if (launch.shape->family == KernelFamily::kCudaStream) {
    const std::int32_t group = params.num_qo_heads / params.num_kv_heads;
    return {.stream = find_stream(spec, launch.shape->max_qo_len * group)};
  }
  if (launch.shape->family == KernelFamily::kCudaCore) {
    const KvView& kv = args.kv;
    if (kv.k_page == kv.v_page && kv.k_token == kv.v_token && kv.k_head == kv.v_head) {
      return {.core = find_core(spec, options)};
    }
    // The CUDA cores reckon one offset for K and V.
    return {.tile = find_tile(spec, TileVariant::kMasked, kCoreTileRows, true)};
  }
  const TileVariant variant = choose_variant({.causal = params.causal,
                                              .one_row = launch.shape->max_qo_len == 1,
                                              .options = options,
                                              .custom_mask = spec.custom_mask,
                                              .rows_before_start = params.causal && table.rows_before_start});
  return {.tile = find_tile(spec, variant, launch.shape->tile_rows, launch.kv != nullptr)};
}

const DeviceTable& CudaBackend::table_of(const AttentionLaunch& launch, DeviceTable& fixed) {
  if (launch.fixed != nullptr) {
    fixed = view_of(*launch.fixed);
    fixed.rows_before_start = launch.uniform_qo_len > 1;  // some later table may have such a request
    return fixed;
  }
  refuse_capture(static_cast<cudaStream_t>(launch.stream));
  return tables_->find({.table = launch.table,
                        .kv_indptr = launch.ragged != nullptr ? launch.ragged->indptr : std::span<const std::int32_t>{},
                        .qo_indptr = launch.qo_indptr,
                        .uniform_qo_len = launch.qo_indptr.empty() ? launch.uniform_qo_len : 0},
                       launch.stream);
}

void CudaBackend::attend(const AttentionLaunch& given) {
  const DeviceGuard guard(device_);
  AttentionLaunch launch = given;
  std::optional<KvCache> kv;
  std::optional<RaggedKv> ragged;
  launch.q = with_plain_strides(launch.q);
  launch.out = with_plain_strides(launch.out);
  if (launch.kv != nullptr) {
    launch.kv = &kv.emplace(with_plain_strides(*launch.kv));
  } else {
    launch.ragged = &ragged.emplace(*launch.ragged);
    ragged->k = with_plain_strides(ragged->k);
    ragged->v = with_plain_strides(ragged->v);
  }
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const AttentionParams& params = *launch.params;
  const ScheduleShape& shape = *launch.shape;
  const StepSpec spec{.params = params,
                      .q_dtype = launch.q.dtype,
                      .kv_dtype = launch.kv != nullptr ? launch.kv->dtype : launch.ragged->k.dtype,
                      .sinks = launch.extras.sinks != nullptr,
                      .alibi = launch.extras.alibi_slopes != nullptr,
                      .custom_mask = launch.extras.mask != nullptr};
  DeviceTable fixed;
  const DeviceTable& table = table_of(launch, fixed);
  const bool captured = launch.fixed != nullptr;
  const RelaxedCapture relaxed(captured);
  if (is_hopper(shape.family)) return attend_hopper(launch, spec, table);
  AttentionArgs args = describe(launch, table);
  const Chosen chosen = choose_kernel(launch, spec, args, table);
  const bool strided = chosen.tile == nullptr && chosen.core == nullptr && chosen.stream == nullptr;

  const Tensor& out = launch.out;
  const std::size_t row_bytes = static_cast<std::size_t>(out.heads * out.dim) * size_of(out.dtype);
  const bool unfinished = chosen.tile != nullptr && !chosen.tile->finishes;
  std::optional<Temporary> bounce;
  std::optional<Temporary> lse;
  StreamMerge merge;
  if (chosen.stream != nullptr && shape.split_kv && merges_itself(shape, *chosen.stream) &&
      suits_vectors(out.data, out.dtype, {out.row_stride, out.head_stride})) {
    merge = {.arrivals = reinterpret_cast<std::uint32_t*>(launch.schedule + shape.arrivals),
             .out = out.data,
             .out_row = out.row_stride,
             .out_head = out.head_stride,
             .lse = launch.lse};
  }
  if (shape.split_kv) {
    args.out = launch.scratch.data();
    args.lse = reinterpret_cast<float*>(launch.scratch.data() +
                                        align_up(static_cast<std::size_t>(shape.partial_rows) * row_bytes));
  } else if (strided || (is_contiguous(out) && suits_vectors(out.data, out.dtype, {}))) {
    args.out = out.data;
    args.lse = launch.lse;
  } else if (captured) {
    fail(Reason::kTensorStride, "out is not contiguous and aligned to {} bytes, as this captured call needs",
         kVectorBytes);
  } else {
    bounce.emplace(*this, static_cast<std::size_t>(out.rows) * row_bytes, launch.stream, "contiguous output");
    args.out = bounce->data();
    args.lse = launch.lse;
  }
  if (unfinished && args.lse == nullptr) {
    if (captured) {
      unsupported(Reason::kWindow,
                  "lse is null, and a captured call with a window and without the causal limit needs it");
    }
    const auto bytes = static_cast<std::size_t>(out.rows * out.heads) * sizeof(float);
    args.lse = reinterpret_cast<float*>(lse.emplace(*this, bytes, launch.stream, "logarithms").data());
  }

  std::optional<Timeline::Entry> entry = enter(stream, captured);
  if (chosen.core != nullptr) {
    prepare(chosen.core->function, chosen.core->shared_bytes);
    check(chosen.core->launch(args, stream), "launching a CUDA-core decode kernel");
  } else if (chosen.stream != nullptr) {
    prepare(chosen.stream->function, chosen.stream->shared_bytes);
    check(chosen.stream->launch(args, merge, launches_ahead_, stream), "launching a stream kernel");
  } else if (chosen.tile != nullptr) {
    prepare(chosen.tile->function, chosen.tile->shared_bytes);
    check(chosen.tile->launch(args, stream), "launching a tile kernel");
  } else {
    check(attend_any({.call = args,
                      .q = spec.q_dtype,
                      .kv = spec.kv_dtype,
                      .head_dim_qk = params.head_dim_qk,
                      .head_dim_vo = params.head_dim_vo,
                      .tile_rows = rows_of_tiles(shape),
                      .out_row = shape.split_kv ? out.heads * out.dim : out.row_stride,
                      .out_head = shape.split_kv ? out.dim : out.head_stride},
                     stream),
          "launching the general attention kernel");
  }
  if ((shape.split_kv && merge.arrivals == nullptr) || unfinished) {
    PartialRows partials{.out = args.out, .lse = args.lse, .sinks = launch.extras.sinks};
    if (shape.split_kv) {
      partials.merge_indptr = reinterpret_cast<const std::int32_t*>(launch.schedule + shape.merge_indptr);
    }
    if (unfinished) {
      partials.v_scale = args.v_scale;
      partials.v_head_scale = args.v_head_scale;
      partials.group = params.num_qo_heads / params.num_kv_heads;
    }
    check(merge_partials(partials, out, launch.lse, launches_ahead_, stream), "launching the merge kernel");
  } else if (bounce) {
    copy_tensor(out, ConstTensor(bounce->data(), out.dtype, out.rows, out.heads, out.dim, out.device), stream);
  }
  if (entry) entry->leave();
}

void CudaBackend::attend_hopper(const AttentionLaunch& launch, const StepSpec& spec, const DeviceTable& table) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const AttentionParams& params = *launch.params;
  const ScheduleShape& shape = *launch.shape;
  const bool own = shape.family == KernelFamily::kPrefill;
  const bool in_place = launch.kv != nullptr && shape.gathered_kv == 0 && suits_kernels(*launch.kv) &&
                        (!own || prefill_reaches(*launch.kv));
  const auto load = [this](const auto* kernel) {
    if (kernel == nullptr) throw Error(Status::kInternal, Reason::kBug, "a routed Hopper kernel is missing");
    prepare(kernel->function, kernel->shared_bytes);
    return kernel->launch;
  };
  const auto enqueue = own ? load(find_prefill(spec, shape.tile_rows)) : load(find_hopper(spec, in_place));

  // Memory first, then a place in the timeline behind it: for calls on the default stream it comes from another one.
  const Addressable given_q(*this, launch.q, launch.stream);
  const ConstTensor q = given_q.get();
  std::optional<Addressable> ragged_k;
  std::optional<Addressable> ragged_v;
  std::optional<Temporary> out_copy;
  std::optional<Temporary> gathered;
  Tensor out = launch.out;
  if (!suits_vectors(out)) {
    out_copy.emplace(*this, static_cast<std::size_t>(out.rows * out.heads * out.dim) * size_of(out.dtype),
                     launch.stream, "contiguous output");
    out = Tensor(out_copy->data(), out.dtype, out.rows, out.heads, out.dim, out.device);
  }
  HopperArgs args{
      .call = {.q = const_cast<void*>(q.data),
               .q_row = q.row_stride,
               .q_head = q.head_stride,
               .out = out.data,
               .lse = launch.lse,
               .num_qo_heads = params.num_qo_heads,
               .causal = params.causal,
               .window_left = params.window_left,
               .sm_scale = params.sm_scale,
               .soft_cap = params.logits_soft_cap,
               .sinks = launch.extras.sinks},
      .shape = &shape.hopper,
      .schedule = launch.schedule,
      .total_rows = q.rows,
      .out_row = out.row_stride,
      .out_head = out.head_stride,
      .num_workers = props_.num_workers,
      .partials = reinterpret_cast<float*>(launch.scratch.data() + align_up(gather_bytes(spec, shape.gathered_kv)))};
  args.call.kv.num_kv_heads = params.num_kv_heads;
  const auto read_from = [&](const ConstTensor& k, const ConstTensor& v) {
    args.total_kv = k.rows;
    args.call.kv.k = const_cast<void*>(k.data);
    args.call.kv.v = const_cast<void*>(v.data);
    args.call.kv.k_token = k.row_stride;
    args.call.kv.k_head = k.head_stride;
    args.call.kv.v_token = v.row_stride;
    args.call.kv.v_head = v.head_stride;
  };

  if (launch.kv != nullptr) {
    const KvCache& kv = *launch.kv;
    args.call.sm_scale *= kv.k_scale;
    args.call.v_scale = kv.v_scale;
    args.call.k_head_scale = kv.k_head_scale;
    args.call.v_head_scale = kv.v_head_scale;
  }

  std::byte* memory = launch.scratch.data();
  if (launch.kv == nullptr) {
    const auto reachable = [&](const ConstTensor& t) {
      return !own || prefill_reaches(t.rows, t.row_stride, t.heads, t.head_stride);
    };
    ragged_k.emplace(*this, launch.ragged->k, launch.stream, reachable(launch.ragged->k));
    ragged_v.emplace(*this, launch.ragged->v, launch.stream, reachable(launch.ragged->v));
  } else if (!in_place && shape.gathered_kv == 0) {
    memory =
        gathered.emplace(*this, gather_bytes(spec, launch.table->total_kv()), launch.stream, "gathered K and V").data();
  }

  Timeline::Entry entry(timeline_, stream);
  given_q.fill(stream);
  if (in_place) {
    read_pages(args.call.kv, *launch.kv, table);
  } else if (launch.kv != nullptr) {
    const std::int64_t tokens = launch.table->total_kv();
    const ConstTensor k(memory, spec.q_dtype, tokens, params.num_kv_heads, params.head_dim_qk);
    const std::size_t k_bytes = static_cast<std::size_t>(tokens * k.row_stride) * size_of(spec.q_dtype);
    const ConstTensor v(memory + k_bytes, spec.q_dtype, tokens, params.num_kv_heads, params.head_dim_vo);
    check(gather_kv(
              *launch.kv,
              {.batch = shape.batch, .indptr = table.indptr, .indices = table.indices, .kv_offsets = table.kv_offsets},
              tokens, spec.q_dtype, memory, memory + k_bytes, stream),
          "launching the gather kernel");
    read_from(k, v);
  } else {
    ragged_k->fill(stream);
    ragged_v->fill(stream);
    read_from(ragged_k->get(), ragged_v->get());
  }
  check(enqueue(args, stream), "launching a Hopper kernel");
  if (out_copy) copy_tensor(launch.out, out, stream);
  entry.leave();
}

void CudaBackend::append(const AppendLaunch& launch) {
  const DeviceGuard guard(device_);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  DeviceTable table;
  if (launch.fixed != nullptr) {
    table = view_of(*launch.fixed);
  } else {
    refuse_capture(stream);
    table = tables_->find({.table = launch.table, .qo_indptr = launch.append_indptr}, launch.stream);
  }
  const AppendTable at{.batch = launch.table->batch(),
                       .append_indptr = table.qo_indptr,
                       .indptr = table.indptr,
                       .indices = table.indices,
                       .kv_lens = table.kv_lens};
  const bool captured = launch.fixed != nullptr;
  const RelaxedCapture relaxed(captured);
  std::optional<Timeline::Entry> entry = enter(stream, captured);
  check(append_kv(launch.k, launch.v, *launch.kv, at, stream), "launching the append kernel");
  if (entry) entry->leave();
}

void CudaBackend::merge(const MergeLaunch& launch) {
  const DeviceGuard guard(device_);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  parts_.clear();
  for (const PartialState& part : launch.parts) {
    parts_.push_back({part.out.data, part.lse, part.out.row_stride, part.out.head_stride});
  }
  std::optional<Temporary> device_parts;
  if (parts_.size() > kInlineParts) {
    const std::size_t bytes = parts_.size() * sizeof(MergePart);
    device_parts.emplace(*this, bytes, launch.stream, "states to merge");
    const std::span<std::byte> staged = stage(device_parts->data(), bytes);
    std::ranges::copy(std::as_bytes(std::span(parts_)), staged.begin());
    upload(device_parts->data(), staged, launch.stream);
  }
  const bool captured = is_capturing(stream);
  const RelaxedCapture relaxed(captured);
  std::optional<Timeline::Entry> entry = enter(stream, captured);
  check(merge_states(parts_, device_parts ? reinterpret_cast<const MergePart*>(device_parts->data()) : nullptr,
                     launch.out, launch.lse, launches_ahead_, stream),
        "launching the merge kernel");
  if (entry) entry->leave();
}

}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(int device, const Allocator& allocator, std::optional<CudaRoute> route) {
  cuda::require_device(device);
  const cuda::DeviceGuard guard(device);
  return std::make_unique<cuda::CudaBackend>(device, allocator, route);
}

}  // namespace fiw
