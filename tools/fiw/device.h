// Where the tools keep tensors, and the workspace they call: the one place that knows which device is meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fiw/types.h"
#include "fiw/workspace.h"

namespace fiw::cli {

/// A block of a device's memory, 64-byte aligned or better; host memory for the CPU.
class Buffer {
 public:
  Buffer() = default;
  /// Uninitialised. Throws fiw::Error (kOutOfMemory) with the bytes asked for.
  explicit Buffer(std::size_t bytes, int device = kCpuDevice);

  void* data() const noexcept { return memory_.get(); }
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data());
  }
  std::size_t bytes() const noexcept { return bytes_; }
  /// Every byte 0xFF, which is NaN in every element type.
  void poison();

 private:
  struct Free {
    Free() noexcept : Free(kCpuDevice) {}
    explicit Free(int on) noexcept : device(on) {}
    void operator()(void* memory) const noexcept;
    int device;
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
};

/// A contiguous [rows, heads, dim] tensor with its memory.
struct OwnedTensor {
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, int device = kCpuDevice);

  /// The first `count` rows.
  Tensor rows(std::int64_t count) const noexcept;

  Buffer memory;
  Tensor view;
};

/// A tensor on a device, and a copy of it on the host where that is another place.
class MirroredTensor {
 public:
  MirroredTensor() = default;
  MirroredTensor(DType dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim, int device);

  /// The first `count` rows.
  Tensor host(std::int64_t count) const noexcept { return host_.rows(count); }
  Tensor device(std::int64_t count) const noexcept { return mirrored_ ? device_.rows(count) : host_.rows(count); }
  void upload(std::int64_t count) const;
  void download(std::int64_t count) const;

 private:
  OwnedTensor host_;
  OwnedTensor device_;
  bool mirrored_ = false;
};

/// A contiguous NHD cache with its memory, every slot NaN.
struct OwnedKvCache {
  OwnedKvCache(DType dtype, std::int64_t num_pages, std::int32_t page_size, std::int32_t num_kv_heads,
               std::int32_t head_dim, KvLayout layout = KvLayout::kNHD, int device = kCpuDevice);

  Buffer k;
  Buffer v;
  KvCache view;
};

/// A stream beside a device's default one, which no graph can be captured on; null on the CPU.
class OwnedStream {
 public:
  explicit OwnedStream(int device);

  Stream get() const noexcept { return stream_.get(); }

 private:
  struct Destroy {
    void operator()(Stream stream) const noexcept;
  };
  std::unique_ptr<void, Destroy> stream_;
};

/// Throws fiw::Error (kOutOfMemory), naming both figures, when a device has less memory than `bytes`, which `what`
/// takes. Without this, a request for far too much of the host's is granted and fails only when the memory is touched.
/// A device that is not there is left for open_workspace to tell.
void check_memory(const std::string& what, double bytes, int device = kCpuDevice);
/// Waits for all work on a device; the CPU's is done when its calls return.
void synchronize(int device);

/// A workspace on `device`. Throws fiw::Error (kUnavailable) where `create` gives null.
std::unique_ptr<FlashInferWorkspace> open_workspace(int device, const WorkspaceOptions& options);

}  // namespace fiw::cli
