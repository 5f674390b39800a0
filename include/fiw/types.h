// Small vocabulary types shared by every public header: element types, layouts, devices, streams, tensor views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace fiw {

/// Element types of queries, outputs and KV caches. fp8 types are the OCP "fn" (e4m3, no infinities) and e5m2 forms.
/// On CUDA float32 is served as it is, by a kernel that is right rather than fast.
enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

/// Bytes of one element; 0 for a value that DType does not name.
constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
  }
  return 0;
}

/// "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2".
std::string_view to_string(DType dtype) noexcept;

/// True for the values that DType names: a cast can make others, which every call refuses.
constexpr bool is_dtype(DType dtype) noexcept { return size_of(dtype) != 0; }

/// True for the two fp8 types, which are legal for KV caches only.
constexpr bool is_fp8(DType dtype) noexcept { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

/// How a page orders its axes: NHD = [page_size, num_kv_heads, head_dim], HND = [num_kv_heads, page_size, head_dim].
enum class KvLayout : std::uint8_t { kNHD, kHND };

/// Device indices are CUDA ordinals; the CPU is -1.
inline constexpr int kCpuDevice = -1;

/// A `cudaStream_t` on CUDA workspaces; ignored on the CPU, where every call returns when its work is done.
using Stream = void*;

/// A strided view of a [rows, heads, dim] tensor whose last axis is contiguous. Owns nothing.
///
/// Strides are in elements, so a view of a fused QKV projection needs no copy. `Void` is `void` or `const void`.
template <class Void>
struct BasicTensor {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t row_stride = 0;   ///< elements from one row to the next
  std::int64_t head_stride = 0;  ///< elements from one head to the next
  int device = kCpuDevice;

  BasicTensor() = default;
  /// A contiguous tensor.
  BasicTensor(Void* data_, DType dtype_, std::int64_t rows_, std::int64_t heads_, std::int64_t dim_,
              int device_ = kCpuDevice) noexcept
      : BasicTensor(data_, dtype_, rows_, heads_, dim_, heads_ * dim_, dim_, device_) {}
  /// A strided tensor.
  BasicTensor(Void* data_, DType dtype_, std::int64_t rows_, std::int64_t heads_, std::int64_t dim_,
              std::int64_t row_stride_, std::int64_t head_stride_, int device_ = kCpuDevice) noexcept
      : data(data_),
        dtype(dtype_),
        rows(rows_),
        heads(heads_),
        dim(dim_),
        row_stride(row_stride_),
        head_stride(head_stride_),
        device(device_) {}
  /// A mutable view reads as a const one.
  template <class Other>
  requires(std::is_const_v<Void> && !std::is_const_v<Other>) BasicTensor(const BasicTensor<Other>& other)
  noexcept  // NOLINT(google-explicit-constructor)
      : BasicTensor(other.data, other.dtype, other.rows, other.heads, other.dim, other.row_stride, other.head_stride,
                    other.device) {}
};

using Tensor = BasicTensor<void>;
using ConstTensor = BasicTensor<const void>;

}  // namespace fiw
