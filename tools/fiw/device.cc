// Host allocations for the tools' tensors, and opening a workspace with a message when there is none.
#include "device.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "fiw/error.h"

namespace fiw::cli {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Scattered pages of a cache miss the TLB as well as the caches, so large blocks ask for huge pages.
void* allocate(std::size_t bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory != nullptr && alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
  return memory;
}

}  // namespace

Buffer::Buffer(std::size_t bytes) : memory_(allocate(bytes)), bytes_(bytes) {
  if (!memory_) {
    throw Error(Status::kOutOfMemory, Reason::kAllocation, fmt::format("no memory for a block of {} bytes", bytes))
        .needs(bytes);
  }
}

void Buffer::Free::operator()(void* memory) const noexcept { std::free(memory); }

void Buffer::poison() noexcept { std::memset(data(), 0xFF, bytes_); }

OwnedTensor::OwnedTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim)
    : memory(static_cast<std::size_t>(rows * heads * dim) * size_of(dtype)),
      view(memory.data(), dtype, rows, heads, dim) {}

Tensor OwnedTensor::rows(std::int64_t count) const noexcept {
  Tensor result = view;
  result.rows = count;
  return result;
}

OwnedKvCache::OwnedKvCache(DType dtype, std::int64_t num_pages, std::int32_t page_size, std::int32_t num_kv_heads,
                           std::int32_t head_dim, KvLayout layout)
    : k(static_cast<std::size_t>(num_pages) * page_size * num_kv_heads * head_dim * size_of(dtype)),
      v(k.bytes()),
      view(KvCache::contiguous(k.data(), v.data(), dtype, layout, num_pages, page_size, num_kv_heads, head_dim)) {
  k.poison();
  v.poison();
}

void check_memory(const std::string& what, double bytes) {
  const double held = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (bytes <= held) return;
  Error error(Status::kOutOfMemory, Reason::kAllocation,
              fmt::format("{} takes {:.1f} GB, this machine has {:.1f} GB of memory", what, bytes / 1e9, held / 1e9));
  if (bytes < 0x1p63) error.needs(static_cast<std::size_t>(bytes));
  throw error;
}

std::unique_ptr<FlashInferWorkspace> open_workspace(int device, const WorkspaceOptions& options) {
  auto workspace = FlashInferWorkspace::create(device, options);
  if (!workspace) {
    throw Error(Status::kUnavailable, Reason::kBackendNotBuilt,
                fmt::format("device {}: this build has no CUDA backend; -1 is the CPU", device));
  }
  return workspace;
}

}  // namespace fiw::cli
