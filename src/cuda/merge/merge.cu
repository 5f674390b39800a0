// One block combines one (row, head), its warps sharing out the states, or four of them. The largest logarithm is taken
// out first, so no exponential overflows; a state without keys is not even read.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/merge/merge.h"

namespace fiw::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPerLane = 4;  ///< values that a lane accumulates at once; they divide every head size
constexpr int kPerPass = 32 * kPerLane;
constexpr int kAtOnce = 4;  ///< states whose values are under way together
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr float kLog2E = 1.44269504088896340736F;
constexpr float kLn2 = 0.693147180559945309417F;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(half* p, float x) { *p = __float2half_rn(x); }

struct PartialSource {
  PartialRows rows;
  std::int32_t heads;
  std::int32_t dim;

  __device__ std::int64_t at(std::int64_t row, std::int32_t i) const {
    return rows.merge_indptr == nullptr ? row : rows.merge_indptr[row] + std::int64_t{i};
  }
  __device__ std::int32_t count(std::int64_t row) const {
    return rows.merge_indptr == nullptr ? 1 : rows.merge_indptr[row + 1] - rows.merge_indptr[row];
  }
  __device__ float log2_sum(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return rows.lse[at(row, i) * heads + head];
  }
  template <class T>
  __device__ const T* values(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return static_cast<const T*>(rows.out) + (at(row, i) * heads + head) * dim;
  }
  __device__ float scale(std::int32_t head) const {
    return rows.v_head_scale == nullptr ? rows.v_scale : rows.v_scale * rows.v_head_scale[head / rows.group];
  }
  __device__ float sink(std::int32_t head) const {
    return rows.sinks == nullptr ? -INFINITY : __fmul_rn(rows.sinks[head], kLog2E);
  }
};

struct StateSource {
  const MergePart* device_parts;
  std::int32_t parts;
  std::int32_t heads;
  MergePart inline_parts[kInlineParts];

  __device__ const MergePart& part(std::int32_t i) const {
    return device_parts != nullptr ? device_parts[i] : inline_parts[i];
  }
  __device__ std::int32_t count(std::int64_t) const { return parts; }
  __device__ float log2_sum(std::int64_t row, std::int32_t head, std::int32_t i) const {
    return part(i).lse[row * heads + head] * kLog2E;
  }
  template <class T>
  __device__ const T* values(std::int64_t row, std::int32_t head, std::int32_t i) const {
    const MergePart& p = part(i);
    return static_cast<const T*>(p.out) + row * p.row_stride + head * p.head_stride;
  }
  __device__ float scale(std::int32_t) const { return 1.0F; }
  __device__ float sink(std::int32_t) const { return -INFINITY; }
};

__device__ __forceinline__ float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

/// Four values side by side, at once where `aligned`.
template <class T>
__device__ __forceinline__ void load_values(float (&x)[kPerLane], const T* from, bool aligned) {
  struct alignas(kPerLane * sizeof(T)) Vector {
    T values[kPerLane];
  };
  if (aligned) {
    const Vector vector = *reinterpret_cast<const Vector*>(from);
    for (int j = 0; j < kPerLane; ++j) x[j] = to_float(vector.values[j]);
  } else {
    for (int j = 0; j < kPerLane; ++j) x[j] = to_float(from[j]);
  }
}

/// `kSharing` warps share the states of a (row, head). `aligned`: values and results can be moved four at a time.
template <int kSharing, class T, class Source>
__global__ void __launch_bounds__(kWarps * 32)
    merge_kernel(const __grid_constant__ Source source, T* out, std::int64_t row_stride, std::int64_t head_stride,
                 float* lse, std::int64_t rows, std::int32_t heads, std::int32_t dim, bool aligned) {
  await_previous_kernel();
  const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x) / 32;
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % 32;
  const std::int32_t share = warp % kSharing;
  const std::int64_t index = std::int64_t{blockIdx.x} * (kWarps / kSharing) + warp / kSharing;
  if (index >= rows * heads) return;  // a whole warp, which shares with no other
  const std::int64_t row = index / heads;
  const auto head = static_cast<std::int32_t>(index - row * heads);
  const std::int32_t count = source.count(row);
  T* const target = out + row * row_stride + head * head_stride;

  // Every warp reckons the weights' norm for itself: it costs less than telling the others.
  float top = -INFINITY;
  bool any_nan = false;  // which fmaxf passes over
  for (std::int32_t i = lane; i < count; i += 32) {
    const float log2_sum = source.log2_sum(row, head, i);
    any_nan |= isnan(log2_sum);
    top = fmaxf(top, log2_sum);
  }
  top = warp_max(top);
  any_nan = __any_sync(kAllLanes, any_nan);
  if (top == -INFINITY && !any_nan) {
    for (std::int32_t d = share * 32 + lane; d < dim; d += kSharing * 32) store(target + d, 0.0F);
    if (lse != nullptr && share == 0 && lane == 0) lse[index] = -INFINITY;
    return;
  }
  const float sink = source.sink(head);
  top = fmaxf(top, sink);
  float sum = 0;
  for (std::int32_t i = lane; i < count; i += 32) sum += exp2f(source.log2_sum(row, head, i) - top);
  sum = warp_sum(sum) + exp2f(sink - top);
  const float norm = source.scale(head) / sum;

  __shared__ float4 shares[kSharing][32];
  for (std::int32_t base = 0; base < dim; base += kPerPass) {
    const std::int32_t d = base + kPerLane * lane;
    // Sums in the same order however many warps share, since that depends on the batch: every kWarps-th state, then
    // those.
    constexpr int kSums = kWarps / kSharing;
    static_assert(kAtOnce % kSums == 0);
    float sums[kSums][kPerLane] = {};
    for (std::int32_t first = 0; first < count; first += 32) {
      const std::int32_t states = min(count - first, 32);
      const float mine = lane < states ? exp2f(source.log2_sum(row, head, first + lane) - top) * norm : 0.0F;
      for (std::int32_t k = share; k < states; k += kAtOnce * kSharing) {
        // All weights, then all values: the values are what takes time.
        float weights[kAtOnce];
        float x[kAtOnce][kPerLane] = {};
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const std::int32_t i = k + u * kSharing;
          weights[u] = __shfl_sync(kAllLanes, mine, i % 32);
          if (i >= states) weights[u] = 0.0F;
          if (weights[u] != 0.0F && d < dim) {
            load_values(x[u], source.template values<T>(row, head, first + i) + d, aligned);
          }
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
          for (int j = 0; j < kPerLane; ++j) sums[u % kSums][j] += weights[u] * x[u][j];
        }
      }
    }
    float(&total)[kPerLane] = sums[0];
    if constexpr (kSharing == 1) {
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        for (int j = 0; j < kPerLane; ++j) total[j] += sums[w][j];
      }
    } else {
      __syncthreads();  // the pass before has been read
      shares[share][lane] = {total[0], total[1], total[2], total[3]};
      __syncthreads();
      if (share == 0) {
#pragma unroll
        for (int w = 1; w < kSharing; ++w) {
          const float4 other = shares[w][lane];
          total[0] += other.x;
          total[1] += other.y;
          total[2] += other.z;
          total[3] += other.w;
        }
      }
    }
    if (share == 0 && d < dim) {
      struct alignas(kPerLane * sizeof(T)) Vector {
        T values[kPerLane];
      } vector;
      for (int j = 0; j < kPerLane; ++j) store(vector.values + j, total[j]);
      if (aligned) {
        *reinterpret_cast<Vector*>(target + d) = vector;
      } else {
        for (int j = 0; j < kPerLane; ++j) target[d + j] = vector.values[j];
      }
    }
  }
  // `lse` may be one of the states' own: every warp has read them by now.
  if (lse != nullptr && share == 0 && lane == 0) lse[index] = (top + log2f(sum)) * kLn2;
}

template <int kSharing, class T, class Source>
cudaError_t launch(const Source& source, const Tensor& out, float* lse, bool aligned, bool ahead, cudaStream_t stream) {
  static_assert(kSharing == 1 || kSharing == kWarps, "warps that share wait for the whole block");
  constexpr int kPerBlock = kWarps / kSharing;
  const auto blocks = static_cast<unsigned>((out.rows * out.heads + kPerBlock - 1) / kPerBlock);
  const auto whole = [](std::int64_t elements) { return elements * std::int64_t{sizeof(T)} % (kPerLane * sizeof(T)); };
  const bool out_aligned = reinterpret_cast<std::uintptr_t>(out.data) % (kPerLane * sizeof(T)) == 0 &&
                           whole(out.row_stride) == 0 && whole(out.head_stride) == 0;
  return launch_ahead(&merge_kernel<kSharing, T, Source>, blocks, kWarps * 32, 0, stream, ahead, source,
                      static_cast<T*>(out.data), out.row_stride, out.head_stride, lse, out.rows,
                      static_cast<std::int32_t>(out.heads), static_cast<std::int32_t>(out.dim), aligned && out_aligned);
}

// Where a warp for each (row, head) fills the device, there is nothing to share: 8 windows of 8 tokens at 32 heads take
// 2.7 us less on an H200, in a call of 44.
template <class T>
cudaError_t launch(const PartialSource& source, const Tensor& out, float* lse, bool ahead, cudaStream_t stream) {
  constexpr std::int64_t kMany = 2048;
  return out.rows * out.heads >= kMany ? launch<1, T>(source, out, lse, true, ahead, stream)
                                       : launch<kWarps, T>(source, out, lse, true, ahead, stream);
}
template <class T>
cudaError_t launch(const StateSource& source, const Tensor& out, float* lse, bool ahead, cudaStream_t stream) {
  return launch<kWarps, T>(source, out, lse, false, ahead, stream);
}

template <class Source>
cudaError_t launch(const Source& source, const Tensor& out, float* lse, bool ahead, cudaStream_t stream) {
  switch (out.dtype) {
    case DType::kFloat32:
      return launch<float>(source, out, lse, ahead, stream);
    case DType::kFloat16:
      return launch<half>(source, out, lse, ahead, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(source, out, lse, ahead, stream);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t load_merge_kernels(bool& ahead) {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(&merge_kernel<1, float, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<1, half, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<1, __nv_bfloat16, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<kWarps, float, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<kWarps, half, PartialSource>),
                             reinterpret_cast<const void*>(&merge_kernel<kWarps, __nv_bfloat16, PartialSource>)}) {
    if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel); status != cudaSuccess) return status;
  }
  ahead = attributes.ptxVersion >= 90;  // what was compiled for older ones does not wait for the kernel before it
  return cudaSuccess;
}

cudaError_t merge_partials(const PartialRows& partials, const Tensor& out, float* lse, bool ahead,
                           cudaStream_t stream) {
  return launch(
      PartialSource{
          .rows = partials, .heads = static_cast<std::int32_t>(out.heads), .dim = static_cast<std::int32_t>(out.dim)},
      out, lse, ahead, stream);
}

cudaError_t merge_states(std::span<const MergePart> parts, const MergePart* device_parts, const Tensor& out, float* lse,
                         bool ahead, cudaStream_t stream) {
  StateSource source{.device_parts = device_parts,
                     .parts = static_cast<std::int32_t>(parts.size()),
                     .heads = static_cast<std::int32_t>(out.heads),
                     .inline_parts = {}};
  if (parts.size() <= kInlineParts) {
    source.device_parts = nullptr;
    std::ranges::copy(parts, source.inline_parts);
  }
  return launch(source, out, lse, ahead, stream);
}

}  // namespace fiw::cuda
