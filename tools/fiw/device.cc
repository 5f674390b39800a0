// Allocations for the tools' tensors, and opening a workspace with a message when there is none.
#include "device.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef FIW_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "fiw/error.h"

namespace fiw::cli {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Scattered pages of a cache miss the TLB as well as the caches, so large blocks ask for huge pages.
void* allocate_host(std::size_t bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory != nullptr && alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
  return memory;
}

double host_memory() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

#ifdef FIW_HAS_CUDA
void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(Status::kBackend, Reason::kCudaCall, fmt::format("{} failed: {}", call, cudaGetErrorString(status)))
      .backend(static_cast<std::int32_t>(status));
}

void* allocate(std::size_t bytes, int device) {
  if (device == kCpuDevice) return allocate_host(bytes);
  check(cudaSetDevice(device), "cudaSetDevice");
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) return nullptr;
  check(status, "cudaMalloc");
  return memory;
}

void release(void* memory, int device) {
  if (device == kCpuDevice) return std::free(memory);
  cudaFree(memory);
}

void fill_bytes(void* memory, int value, std::size_t bytes, int device) {
  if (device == kCpuDevice) {
    std::memset(memory, value, bytes);
  } else {
    check(cudaMemset(memory, value, bytes), "cudaMemset");
  }
}

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

Stream make_stream(int device) {
  if (device == kCpuDevice) return nullptr;
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

void destroy_stream(Stream stream) { cudaStreamDestroy(static_cast<cudaStream_t>(stream)); }

/// Infinite for a device that is not there.
double memory_of(int device) {
  if (device == kCpuDevice) return host_memory();
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaSetDevice(device) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess) return HUGE_VAL;
  return static_cast<double>(total);
}
#else
// Without the CUDA backend no workspace opens on a device, so nothing of it is asked for.
void* allocate(std::size_t bytes, int /*device*/) { return allocate_host(bytes); }
void release(void* memory, int /*device*/) { std::free(memory); }
void fill_bytes(void* memory, int value, std::size_t bytes, int /*device*/) { std::memset(memory, value, bytes); }
void copy_bytes(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
Stream make_stream(int /*device*/) { return nullptr; }
void destroy_stream(Stream /*stream*/) {}
double memory_of(int device) { return device == kCpuDevice ? host_memory() : HUGE_VAL; }
#endif

/// Of two contiguous tensors of one shape.
void copy_tensor(const Tensor& to, const ConstTensor& from) {
  copy_bytes(to.data, from.data, static_cast<std::size_t>(from.rows * from.heads * from.dim) * size_of(from.dtype));
}

}  // namespace

Buffer::Buffer(std::size_t bytes, int device) : memory_(allocate(bytes, device), Free{device}), bytes_(bytes) {
  if (!memory_) {
    throw Error(Status::kOutOfMemory, Reason::kAllocation, fmt::format("no memory for a block of {} bytes", bytes))
        .needs(bytes);
  }
}

void Buffer::Free::operator()(void* memory) const noexcept { release(memory, device); }

void Buffer::poison() { fill_bytes(data(), 0xFF, bytes_, memory_.get_deleter().device); }

OwnedTensor::OwnedTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, int device)
    : memory(static_cast<std::size_t>(rows * heads * dim) * size_of(dtype), device),
      view(memory.data(), dtype, rows, heads, dim, device) {}

Tensor OwnedTensor::rows(std::int64_t count) const noexcept {
  Tensor result = view;
  result.rows = count;
  return result;
}

MirroredTensor::MirroredTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, int device)
    : host_(dtype, rows, heads, dim), mirrored_(device != kCpuDevice) {
  if (mirrored_) device_ = OwnedTensor(dtype, rows, heads, dim, device);
}

void MirroredTensor::upload(std::int64_t count) const {
  if (mirrored_) copy_tensor(device_.rows(count), host_.rows(count));
}

void MirroredTensor::download(std::int64_t count) const {
  if (mirrored_) copy_tensor(host_.rows(count), device_.rows(count));
}

OwnedKvCache::OwnedKvCache(DType dtype, std::int64_t num_pages, std::int32_t page_size, std::int32_t num_kv_heads,
                           std::int32_t head_dim, KvLayout layout, int device)
    : k(static_cast<std::size_t>(num_pages) * page_size * num_kv_heads * head_dim * size_of(dtype), device),
      v(k.bytes(), device),
      view(KvCache::contiguous(k.data(), v.data(), dtype, layout, num_pages, page_size, num_kv_heads, head_dim)) {
  view.device = device;
  k.poison();
  v.poison();
}

OwnedStream::OwnedStream(int device) : stream_(make_stream(device)) {}

void OwnedStream::Destroy::operator()(Stream stream) const noexcept { destroy_stream(stream); }

void check_memory(const std::string& what, double bytes, int device) {
  const double held = memory_of(device);
  if (bytes <= held) return;
  Error error(Status::kOutOfMemory, Reason::kAllocation,
              fmt::format("{} takes {:.1f} GB, {} has {:.1f} GB of memory", what, bytes / 1e9,
                          device == kCpuDevice ? "this machine" : fmt::format("device {}", device), held / 1e9));
  if (bytes < 0x1p63) error.needs(static_cast<std::size_t>(bytes));
  throw error;
}

void synchronize([[maybe_unused]] int device) {
#ifdef FIW_HAS_CUDA
  if (device == kCpuDevice) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
#endif
}

std::unique_ptr<FlashInferWorkspace> open_workspace(int device, const WorkspaceOptions& options) {
  auto workspace = FlashInferWorkspace::create(device, options);
  if (!workspace) {
    throw Error(Status::kUnavailable, Reason::kBackendNotBuilt,
                fmt::format("device_index is {}, this build has no CUDA backend; -1 is the CPU", device));
  }
  return workspace;
}

}  // namespace fiw::cli
