// Flattens launches into jobs and spreads their units over threads. Kernels are looked up once a call; nothing is
// allocated and nothing throws inside a parallel region.
#include "cpu/cpu_backend.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "core/caller_memory.h"
#include "cpu/job.h"
#include "cpu/kernels.h"
#include "fiw/error.h"
#include "plan/planner.h"

namespace fiw {
namespace {

constexpr std::size_t kAlignment = 64;

// Most query tokens of one request that the few-row kernel is given; 0 for groups that are too large for it.
std::int32_t stream_qo_len(const AttentionParams& params) {
  return std::min(cpu::kStreamMaxRows / (params.num_qo_heads / params.num_kv_heads), kCpuStreamMaxQoLen);
}

std::size_t thread_bytes(KernelFamily family, const StepSpec& spec, std::int32_t max_qo_len) {
  if (family == KernelFamily::kCpuTile) return cpu::TileScratch(spec.params).bytes;
  const std::int32_t qo_len = std::min(max_qo_len, stream_qo_len(spec.params));
  return cpu::StreamScratch(spec.params, qo_len).bytes;
}

cpu::Schedule schedule_of(const ScheduleShape& shape, const std::byte* base) {
  const auto ints = [base](std::size_t offset) { return reinterpret_cast<const std::int32_t*>(base + offset); };
  return {.request_indices = ints(shape.request_indices),
          .qo_tile_indices = ints(shape.qo_tile_indices),
          .kv_tile_indices = ints(shape.kv_tile_indices),
          .o_indptr = ints(shape.o_indptr),
          .merge_indptr = ints(shape.merge_indptr),
          .items = shape.items,
          .tile_rows = shape.tile_rows,
          .kv_chunk_tokens = shape.kv_chunk_tokens,
          .total_rows = shape.total_rows,
          .split_kv = shape.split_kv};
}

void set_paged(cpu::Job& job, const KvCache& kv, const PageTable& table) {
  job.kv_dtype = kv.dtype;
  job.k = {.data = kv.k, .stride = kv.k_stride, .scale = kv.k_scale, .head_scale = kv.k_head_scale};
  job.v = {.data = kv.v, .stride = kv.v_stride, .scale = kv.v_scale, .head_scale = kv.v_head_scale};
  job.page_indptr = table.indptr().data();
  job.page_indices = table.indices().data();
  job.kv_lens = table.kv_lens().data();
  job.page_size = table.page_size();
}

void set_ragged(cpu::Job& job, const RaggedKv& ragged) {
  const auto array = [](const ConstTensor& tensor) {
    return cpu::TokenArray{
        .data = tensor.data,
        .stride = {.page = tensor.row_stride, .token = tensor.row_stride, .head = tensor.head_stride}};
  };
  job.kv_dtype = ragged.k.dtype;
  job.k = array(ragged.k);
  job.v = array(ragged.v);
  job.kv_indptr = ragged.indptr.data();
  job.page_size = std::numeric_limits<std::int32_t>::max();
}

cpu::Job job_of(const AttentionLaunch& launch) {
  const ScheduleShape& shape = *launch.shape;
  cpu::Job job;
  job.params = *launch.params;
  job.group = job.params.num_qo_heads / job.params.num_kv_heads;
  job.q = launch.q;
  job.out = launch.out;
  job.lse = launch.lse;
  job.extras = launch.extras;
  job.qo_indptr = launch.qo_indptr.empty() ? nullptr : launch.qo_indptr.data();
  job.uniform_qo_len = launch.uniform_qo_len;
  if (launch.ragged != nullptr) {
    set_ragged(job, *launch.ragged);
  } else {
    set_paged(job, *launch.kv, *launch.table);
  }
  job.schedule = schedule_of(shape, launch.schedule);
  if (shape.split_kv) {
    const auto states = static_cast<std::size_t>(shape.partial_rows) * job.params.num_qo_heads;
    const std::size_t lse_bytes = (states * sizeof(float) + 15) / 16 * 16;
    const std::size_t bytes = partial_bytes(shape, job.params.num_qo_heads, job.params.head_dim_vo);
    job.partial_out = reinterpret_cast<float*>(launch.scratch.data());
    job.partial_lse = reinterpret_cast<float*>(launch.scratch.data() + bytes - lse_bytes);
  }
  return job;
}

}  // namespace

CpuBackend::CpuBackend(std::int32_t num_threads, const Allocator& allocator)
    : props_(DeviceProps::cpu(num_threads > 0 ? num_threads : omp_get_max_threads())), allocator_(allocator) {}

KernelFamily CpuBackend::route(const RouteRequest& request) const {
  const bool few = !request.any_qo_len && request.max_qo_len <= stream_qo_len(request.spec.params);
  return few ? KernelFamily::kCpuStream : KernelFamily::kCpuTile;
}

std::size_t CpuBackend::scratch_bytes(const ScheduleShape& shape, const StepSpec& spec) const {
  const std::size_t partials = partial_bytes(shape, spec.params.num_qo_heads, spec.params.head_dim_vo);
  return cpu::align_scratch(partials) + props_.num_workers * thread_bytes(shape.family, spec, shape.max_qo_len);
}

std::byte* CpuBackend::allocate(std::size_t bytes, Stream stream) {
  if (allocator_.allocate != nullptr) return allocate_from(allocator_, bytes, kAlignment, stream);
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return nullptr;
  return static_cast<std::byte*>(std::aligned_alloc(kAlignment, cpu::align_scratch(std::max<std::size_t>(bytes, 1))));
}

void CpuBackend::release(std::byte* memory, std::size_t bytes, Stream stream) noexcept {
  if (allocator_.free != nullptr) {
    allocator_.free(allocator_.context, memory, bytes, stream);
  } else {
    std::free(memory);
  }
}

void CpuBackend::fetch(std::span<const HostCopy> arrays, Stream /*stream*/) {
  for (const HostCopy& array : arrays) {
    std::copy_n(static_cast<const std::byte*>(array.from), array.to.size(), array.to.begin());
  }
}

void CpuBackend::attend(const AttentionLaunch& launch) {
  const ScheduleShape& shape = *launch.shape;
  const AttentionParams& params = *launch.params;
  const bool stream = shape.family == KernelFamily::kCpuStream;
  if (stream ? shape.max_qo_len > stream_qo_len(params) : shape.tile_rows != kCpuTileRows) {
    throw Error(Status::kInternal, Reason::kBug, "a schedule does not fit the CPU kernel that it names");
  }
  const cpu::Job job = job_of(launch);
  const cpu::UnitKernel kernel = stream ? cpu::stream_kernel(job.kv_dtype) : cpu::tile_kernel(job.kv_dtype);
  const cpu::PartialMergeKernel merge_row = cpu::partial_merge_kernel(job.out.dtype);
  const std::int64_t units = std::int64_t{shape.items} * (stream ? 1 : params.num_kv_heads);
  const StepSpec spec{.params = params, .kv_dtype = job.kv_dtype};
  const std::size_t scratch_stride = thread_bytes(shape.family, spec, shape.max_qo_len);
  std::byte* const scratch =
      launch.scratch.data() + cpu::align_scratch(partial_bytes(shape, params.num_qo_heads, params.head_dim_vo));

#pragma omp parallel num_threads(props_.num_workers) if (units > 1)
  {
    std::byte* const mine = scratch + static_cast<std::size_t>(omp_get_thread_num()) * scratch_stride;
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t unit = 0; unit < units; ++unit) kernel(job, unit, mine);
    if (shape.split_kv) {
#pragma omp for schedule(static)
      for (std::int32_t row = 0; row < shape.total_rows; ++row) merge_row(job, row);
    }
  }
}

void CpuBackend::append(const AppendLaunch& launch) {
  const KvCache& kv = *launch.kv;
  const PageTable& table = *launch.table;
  const std::span<const std::int32_t> indptr = launch.append_indptr;
  const cpu::ConvertKernel convert_k = cpu::convert_kernel(launch.k.dtype, kv.dtype);
  const cpu::ConvertKernel convert_v = cpu::convert_kernel(launch.v.dtype, kv.dtype);
  cpu::Job cache;
  set_paged(cache, kv, table);

  const auto put = [&kv](const ConstTensor& from, std::int64_t row, const cpu::TokenArray& to, std::int64_t slot,
                         cpu::ConvertKernel convert) {
    for (std::int32_t h = 0; h < kv.num_kv_heads; ++h) {
      const auto* source =
          static_cast<const std::byte*>(from.data) +
          (row * from.row_stride + h * from.head_stride) * static_cast<std::int64_t>(size_of(from.dtype));
      auto* target = static_cast<std::byte*>(const_cast<void*>(to.data)) +
                     (slot + h * to.stride.head) * static_cast<std::int64_t>(size_of(kv.dtype));
      convert(source, static_cast<std::int32_t>(from.dim), to.scale_of(h), target);
    }
  };
  const std::int32_t rows = indptr.empty() ? 0 : indptr.back();
#pragma omp parallel for num_threads(props_.num_workers) schedule(static) if (rows > 1)
  for (std::int32_t row = 0; row < rows; ++row) {
    // The last request that starts at or before the row; requests without new tokens start there too, and come earlier.
    const auto r = static_cast<std::int32_t>(std::upper_bound(indptr.begin(), indptr.end(), row) - indptr.begin()) - 1;
    const cpu::Request request{
        .index = r, .kv_len = cache.kv_lens[r], .pages = cache.page_indices + cache.page_indptr[r]};
    const std::int32_t token = request.kv_len - (indptr[r + 1] - row);
    if (token < 0) continue;
    std::int64_t k_slot = 0;
    std::int64_t v_slot = 0;
    cache.token_offsets(request, token, 1, &k_slot, &v_slot);
    put(launch.k, row, cache.k, k_slot, convert_k);
    put(launch.v, row, cache.v, v_slot, convert_v);
  }
}

void CpuBackend::merge(const MergeLaunch& launch) {
  const cpu::StateMergeKernel merge_row = cpu::state_merge_kernel(launch.out.dtype);
  const std::int64_t rows = launch.out.rows;
#pragma omp parallel for num_threads(props_.num_workers) schedule(static) if (rows > 1)
  for (std::int64_t row = 0; row < rows; ++row) merge_row(launch, row);
}

std::unique_ptr<Backend> make_cpu_backend(std::int32_t num_threads, const Allocator& allocator) {
  return std::make_unique<CpuBackend>(num_threads, allocator);
}

}  // namespace fiw
