// Where the tools keep tensors, and the workspace they call: the one place that knows which device is meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fiw/types.h"
#include "fiw/workspace.h"

namespace fiw::cli {

/// A 64-byte aligned block of memory. Host memory, which is where the CPU backend's tensors live.
class Buffer {
 public:
  Buffer() = default;
  /// Uninitialised. Throws fiw::Error (kOutOfMemory) with the bytes asked for.
  explicit Buffer(std::size_t bytes);

  void* data() const noexcept { return memory_.get(); }
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data());
  }
  std::size_t bytes() const noexcept { return bytes_; }
  /// Every byte 0xFF, which is NaN in every element type.
  void poison() noexcept;

 private:
  struct Free {
    void operator()(void* memory) const noexcept;
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
};

/// A contiguous [rows, heads, dim] tensor with its memory.
struct OwnedTensor {
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim);

  /// The first `count` rows.
  Tensor rows(std::int64_t count) const noexcept;

  Buffer memory;
  Tensor view;
};

/// A contiguous NHD cache with its memory, every slot NaN.
struct OwnedKvCache {
  OwnedKvCache(DType dtype, std::int64_t num_pages, std::int32_t page_size, std::int32_t num_kv_heads,
               std::int32_t head_dim, KvLayout layout = KvLayout::kNHD);

  Buffer k;
  Buffer v;
  KvCache view;
};

/// Throws fiw::Error (kOutOfMemory), naming both figures, when this machine has less memory than `bytes`, which `what`
/// takes. Without this, a request for far too much is granted and fails only when the memory is touched.
void check_memory(const std::string& what, double bytes);

/// A workspace on `device`. Throws fiw::Error (kUnavailable) where `create` gives null.
std::unique_ptr<FlashInferWorkspace> open_workspace(int device, const WorkspaceOptions& options);

}  // namespace fiw::cli
